"""The matrices of a program in the layout of the native step: packed from blocks or floats, or mapped from the cache on disk.

`load.py` calls it once per model. What a format is stands in `quant/`, what the layout is in native/paceline_native.h.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.facts import Choice
from paceline.core.program import ModelSpec, Op, OpKind, Program
from paceline.core.progress import Progress
from paceline.forward.packed_cache import PackedCache
from paceline.kernels.primitives.table import Tensors
from paceline.models.spec import tensor_shapes
from paceline.native.library import DATA_ALIGNMENT, GROUP, TILE_ROWS, Format, Library
from paceline.quant.assignment import assign, is_four_bit
from paceline.quant.blocks import from_blocks, is_exact
from paceline.quant.scheme import SCHEME_OF, QuantisedRows, quantise, stack

ROLES: dict[OpKind, tuple[tuple[str, ...], ...]] = {  # the matrices of an op, each the rows of one or several weights
    OpKind.EMBED: (("table",),),
    OpKind.NORM_QKV_ROPE_WRITE: (("q", "k", "v"),),
    OpKind.PAGED_ATTENTION: (),
    OpKind.OUT_RESIDUAL: (("out",),),
    OpKind.NORM_GATE_UP: (("gate",), ("up",)),
    OpKind.DOWN_RESIDUAL: (("down",),),
    OpKind.NORM_HEAD: (("head",),),
}
_CHUNK_ELEMENTS = 1 << 22  # that one thread quantises at a time: 16 MB of float32
_MAX_WORKERS = 4

Names: TypeAlias = tuple[str, ...]


class Blocks(Protocol):
    """Quantised matrices of a checkpoint (`models.blocks.BlockTensors`)."""

    @property
    def kinds(self) -> Mapping[str, str]: ...
    def rows(self, name: str) -> NDArray[np.uint8]: ...


@dataclass(frozen=True, slots=True)
class Weights:
    """Where a model's weights come from: all of them as float32, and some as blocks too."""

    tensors: Tensors
    blocks: Blocks

    def kinds(self, names: Names) -> list[str | None]:
        """ggml's type of each tensor, None for floats."""
        return [self.blocks.kinds.get(name) for name in names]


class NoBlocks:
    """A checkpoint of floats."""

    @property
    def kinds(self) -> Mapping[str, str]:
        return {}

    def rows(self, name: str) -> NDArray[np.uint8]:
        raise AssertionError(f"{name} is not among the blocks")


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """A matrix to be packed: the rows of these tensors, one after the other."""

    names: Names
    num_rows: int
    num_inputs: int
    format: Format


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    data: NDArray[np.uint8]  # [bytes], 64-byte aligned
    num_rows: int
    num_inputs: int
    format: Format


def matrix_names(op: Op) -> list[Names]:
    """The tensors of each of the op's matrices."""
    weights = dict(op.weights)
    return [tuple(weights[role] for role in roles) for roles in ROLES[op.kind]]


def plan_matrices(program: Program, scheme: str, weights: Weights) -> list[MatrixPlan]:
    """Every matrix once: a head that is the embedding is one matrix with it."""
    shapes = tensor_shapes(program.spec)
    keep_blocks = is_four_bit_checkpoint(program, weights.blocks)
    plans: dict[Names, MatrixPlan] = {}
    for op in program.ops:
        for names in matrix_names(op):
            fmt = assign(scheme, weights.kinds(names), op.layer >= 0, keep_blocks)
            plans[names] = MatrixPlan(names, sum(shapes[name][0] for name in names), shapes[names[0]][1], fmt)
    return list(plans.values())


def is_four_bit_checkpoint(program: Program, blocks: Blocks) -> bool:
    """Whether most weights of the layers are blocks of 4 bits."""
    shapes = tensor_shapes(program.spec)
    names = [name for op in program.ops if op.layer >= 0 for matrix in matrix_names(op) for name in matrix]
    return is_four_bit((blocks.kinds.get(name), shapes[name][0] * shapes[name][1]) for name in names)


def shape_refusal(spec: ModelSpec) -> str | None:
    """None if the native layout holds all matrices of such a model, else why not."""
    widths = {
        "hidden size": spec.hidden_size,
        "width of the attention heads together": spec.num_heads * spec.head_dim,
        "intermediate size": spec.intermediate_size,
    }
    for what, width in widths.items():
        if width % GROUP:
            return f"the {what} is {width:,}, not a multiple of {GROUP}, the number of weights that share a scale"
    return None


def packed_matrices(
    plans: Sequence[MatrixPlan], weights: Weights, library: Library, cache: PackedCache | None, stage: str, progress: Progress
) -> dict[Names, PackedMatrix]:
    """All matrices of `plans`, mapped from `cache` if they are there; else packed, and put there.

    Errors: BadInputError or UnsupportedModelError for weights that cannot be quantised.
    """
    sizes = [_num_bytes(plan, library) for plan in plans]
    mapped = cache.read(sizes) if cache is not None else None
    if mapped is None and cache is not None and cache.write(_packed_one_by_one(plans, weights, library, stage, progress), sizes):
        mapped = cache.read(sizes)
    if mapped is None:  # no cache, or a disk that is full or read-only
        mapped = list(_packed_one_by_one(plans, weights, library, stage, progress))
    progress.update(stage, len(plans), len(plans))
    return {plan.names: PackedMatrix(data, plan.num_rows, plan.num_inputs, plan.format) for plan, data in zip(plans, mapped, strict=True)}


def weight_choice(plans: Sequence[MatrixPlan], weights: Weights) -> Choice:
    """The line of the start-up table that says what became of the checkpoint's weights."""
    kept: Counter[str] = Counter()
    changed: Counter[tuple[str, str]] = Counter()
    for plan in plans:
        for kind in weights.kinds(plan.names):
            if kind is not None and is_exact(kind, plan.format):
                kept[kind] += 1
            else:
                changed[kind or "floats", SCHEME_OF[plan.format]] += 1
    phrases = [f"{count} {kind} matrices as in the file" for kind, count in sorted(kept.items())]
    phrases += [f"{count} from {kind} to {scheme}" for (kind, scheme), count in sorted(changed.items())]
    schemes = dict.fromkeys(SCHEME_OF[plan.format] for plan in plans)
    return Choice("weights", ", ".join(sorted(schemes)), "; ".join(phrases))


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros at an address that the kernels take."""
    block = np.zeros(num_bytes + DATA_ALIGNMENT, np.uint8)
    start = -block.ctypes.data % DATA_ALIGNMENT
    return block[start : start + num_bytes]


def _num_bytes(plan: MatrixPlan, library: Library) -> int:
    return library.packed_bytes(plan.format, plan.num_rows, plan.num_inputs)


def _packed_one_by_one(
    plans: Sequence[MatrixPlan], weights: Weights, library: Library, stage: str, progress: Progress
) -> Iterator[NDArray[np.uint8]]:
    """In order, a few matrices at a time: numpy and the packing work outside Python's lock."""

    def pack(plan: MatrixPlan) -> NDArray[np.uint8]:
        return _pack(plan, weights, library)

    num_workers = min(torch.get_num_threads(), _MAX_WORKERS)
    with ThreadPoolExecutor(num_workers) as pool:
        for index, packed in enumerate(pool.map(pack, plans)):
            progress.update(stage, index, len(plans))
            yield packed


def _pack(plan: MatrixPlan, weights: Weights, library: Library) -> NDArray[np.uint8]:
    packed = aligned(_num_bytes(plan, library))
    tile_bytes = library.packed_bytes(plan.format, TILE_ROWS, plan.num_inputs)
    first_tile = 0
    for rows in _quantised(plan, weights):
        num_rows = rows.elements.shape[0]
        elements, scales = np.ascontiguousarray(rows.elements), np.ascontiguousarray(rows.scales)
        minima = None if rows.minima is None else np.ascontiguousarray(rows.minima)
        assert elements.shape == (num_rows, plan.num_inputs), f"{plan.names}: rows of {elements.shape[1]} inputs"
        assert scales.shape == (num_rows, plan.num_inputs // GROUP), f"{plan.names}: {scales.shape} scales"
        end_tile = first_tile + -(-num_rows // TILE_ROWS)
        assert end_tile * tile_bytes <= packed.nbytes, f"{plan.names}: more than {plan.num_rows} rows"
        library.pack(
            plan.format,
            num_rows,
            plan.num_inputs,
            elements.ctypes.data,
            scales.ctypes.data,
            0 if minima is None else minima.ctypes.data,
            packed.ctypes.data + first_tile * tile_bytes,
        )
        first_tile = end_tile
    assert first_tile * tile_bytes == packed.nbytes, f"{plan.names}: fewer than {plan.num_rows} rows"
    return packed


def _quantised(plan: MatrixPlan, weights: Weights) -> Iterator[QuantisedRows]:
    """The matrix in pieces of whole tiles; one that has parts is one piece, for a part may end within a tile."""
    pieces = (rows for name in plan.names for rows in _rows_of(name, plan, weights))
    if len(plan.names) > 1:
        yield stack(pieces)
    else:
        yield from pieces


def _rows_of(name: str, plan: MatrixPlan, weights: Weights) -> Iterator[QuantisedRows]:
    step = max(_CHUNK_ELEMENTS // plan.num_inputs // TILE_ROWS, 1) * TILE_ROWS
    kind = weights.blocks.kinds.get(name)
    if kind is not None:
        blocks = weights.blocks.rows(name)
        for start in range(0, blocks.shape[0], step):
            yield from_blocks(kind, blocks[start : start + step], plan.format)
        return
    tensor = weights.tensors[name]
    for start in range(0, tensor.shape[0], step):
        yield quantise(plan.format, tensor[start : start + step].to(torch.float32).contiguous().numpy())
