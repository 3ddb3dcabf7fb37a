"""RMSNorm, the gate and up projections, and SiLU(gate) * up."""

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives import table
from paceline.kernels.primitives.table import Place, Prepared, Tensors

IMPLEMENTATIONS = ("packed", "reference")


def prepare(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Prepared:
    """A module with `forward(stream) -> activation`: `[T, H + NUM_EXTRA]` f32 -> `[T, I]` f32. Weights: norm, gate, up."""
    return table.prepare(IMPLEMENTATIONS, op, spec, tensors, place)
