"""Propose and verify: drafters, the noise, and the only sampler. Called by `executor/step.py`; scheduling policy does not belong here."""
