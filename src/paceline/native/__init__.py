"""The CPU step in C, and how it is compiled, found and loaded. Called by `forward/native.py`; imports no torch."""
