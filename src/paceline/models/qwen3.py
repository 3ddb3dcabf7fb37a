"""Qwen 3: llama with RMSNorm over every q and k head before the rotary positions."""

from paceline.core.program import ModelSpec, Op
from paceline.models.model import HEAD_NORMS, decoder_ops


def ops(spec: ModelSpec) -> tuple[Op, ...]:
    return decoder_ops(spec, HEAD_NORMS)
