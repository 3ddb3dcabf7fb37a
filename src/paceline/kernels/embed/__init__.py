"""Token ids `[T]` i64 -> the residual stream `[T, H + NUM_EXTRA]` f32."""

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives import table
from paceline.kernels.primitives.table import Place, Prepared, Tensors

IMPLEMENTATIONS = ("reference",)


def prepare(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Prepared:
    """A module with `forward(token_ids) -> stream`. Weights: table."""
    return table.prepare(IMPLEMENTATIONS, op, spec, tensors, place)
