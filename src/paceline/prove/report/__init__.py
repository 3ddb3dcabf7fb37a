"""A proof as people and tools read it: JSON, one HTML page, tables in a terminal. Every figure comes from `results.py`."""
