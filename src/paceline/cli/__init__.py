"""The command line: one module per verb. `main.py` is the entry point."""
