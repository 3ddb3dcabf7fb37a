"""The final RMSNorm and the language-model head, for the rows whose logits are wanted."""

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives import table
from paceline.kernels.primitives.table import Place, Prepared, Tensors

IMPLEMENTATIONS = ("packed", "reference")


def prepare(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Prepared:
    """A module with `forward(stream, layout) -> logits`: `[R, V]` f32 for the R rows of `layout.logit_rows`. Weights: norm, head."""
    return table.prepare(IMPLEMENTATIONS, op, spec, tensors, place)
