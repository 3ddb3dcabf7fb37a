"""Causal attention of every row over its own pages."""

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives import table
from paceline.kernels.primitives.table import Place, Prepared, Tensors

IMPLEMENTATIONS = ("tiled", "reference")


def prepare(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Prepared:
    """A module with `forward(qkv, kv, layout) -> attended`: `[T, (Hq + 2 Hkv) * d]` f32 -> `[T, Hq * d]` f32. No weights."""
    return table.prepare(IMPLEMENTATIONS, op, spec, tensors, place)
