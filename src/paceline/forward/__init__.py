"""Runs one model on one batch: the target and the drafter alike."""
