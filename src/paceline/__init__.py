"""Paceline: an LLM inference server that decodes speculatively and proves its speed."""

__version__ = "0.1.0"
