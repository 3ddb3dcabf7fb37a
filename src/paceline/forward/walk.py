"""The walk: each op of the program in turn, from Python. The oracle of the other runners, and the runner that runs everywhere."""

import torch

from paceline.core.batch import Batch, ForwardResult
from paceline.core.facts import Choice
from paceline.core.kv import KvPages
from paceline.core.program import ModelSpec, Program
from paceline.forward.model import Assembled, order_refusal
from paceline.kernels.primitives.layout import max_group_keys, pass_layout


def supports(program: Program) -> str | None:
    """None, or the reason why not."""
    return order_refusal(program)


class Walk:
    """A `Forward` that runs the assembled module as it is."""

    def __init__(self, spec: ModelSpec, assembled: Assembled, reason: str) -> None:
        self._spec = spec
        self._max_group_keys = max_group_keys(spec)
        self._assembled = assembled
        self._choices = (Choice("forward", "walk", reason), *assembled.choices)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._choices

    @property
    def weight_bytes(self) -> int:
        return self._assembled.weight_bytes

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch.float32  # torch's products read nothing narrower: a narrower cache would be widened on every step

    def run(self, batch: Batch, kv: KvPages) -> ForwardResult:
        with torch.inference_mode():
            layout = pass_layout(batch, kv.page_size, self._max_group_keys)
            logits, stream = self._assembled.model(kv.kv, layout)
            return ForwardResult(logits, stream.narrow(1, 0, self._spec.hidden_size))
