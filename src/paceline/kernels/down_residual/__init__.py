"""The down projection of the MLP, added to the residual stream."""

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives import table
from paceline.kernels.primitives.table import Place, Prepared, Tensors

IMPLEMENTATIONS = ("packed", "reference")


def prepare(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Prepared:
    """A module with `forward(activation, stream) -> stream`, which is changed in place. Weights: down."""
    return table.prepare(IMPLEMENTATIONS, op, spec, tensors, place)
