"""The program compiled once by TorchScript into one call per pass, without Python between its ops.

For models whose matrices are small: there the interpreter, and the data it drives out of the caches, cost as much as the products.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Protocol, cast

import torch

from paceline.core.batch import Batch, ForwardResult
from paceline.core.facts import Choice
from paceline.core.kv import KvPages
from paceline.core.program import ModelSpec, Program
from paceline.forward.model import Assembled, order_refusal
from paceline.kernels.primitives.layout import PassLayout, max_group_keys, pass_layout


class _Compiled(Protocol):
    def forward(self, kv: torch.Tensor, layout: PassLayout) -> tuple[torch.Tensor, torch.Tensor]: ...


def supports(program: Program, assembled: Assembled) -> str | None:
    """None, or the reason why not."""
    if assembled.not_scriptable:
        return f"the implementation of {', '.join(assembled.not_scriptable)} is plain Python"
    if sys.version_info >= (3, 14):
        return "TorchScript does not support Python 3.14 and later"
    return order_refusal(program)


class Script:
    """A `Forward` that runs the compiled module."""

    def __init__(self, spec: ModelSpec, assembled: Assembled) -> None:
        self._spec = spec
        self._max_group_keys = max_group_keys(spec)
        self._weight_bytes = assembled.weight_bytes
        self._choices = (Choice("forward", "script", "first choice"), *assembled.choices)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is frozen upstream, which is all this needs
            compile_module = cast(Callable[[torch.nn.Module], _Compiled], vars(torch.jit)["script"])
            self._forward = compile_module(assembled.model).forward

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._choices

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    def run(self, batch: Batch, kv: KvPages) -> ForwardResult:
        with torch.inference_mode():
            layout = pass_layout(batch, kv.page_size, self._max_group_keys)
            logits, stream = self._forward(kv.kv, layout)
            return ForwardResult(logits, stream.narrow(1, 0, self._spec.hidden_size))
