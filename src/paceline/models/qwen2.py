"""Qwen 2 and 2.5: llama with biases on q, k and v."""

from paceline.core.program import ModelSpec, Op
from paceline.models.model import QKV_BIAS, decoder_ops


def ops(spec: ModelSpec) -> tuple[Op, ...]:
    return decoder_ops(spec, QKV_BIAS)
