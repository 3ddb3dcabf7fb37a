"""The HTTP edge: OpenAI's API in front of an engine. All text work (templates, tokenizer, stop strings) stays here; torch never does."""
