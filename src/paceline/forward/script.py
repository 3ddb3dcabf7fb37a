"""The program compiled by TorchScript, one call per layer, without Python between the ops of a layer.

For models whose matrices are small: there the interpreter, and the data it drives out of the caches, cost as much as the products.
"""

import sys
import warnings
from collections.abc import Callable
from typing import cast

import torch

from paceline.core.batch import Batch, ForwardResult
from paceline.core.facts import Choice
from paceline.core.kv import KvPages
from paceline.core.program import ModelSpec, Program
from paceline.forward.model import Assembled, order_refusal
from paceline.kernels.primitives.layout import max_group_keys, pass_layout


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
        model = assembled.model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is frozen upstream, which is all this needs
            compile_module = cast(Callable[[torch.nn.Module], torch.nn.Module], vars(torch.jit)["script"])
            self._rotation = compile_module(model.rotation)
            self._embed = compile_module(model.embed)
            # Layers are of one type, so they share one compiled graph: as one graph of all layers, the first passes of a
            # 30-layer model took 9 s instead of 2 s. A call per layer costs a fraction of a percent of a step.
            self._layers = [compile_module(layer) for layer in model.layers]
            self._norm_head = compile_module(model.norm_head)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._choices

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch.float32  # torch's products read nothing narrower: a narrower cache would be widened on every step

    def run(self, batch: Batch, kv: KvPages) -> ForwardResult:
        with torch.inference_mode():
            layout = pass_layout(batch, kv.page_size, self._max_group_keys)
            rotation = self._rotation(layout.positions)
            stream: torch.Tensor = self._embed(layout.token_ids)
            for layer in self._layers:
                stream = layer(stream, kv.kv, rotation, layout)
            return ForwardResult(self._norm_head(stream, layout), stream.narrow(1, 0, self._spec.hidden_size))
