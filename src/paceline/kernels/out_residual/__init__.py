"""The output projection of attention, added to the residual stream."""

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives import table
from paceline.kernels.primitives.table import Place, Prepared, Tensors

IMPLEMENTATIONS = ("packed", "reference")


def prepare(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Prepared:
    """A module with `forward(attended, stream) -> stream`, which is changed in place. Weights: out."""
    return table.prepare(IMPLEMENTATIONS, op, spec, tensors, place)
