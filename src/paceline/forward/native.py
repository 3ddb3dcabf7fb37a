"""The program in C: one call per pass, on packed weights, with KV in half precision. The runner of quantised models on a CPU.

C checks nothing, so everything that it reads is checked here: the program's shapes once, and each batch before it is handed over.
"""

import threading
import weakref
from collections.abc import Mapping, Sequence
from ctypes import addressof, c_int32, c_int64
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.batch import Batch, ForwardResult
from paceline.core.facts import Choice
from paceline.core.kv import KvPages
from paceline.core.program import ModelSpec, Op, OpKind, Program
from paceline.errors import BadInputError, MissingError
from paceline.forward.model import order_refusal
from paceline.forward.packed import Names, PackedMatrix, matrix_names, shape_refusal
from paceline.kernels.primitives.rotation import frequencies
from paceline.kernels.primitives.table import Tensors
from paceline.native import library as native
from paceline.native.library import Library

OP_KINDS = tuple(OpKind)  # their places are pl_kind's numbers
_HEAD_STEP = 16  # elements of a head that attention takes at a time
_FIRST_TOKENS, _FIRST_LOGITS, _FIRST_PAGES = 64, 16, 256  # room at first; it grows with the largest pass
_MAX_KEPT_ROWS = 64  # of logits and hidden states whose memory is kept: new memory costs a page fault per 4 KB
_MAX_POSITION = 2**31 - 1

Vector = NDArray[np.float32]


def supports(program: Program) -> str | None:
    """None, or the reason why not."""
    return _heads_refusal(program.spec) or order_refusal(program) or shape_refusal(program.spec)


def _heads_refusal(spec: ModelSpec) -> str | None:
    """None if attention has room for such heads, else why not."""
    head_dim, num_heads, num_kv_heads = spec.head_dim, spec.num_heads, spec.num_kv_heads
    if head_dim % _HEAD_STEP:
        return f"heads have {head_dim} elements, not a multiple of {_HEAD_STEP}"
    if head_dim > native.MAX_HEAD_DIM:
        return f"heads have {head_dim} elements, more than {native.MAX_HEAD_DIM}"
    if num_heads % num_kv_heads:
        return f"{num_heads} heads cannot share {num_kv_heads} KV heads evenly"
    num_sharing = num_heads // num_kv_heads
    if num_sharing > native.ATTEND_QUERIES:
        return f"{num_sharing} heads share a KV head, more than {native.ATTEND_QUERIES}"
    width = num_sharing * head_dim
    if width % native.GROUP:  # what they give is quantised together, in whole groups
        return f"the heads that share a KV head have {width} elements together, not a multiple of {native.GROUP}"
    return None


class Pool:
    """Threads that run passes; target and drafter share one, for they take turns."""

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library = library
        self.num_threads = num_threads
        self.lock = threading.Lock()  # one pass at a time
        self.handle = library.pool_new(num_threads)
        if not self.handle:
            raise MissingError(f"{num_threads} threads cannot be started; lower --threads or raise the limit on processes")
        weakref.finalize(self, library.pool_free, self.handle).atexit = False  # a pass may be going on when the interpreter ends


@dataclass(frozen=True, slots=True)
class Vectors:
    """The small weights, as C reads them: float32, one after the other."""

    norms: Mapping[str, Vector]  # by tensor name
    qkv_bias: Sequence[Vector | None]  # by layer: of q, k and v together
    frequencies: Vector  # [head_dim / 2]


def read_vectors(program: Program, tensors: Tensors) -> Vectors:
    """The norms, biases and rotary frequencies of a program. Errors: BadInputError for one of another length than the model needs."""
    spec = program.spec
    sizes = {"norm": spec.hidden_size, "q_norm": spec.head_dim, "k_norm": spec.head_dim}
    sizes |= {"q_bias": spec.num_heads * spec.head_dim, "k_bias": spec.num_kv_heads * spec.head_dim}
    sizes["v_bias"] = sizes["k_bias"]
    norms: dict[str, Vector] = {}
    biases: list[Vector | None] = []
    for op in program.ops:
        parts: dict[str, Vector] = {}
        for role, name in op.weights:
            if role in sizes:
                parts[role] = norms[name] = _vector(name, tensors[name], sizes[role])
        if op.kind is OpKind.NORM_QKV_ROPE_WRITE:
            found = [parts[role] for role in ("q_bias", "k_bias", "v_bias") if role in parts]
            assert len(found) in (0, 3), "q, k and v have biases together or not at all"
            biases.append(np.concatenate(found) if found else None)
    return Vectors(norms, biases, np.ascontiguousarray(frequencies(spec).numpy(), np.float32))


def _vector(name: str, tensor: torch.Tensor, size: int) -> Vector:
    if tuple(tensor.shape) != (size,):
        raise BadInputError(f"{name} has shape {list(tensor.shape)}, the model needs [{size}]; its weights and config.json do not match")
    return np.array(tensor.to(torch.float32).numpy(), np.float32)  # a copy: the file may be closed


class Native:
    """A `Forward` that runs the C program."""

    def __init__(
        self,
        program: Program,
        matrices: Mapping[Names, PackedMatrix],
        vectors: Vectors,
        pool: Pool,
        choices: Sequence[Choice],
    ) -> None:
        refusal = supports(program)
        assert refusal is None, refusal
        self._spec = program.spec
        self._library = pool.library
        self._pool = pool
        reason = f"one call per step, {pool.library.variant}, {pool.num_threads} threads"
        self._choices = (Choice("forward", "native", reason), *choices)
        self._weight_bytes = sum(matrix.data.nbytes for matrix in matrices.values())
        self.weight_bytes_by_kind = dict.fromkeys(OP_KINDS, 0)
        for op in program.ops:
            self.weight_bytes_by_kind[op.kind] += sum(matrices[names].data.nbytes for names in matrix_names(op))
        self._program = _CProgram(program, matrices, vectors, pool.library)
        self._batch = _BatchMemory()
        self._logits = _ResultMemory(self._spec.vocab_size)
        self._hidden = _ResultMemory(self._spec.hidden_size)
        self._kv: KvPages | None = None  # the one that was checked last
        self._c_kv = native.Kv()
        self.profile_ns: NDArray[np.int64] | None = None  # [kinds of ops], added to by each pass if it is there

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
        return torch.float16

    def run(self, batch: Batch, kv: KvPages) -> ForwardResult:
        """See `Forward.run`. Errors: BadInputError for a batch that does not fit the model or the KV memory; nothing is run then."""
        if kv is not self._kv:
            self._take_kv(kv)
        check_batch(batch, self._spec.vocab_size, kv.page_size, self._c_kv.num_slots)
        num_tokens, num_logits = len(batch.token_ids_host), len(batch.logit_rows_host)
        with self._pool.lock:
            model = self._program.model(num_tokens, num_logits)
            c_batch = self._batch.fill(batch, kv.page_size)
            logits, hidden = self._logits.rows(num_logits), self._hidden.rows(num_tokens)
            profile = 0 if self.profile_ns is None else self.profile_ns.ctypes.data
            failure = self._library.run(self._pool.handle, model, c_batch, self._c_kv, logits.data_ptr(), hidden.data_ptr(), profile)
        if failure == native.TOO_MANY_TASKS:
            raise BadInputError(f"a pass of {num_tokens:,} tokens is more than the native step can divide; lower --max-num-batched-tokens")
        if failure:
            raise MissingError(f"there is too little memory for a pass of {num_tokens:,} tokens; lower --max-num-batched-tokens")
        return ForwardResult(logits, hidden)

    def _take_kv(self, kv: KvPages) -> None:
        spec, memory = self._spec, kv.kv
        expected = (spec.num_layers, 2, spec.num_kv_heads, memory.shape[3] if memory.dim() == 5 else -1, spec.head_dim)
        if tuple(memory.shape) != expected or memory.dtype is not torch.float16 or not memory.is_contiguous() or kv.page_size < 1:
            raise BadInputError(f"KV memory {list(memory.shape)} of {memory.dtype} is not the float16 {list(expected)} of this model")
        self._kv = kv  # held, so that its address stays its own
        self._c_kv = native.Kv(data=memory.data_ptr(), num_slots=memory.shape[3])


def check_batch(batch: Batch, vocab_size: int, page_size: int, num_slots: int) -> None:
    """Raise BadInputError for a batch that would make C read or write outside its memory."""
    token_ids, starts = batch.token_ids_host, batch.query_start_host
    num_tokens, num_rows = len(token_ids), len(starts) - 1
    if num_tokens == 0 or num_rows < 1 or starts[0] != 0 or starts[-1] != num_tokens:
        raise BadInputError(f"a batch of {num_tokens} tokens in {num_rows} rows that start at {list(starts)}")
    if len(batch.kv_lens_host) != num_rows or len(batch.page_ids_host) != num_rows:
        raise BadInputError(f"{num_rows} rows have {len(batch.kv_lens_host)} KV lengths and {len(batch.page_ids_host)} page lists")
    if len(batch.write_slots_host) != num_tokens or len(batch.positions_host) != num_tokens:
        raise BadInputError(f"{num_tokens} tokens, {len(batch.positions_host)} positions, {len(batch.write_slots_host)} slots")
    _check_range("token id", token_ids, vocab_size)
    _check_range("slot", batch.write_slots_host, num_slots)
    if batch.logit_rows_host:
        _check_range("row of logits", batch.logit_rows_host, num_tokens)
    num_pages = num_slots // page_size
    for row in range(num_rows):
        start, end, kv_len, pages = starts[row], starts[row + 1], batch.kv_lens_host[row], batch.page_ids_host[row]
        if not 0 < end - start <= kv_len <= _MAX_POSITION:
            raise BadInputError(f"row {row} has {end - start} tokens and {kv_len} in the cache after them")
        if batch.positions_host[start:end] != list(range(kv_len - (end - start), kv_len)):
            raise BadInputError(f"the positions of row {row} are not those of its last {end - start} of {kv_len} tokens")
        if len(pages) * page_size < kv_len:
            raise BadInputError(f"row {row} has {len(pages)} pages of {page_size} tokens for {kv_len}")
        _check_range("page", pages, num_pages)


def _check_range(what: str, values: Sequence[int], limit: int) -> None:
    if min(values) < 0 or max(values) >= limit:
        raise BadInputError(f"a {what} of the batch is outside 0..{limit - 1}: they reach from {min(values)} to {max(values)}")


class _CProgram:
    """The C model, made anew with more scratch memory when a pass needs it; its weights stay where they are."""

    def __init__(self, program: Program, matrices: Mapping[Names, PackedMatrix], vectors: Vectors, library: Library) -> None:
        self._library = library
        self._kept = (matrices, vectors)  # C has their addresses
        self._shape = _shape(program.spec, vectors)
        self._ops = [_c_op(op, program.spec, matrices, vectors) for op in program.ops]
        self._max_tokens, self._max_logits = _FIRST_TOKENS, _FIRST_LOGITS
        self._handle, self._free = self._new(_FIRST_TOKENS, _FIRST_LOGITS)

    def model(self, num_tokens: int, num_logits: int) -> int:
        """The model's address, with room for such a pass. Errors: MissingError."""
        if num_tokens > self._max_tokens or num_logits > self._max_logits:
            max_tokens = max(self._max_tokens, _power_of_two(num_tokens))
            max_logits = max(self._max_logits, _power_of_two(num_logits))
            handle, free = self._new(max_tokens, max_logits)  # may fail: the limits stay those of the model that is there
            self._free()
            self._handle, self._free, self._max_tokens, self._max_logits = handle, free, max_tokens, max_logits
        return self._handle

    def _new(self, max_tokens: int, max_logits: int) -> tuple[int, "weakref.finalize[[int], _CProgram]"]:
        handle = self._library.model_new(self._shape, self._ops, max_tokens, max_logits)
        if not handle:
            raise MissingError(f"there is too little memory for a pass of {max_tokens:,} tokens; lower --max-num-batched-tokens")
        free: weakref.finalize[[int], _CProgram] = weakref.finalize(self, self._library.model_free, handle)
        free.atexit = False  # a pass may be going on when the interpreter ends
        return handle, free


def _shape(spec: ModelSpec, vectors: Vectors) -> native.Shape:
    assert vectors.frequencies.shape == (spec.head_dim // 2,), f"{vectors.frequencies.shape} frequencies"
    return native.Shape(
        num_layers=spec.num_layers,
        hidden=spec.hidden_size,
        intermediate=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab=spec.vocab_size,
        eps=spec.rms_norm_eps,
        frequencies=vectors.frequencies.ctypes.data,
    )


def _expected_shapes(spec: ModelSpec) -> dict[OpKind, tuple[tuple[int, int], ...]]:
    """Rows and inputs of each matrix of an op: what C derives from the model's shape."""
    q_size, kv_size, hidden = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
    return {
        OpKind.EMBED: ((spec.vocab_size, hidden),),
        OpKind.NORM_QKV_ROPE_WRITE: ((q_size + 2 * kv_size, hidden),),
        OpKind.PAGED_ATTENTION: (),
        OpKind.OUT_RESIDUAL: ((hidden, q_size),),
        OpKind.NORM_GATE_UP: ((spec.intermediate_size, hidden), (spec.intermediate_size, hidden)),
        OpKind.DOWN_RESIDUAL: ((hidden, spec.intermediate_size),),
        OpKind.NORM_HEAD: ((spec.vocab_size, hidden),),
    }


def _c_op(op: Op, spec: ModelSpec, matrices: Mapping[Names, PackedMatrix], vectors: Vectors) -> native.Op:
    held = [matrices[names] for names in matrix_names(op)]
    shapes = tuple((matrix.num_rows, matrix.num_inputs) for matrix in held)
    expected = _expected_shapes(spec)[op.kind]
    if shapes != expected:
        raise BadInputError(f"{op.kind} of layer {op.layer} has matrices of {shapes}, the model needs {expected}")
    bias = vectors.qkv_bias[op.layer] if op.kind is OpKind.NORM_QKV_ROPE_WRITE else None
    first = _c_matrix(held[0], bias) if held else native.Matrix()
    second = _c_matrix(held[1], None) if len(held) > 1 else native.Matrix()
    gains = [_address(vectors, op.weight(role)) for role in ("norm", "q_norm", "k_norm")]
    return native.Op(OP_KINDS.index(op.kind), op.layer, first, second, *gains)


def _address(vectors: Vectors, name: str | None) -> int:
    return 0 if name is None else vectors.norms[name].ctypes.data


def _c_matrix(matrix: PackedMatrix, bias: Vector | None) -> native.Matrix:
    data = matrix.data
    assert data.flags.c_contiguous, "packed weights are one piece"
    assert data.ctypes.data % native.DATA_ALIGNMENT == 0, "packed weights are aligned"
    assert bias is None or bias.shape == (matrix.num_rows,), "a bias has one element per row"
    return native.Matrix(
        data=data.ctypes.data,
        bias=0 if bias is None else bias.ctypes.data,
        rows=matrix.num_rows,
        k=matrix.num_inputs,
        format=matrix.format,
    )


class _BatchMemory:
    """A batch as C reads it. The memory is kept: to make eight arrays anew took longer than to check what goes into them."""

    def __init__(self) -> None:
        self._struct = native.Batch()
        self._room_for_tokens(_FIRST_TOKENS)
        self._room_for_pages(_FIRST_PAGES)

    def fill(self, batch: Batch, page_size: int) -> native.Batch:
        """Copy a checked batch; valid until the next call."""
        num_tokens, num_rows, num_logits = len(batch.token_ids_host), len(batch.kv_lens_host), len(batch.logit_rows_host)
        page_ids: list[int] = []
        page_start = [0]
        for pages in batch.page_ids_host:
            page_ids.extend(pages)
            page_start.append(len(page_ids))
        if max(num_tokens, num_logits) > len(self._token_ids):
            self._room_for_tokens(_power_of_two(max(num_tokens, num_logits)))
        if len(page_ids) > len(self._page_ids):
            self._room_for_pages(_power_of_two(len(page_ids)))
        self._token_ids[:num_tokens] = batch.token_ids_host
        self._positions[:num_tokens] = batch.positions_host
        self._write_slots[:num_tokens] = batch.write_slots_host
        self._logit_rows[:num_logits] = batch.logit_rows_host
        self._query_start[: num_rows + 1] = batch.query_start_host
        self._kv_lens[:num_rows] = batch.kv_lens_host
        self._page_start[: num_rows + 1] = page_start
        self._page_ids[: len(page_ids)] = page_ids
        struct = self._struct
        struct.num_rows, struct.num_tokens, struct.num_logits, struct.page_size = num_rows, num_tokens, num_logits, page_size
        return struct

    def _room_for_tokens(self, count: int) -> None:
        token_ids, positions, write_slots, logit_rows = ((c_int64 * count)() for _ in range(4))
        query_start, page_start, kv_lens = ((c_int32 * (count + 1))() for _ in range(3))
        # All of them are there: where memory fails, the old ones stay together.
        self._token_ids, self._positions, self._write_slots, self._logit_rows = token_ids, positions, write_slots, logit_rows
        self._query_start, self._page_start, self._kv_lens = query_start, page_start, kv_lens
        struct = self._struct
        struct.token_ids, struct.positions = addressof(self._token_ids), addressof(self._positions)
        struct.write_slots, struct.logit_rows = addressof(self._write_slots), addressof(self._logit_rows)
        struct.query_start, struct.page_start = addressof(self._query_start), addressof(self._page_start)
        struct.kv_lens = addressof(self._kv_lens)

    def _room_for_pages(self, count: int) -> None:
        self._page_ids = (c_int32 * count)()
        self._struct.page_ids = addressof(self._page_ids)


class _ResultMemory:
    """Float32 rows that C fills. Small passes share memory that is kept, large ones get their own."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._kept = torch.empty((0, width))
        self._views: dict[int, torch.Tensor] = {}  # by number of rows: a view costs microseconds

    def rows(self, count: int) -> torch.Tensor:
        view = self._views.get(count)
        if view is None:
            if count > _MAX_KEPT_ROWS:
                return torch.empty((count, self._width))
            if count > self._kept.shape[0]:
                self._kept = torch.empty((count, self._width))
                self._views.clear()
            view = self._views[count] = self._kept[:count]
        return view


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
