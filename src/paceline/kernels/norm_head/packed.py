"""The head as a packed matrix. A tied embedding keeps its table beside it: the look-up cannot read the packed layout."""

import torch

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives.layout import PassLayout
from paceline.kernels.primitives.linear import pack_linear
from paceline.kernels.primitives.residual import norm_gain, normalise
from paceline.kernels.primitives.table import Built, Place, Tensors, weight


class NormHead(torch.nn.Module):
    def __init__(self, gain: torch.Tensor, linear: torch.nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.gain = gain
        self.linear = linear
        self.vocab_size = vocab_size

    def forward(self, stream: torch.Tensor, layout: PassLayout) -> torch.Tensor:
        num_rows = layout.logit_rows.size(0)
        if num_rows == 0:  # every row is in mid-prompt
            return torch.empty([0, self.vocab_size])
        rows = stream
        if not layout.all_logits:
            rows = stream.index_select(0, layout.logit_rows)
        return self.linear(normalise(rows, self.gain))


def supports(spec: ModelSpec, place: Place) -> str | None:
    return None


def build(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Built:
    packed = pack_linear(weight(op, "head", tensors), None, place)
    return Built(
        NormHead(norm_gain(weight(op, "norm", tensors)), packed.module, spec.vocab_size), packed.weight_bytes, packed.name, packed.reason
    )
