"""Finds and loads the compiled library, and gives its functions types: `paceline_native.h` as ctypes. Called by `forward/native.py`.

Every call releases Python's lock. Pointers are plain addresses: whoever calls has checked sizes and keeps the memory alive. No torch here.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

ABI = 2  # PL_ABI
TILE_ROWS = 16  # PL_TILE_ROWS: rows that are packed together
GROUP = 32  # PL_GROUP: inputs that share a scale
DATA_ALIGNMENT = 64  # bytes, of a packed matrix
NUM_OP_KINDS = 7  # PL_NUM_KINDS
MAX_HEAD_DIM = 256  # PL_MAX_HEAD_DIM
ATTEND_QUERIES = 64  # PL_ATTEND_QUERIES: heads that can share a KV head
TOO_MANY_TASKS = -2  # what `run` gives for a pass of more than PL_MAX_TASKS
VARIANTS = ("avx512vnni", "avx2", "neon", "portable")
_MAX_CONTENDERS = 64
_PATH = Path(__file__).parent / "libpaceline.so"


class Format(IntEnum):
    """pl_format: how weights are packed."""

    W8 = 0
    W4 = 1


class Matrix(ctypes.Structure):
    """pl_matrix: a packed matrix `[rows, k]` and its bias; all zeros where an op has none."""

    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int32),
        ("k", c_int32),
        ("format", c_int32),
        ("reserved", c_int32),
    )


class Op(ctypes.Structure):
    """pl_op: one operation with its weights."""

    _fields_ = (
        ("kind", c_int32),
        ("layer", c_int32),
        ("first", Matrix),
        ("second", Matrix),
        ("norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
    )


class Shape(ctypes.Structure):
    """pl_shape: what all operations of a model share."""

    _fields_ = (
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("eps", c_float),
        ("frequencies", c_void_p),
    )


class Batch(ctypes.Structure):
    """pl_batch: the rows and tokens of one pass."""

    _fields_ = (
        ("num_rows", c_int32),
        ("num_tokens", c_int32),
        ("num_logits", c_int32),
        ("page_size", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("write_slots", c_void_p),
        ("logit_rows", c_void_p),
        ("query_start", c_void_p),
        ("kv_lens", c_void_p),
        ("page_start", c_void_p),
        ("page_ids", c_void_p),
    )


class Kv(ctypes.Structure):
    """pl_kv: the memory of keys and values."""

    _fields_ = (("data", c_void_p), ("num_slots", c_int64))


_Simple = type[c_int32] | type[c_int64] | type[c_uint32] | type[c_uint64] | type[c_double] | type[c_void_p] | type[c_char_p]
# What a function gives and takes; a structure goes by its address.
_SIGNATURES: dict[str, tuple[_Simple | None, tuple[_Simple, ...]]] = {
    "pl_abi": (c_int32, ()),
    "pl_variant": (c_char_p, ()),
    "pl_force_variant": (c_int32, (c_char_p,)),
    "pl_pool_new": (c_void_p, (c_int32,)),
    "pl_pool_free": (None, (c_void_p,)),
    "pl_model_new": (c_void_p, (c_void_p, c_void_p, c_int32, c_int32, c_int32)),
    "pl_model_free": (None, (c_void_p,)),
    "pl_run": (c_int32, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
    "pl_packed_bytes": (c_int64, (c_int32, c_int32, c_int32)),
    "pl_pack": (None, (c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_void_p)),
    "pl_unpack_row": (None, (c_void_p, c_int32, c_void_p)),
    "pl_quantise": (None, (c_void_p, c_int32, c_void_p, c_void_p, c_void_p)),
    "pl_linear": (c_int32, (c_void_p, c_void_p, c_void_p, c_int32, c_void_p)),
    "pl_contenders": (c_int32, (c_void_p, c_int32, c_double, c_uint64, c_uint32, c_void_p, c_void_p, c_int32)),
    "pl_argmax": (c_int32, (c_void_p, c_int32)),
}


class Library:
    """The functions of the loaded library. Pointers are addresses (`int`), 0 is NULL; what each means stands in `paceline_native.h`."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        """`handle`: with the functions of `_SIGNATURES`; raises AttributeError where one is not there."""
        for name, (result, arguments) in _SIGNATURES.items():
            function = handle[name]
            function.restype = result
            function.argtypes = arguments
            setattr(handle, name, function)
        self._handle = handle

    @property
    def abi(self) -> int:
        return int(self._handle.pl_abi())

    @property
    def variant(self) -> str:
        """The instruction set that runs: one of VARIANTS."""
        return bytes(self._handle.pl_variant()).decode("ascii")

    def force_variant(self, name: str) -> bool:
        """Run `name` from now on; False, and nothing changes, if this processor or build lacks it. For tests, before any run."""
        return int(self._handle.pl_force_variant(name.encode("ascii"))) == 0

    def pool_new(self, num_threads: int) -> int:
        """A pool of threads, the caller among them; 0 if memory or threads cannot be had. End it by `pool_free`."""
        return int(self._handle.pl_pool_new(num_threads) or 0)

    def pool_free(self, pool: int) -> None:
        self._handle.pl_pool_free(pool)

    def model_new(self, shape: Shape, ops: Sequence[Op], max_tokens: int, max_logits: int) -> int:
        """A program of `ops`, with scratch memory for passes of `max_tokens`; 0 without memory. End it by `model_free`."""
        array = (Op * len(ops))(*ops)
        return int(self._handle.pl_model_new(ctypes.byref(shape), array, len(ops), max_tokens, max_logits) or 0)

    def model_free(self, model: int) -> None:
        self._handle.pl_model_free(model)

    def run(self, pool: int, model: int, batch: Batch, kv: Kv, logits: int, hidden: int, profile_ns: int) -> int:
        """One pass; 0 when it is done, -1 without memory, or TOO_MANY_TASKS. `hidden` and `profile_ns` may be 0."""
        return int(self._handle.pl_run(pool, model, ctypes.byref(batch), ctypes.byref(kv), logits, hidden, profile_ns))

    def packed_bytes(self, format: Format, rows: int, k: int) -> int:
        return int(self._handle.pl_packed_bytes(format, rows, k))

    def pack(self, format: Format, rows: int, k: int, elements: int, scales: int, minima: int, packed: int) -> None:
        """Pack `elements` `[rows, k]` bytes with fp16 `scales` and `minima` `[rows, k / 32]` (minima 0 for W8) into `packed`."""
        self._handle.pl_pack(format, rows, k, elements, scales, minima, packed)

    def unpack_row(self, matrix: Matrix, row: int, out: int) -> None:
        """Row `row` of `matrix` as float32 `[k]` into `out`."""
        self._handle.pl_unpack_row(ctypes.byref(matrix), row, out)

    def quantise(self, x: int, n: int, q: int, scale: int, sums: int) -> None:
        """`x` float32 `[n]` into `q` int8 `[n]`, `scale` float32 and `sums` int32 `[n / 32]`."""
        self._handle.pl_quantise(x, n, q, scale, sums)

    def linear(self, pool: int, matrix: Matrix, x: int, num_rows: int, out: int) -> int:
        """The product of `x` float32 `[num_rows, k]` into `out` float32 `[num_rows, rows]`; 0 when it is done."""
        return int(self._handle.pl_linear(pool, ctypes.byref(matrix), x, num_rows, out))

    def argmax(self, logits: int, vocab_size: int) -> int | None:
        """The lowest id of the largest of `logits` float32 `[vocab_size]`; None if one of them is not finite."""
        found = int(self._handle.pl_argmax(logits, vocab_size))
        return None if found < 0 else found

    def contenders(self, logits: int, vocab_size: int, temperature: float, seed: int, index: int) -> list[int] | None:
        """The ids that can win the coupled choice over `logits` float32 `[vocab_size]`, rising; None if C cannot tell."""
        ids, scores = (c_int32 * _MAX_CONTENDERS)(), (c_double * _MAX_CONTENDERS)()
        num = int(self._handle.pl_contenders(logits, vocab_size, temperature, seed, index, ids, scores, _MAX_CONTENDERS))
        return None if num < 0 else ids[:num]


@cache
def load(path: Path = _PATH) -> Library | str:
    """The library at `path`, or in one line why there is none: the torch path serves then."""
    if not path.is_file():
        return "the native library was not built (no C compiler at installation)"
    try:
        handle = ctypes.CDLL(str(path))
        abi = int(handle.pl_abi())
        if abi != ABI:
            return f"the native library has ABI {abi}, this paceline needs {ABI}; install paceline again"
        return Library(handle)
    except (OSError, AttributeError) as error:
        return f"the native library cannot be used: {error}; install paceline again"
