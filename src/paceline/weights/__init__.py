"""Where models come from and where they live on disk. Torch-free; used by the CLI, `llm.py` and start-up, never by the engine."""
