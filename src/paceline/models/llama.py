"""Llama 2 and 3, SmolLM2 and others of the same shape."""

from paceline.core.program import ModelSpec, Op
from paceline.models.model import decoder_ops


def ops(spec: ModelSpec) -> tuple[Op, ...]:
    return decoder_ops(spec)
