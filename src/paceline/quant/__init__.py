"""Weights as small integers with a scale per group: from floats, and from the blocks of GGUF files."""
