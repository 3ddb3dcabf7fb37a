"""Prompts: SPEED-Bench as it is distributed, Spec-Bench, any JSONL, and the set that ships with the project."""
