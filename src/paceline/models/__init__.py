"""Architectures as lists of ops, and model folders: read, checked, converted. Only `checkpoint.py` and what runs a model reach torch."""
