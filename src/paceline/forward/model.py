"""A program as one torch module: the ops that the kernel table gave, in the order in which the program lists them.

`load.py` builds it; the walk runs it op by op, the script runner compiles it. Signatures of ops stand in `kernels/<op>/__init__.py`.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import torch

from paceline.core.facts import Choice
from paceline.core.program import ModelSpec, Op, OpKind, Program
from paceline.core.progress import Progress
from paceline.kernels.primitives.layout import PassLayout
from paceline.kernels.primitives.rotation import Rotation
from paceline.kernels.primitives.table import Place, Prepared, Tensors

_LAYER = (OpKind.NORM_QKV_ROPE_WRITE, OpKind.PAGED_ATTENTION, OpKind.OUT_RESIDUAL, OpKind.NORM_GATE_UP, OpKind.DOWN_RESIDUAL)
_MAX_WORKERS = 4  # each holds a matrix or two in float32 while it packs


class DecoderLayer(torch.nn.Module):
    """The five ops of one layer."""

    def __init__(self, ops: list[torch.nn.Module]) -> None:
        super().__init__()
        self.norm_qkv_rope_write, self.paged_attention, self.out_residual, self.norm_gate_up, self.down_residual = ops

    def forward(self, stream: torch.Tensor, kv: torch.Tensor, rotation: torch.Tensor, layout: PassLayout) -> torch.Tensor:
        qkv = self.norm_qkv_rope_write(stream, kv, rotation, layout)
        stream = self.out_residual(self.paged_attention(qkv, kv, layout), stream)
        return self.down_residual(self.norm_gate_up(stream), stream)


class Model(torch.nn.Module):
    """`forward(kv, layout)` -> (logits `[R, V]`, stream `[T, H + NUM_EXTRA]` after the last layer)."""

    def __init__(self, rotation: Rotation, embed: torch.nn.Module, layers: list[torch.nn.Module], norm_head: torch.nn.Module) -> None:
        super().__init__()
        self.rotation = rotation
        self.embed = embed
        self.layers = torch.nn.ModuleList(layers)
        self.norm_head = norm_head

    def forward(self, kv: torch.Tensor, layout: PassLayout) -> tuple[torch.Tensor, torch.Tensor]:
        rotation = self.rotation(layout.positions)
        stream = self.embed(layout.token_ids)
        for layer in self.layers:
            stream = layer(stream, kv, rotation, layout)
        return self.norm_head(stream, layout), stream


@dataclass(frozen=True, slots=True)
class Assembled:
    """A model in memory, not yet bound to a runner."""

    model: Model
    weight_bytes: int
    choices: tuple[Choice, ...]  # one line per op kind and choice, layers together
    not_scriptable: tuple[str, ...]  # the ops that TorchScript cannot compile


class _OpFolder(Protocol):
    """`kernels/<op>/__init__.py`."""

    def prepare(self, op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Prepared: ...


def order_refusal(program: Program) -> str | None:
    """None if the ops come in the order this module runs: embed, five ops for each layer, head; else what is wrong."""
    kinds = tuple(op.kind for op in program.ops)
    expected = (OpKind.EMBED, *_LAYER * program.spec.num_layers, OpKind.NORM_HEAD)
    if len(kinds) != len(expected):
        return f"the program has {len(kinds)} ops, {program.spec.num_layers} layers make {len(expected)}"
    for index, (kind, wanted) in enumerate(zip(kinds, expected, strict=True)):
        if kind != wanted:
            return f"op {index} is {kind}, not {wanted}"
    return None


def assemble(program: Program, tensors: Tensors, place: Place, stage: str, progress: Progress) -> Assembled:
    """Prepare the ops, a few at a time, so that only their matrices exist twice; `progress` counts ops."""

    def prepare(op: Op) -> Prepared:
        folder = cast(_OpFolder, import_module(f"paceline.kernels.{op.kind}"))
        return folder.prepare(op, program.spec, tensors, place)

    modules: list[torch.nn.Module] = []
    choices: list[Choice] = []
    not_scriptable: dict[str, None] = {}
    weight_bytes = 0
    num_workers = min(torch.get_num_threads(), _MAX_WORKERS)
    with ThreadPoolExecutor(num_workers) as pool:  # packing is serial code outside Python's lock
        for op, prepared in zip(program.ops, pool.map(prepare, program.ops), strict=True):
            modules.append(prepared.module)
            weight_bytes += prepared.weight_bytes
            if not prepared.is_scriptable:
                not_scriptable[op.kind] = None
            if prepared.choice not in choices:
                choices.append(prepared.choice)
            progress.update(stage, len(modules), len(program.ops))
    size = len(_LAYER)
    layers: list[torch.nn.Module] = [DecoderLayer(modules[i : i + size]) for i in range(1, len(modules) - 1, size)]
    model = Model(Rotation(program.spec), modules[0], layers, modules[-1]).eval()
    return Assembled(model, weight_bytes, tuple(choices), tuple(not_scriptable))
