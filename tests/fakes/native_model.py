"""A tiny random model with packed weights for the native step, what it should compute in numpy, and a way to run passes of rows.

`expected` quantises activations and rounds keys and values as the step does, and computes the rest in double precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.native.library import GROUP, NUM_OP_KINDS, Batch, Format, Kv, Library, Matrix, Op, Shape
from tests.fakes.packed import Weights, native_matrix, native_packed, quantised

Array = NDArray[np.float64]
EPS = 1e-5
EMBED, QKV, ATTENTION, OUT, GATE_UP, DOWN, HEAD = range(NUM_OP_KINDS)


@dataclass(frozen=True, slots=True)
class Spec:
    num_layers: int = 2
    hidden: int = 128
    intermediate: int = 160
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 101
    has_bias: bool = False
    has_head_norm: bool = False
    is_tied: bool = True
    format: Format = Format.W4


class PackedMatrix:
    """Random packed weights; `dense` `[rows, k]` is what they mean, of about unit gain."""

    def __init__(self, library: Library, rng: np.random.Generator, rows: int, k: int, format: Format, has_bias: bool = False) -> None:
        low, high, middle = (0, 16, 7.5) if format == Format.W4 else (-127, 128, 0)
        scales = (1.7 / k**0.5 / high * rng.uniform(1.0, 3.0, (rows, k // GROUP))).astype(np.float16)
        minima = (-middle * scales.astype(np.float64) * rng.uniform(0.9, 1.1, scales.shape)).astype(np.float16)
        bias = rng.normal(0, 0.3, rows).astype(np.float32) if has_bias else None
        self.weights = Weights(format, rng.integers(low, high, (rows, k), dtype=np.int32), scales, minima, bias)
        self.packed = native_packed(library, self.weights)
        self.matrix = native_matrix(self.weights, self.packed)

    @property
    def dense(self) -> Array:
        return self.weights.values().astype(np.float64)


def _gain(rng: np.random.Generator, n: int) -> NDArray[np.float32]:
    return rng.uniform(0.7, 1.3, n).astype(np.float32)


@dataclass(slots=True)
class Layer:
    norm: NDArray[np.float32]
    qkv: PackedMatrix
    q_norm: NDArray[np.float32] | None
    k_norm: NDArray[np.float32] | None
    out: PackedMatrix
    mlp_norm: NDArray[np.float32]
    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix


class Model:
    """Weights, made by `matrix`, and the compiled program."""

    def __init__(
        self, library: Library, spec: Spec, seed: int = 0, max_tokens: int = 600, matrix: type[PackedMatrix] = PackedMatrix
    ) -> None:
        self.library, self.spec = library, spec
        rng = np.random.default_rng(seed)

        def make(rows: int, k: int, has_bias: bool = False) -> PackedMatrix:
            return matrix(library, rng, rows, k, spec.format, has_bias)

        heads_width = spec.num_heads * spec.head_dim
        qkv_rows = heads_width + 2 * spec.num_kv_heads * spec.head_dim
        self.table = make(spec.vocab, spec.hidden)
        self.layers = [
            Layer(
                _gain(rng, spec.hidden),
                make(qkv_rows, spec.hidden, spec.has_bias),
                _gain(rng, spec.head_dim) if spec.has_head_norm else None,
                _gain(rng, spec.head_dim) if spec.has_head_norm else None,
                make(spec.hidden, heads_width),
                _gain(rng, spec.hidden),
                make(spec.intermediate, spec.hidden),
                make(spec.intermediate, spec.hidden),
                make(spec.hidden, spec.intermediate),
            )
            for _ in range(spec.num_layers)
        ]
        self.final_norm = _gain(rng, spec.hidden)
        self.head = self.table if spec.is_tied else make(spec.vocab, spec.hidden)
        exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
        self.frequencies = (1.0 / np.float32(10000.0) ** exponents).astype(np.float32)
        shape = Shape(
            spec.num_layers, spec.hidden, spec.intermediate, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab, EPS,
            self.frequencies.ctypes.data,
        )  # fmt: skip
        self.handle = library.model_new(shape, self._ops(), max_tokens, max_tokens)
        assert self.handle

    def _ops(self) -> list[Op]:
        def address(gain: NDArray[np.float32] | None) -> int | None:
            return None if gain is None else gain.ctypes.data

        ops = [Op(EMBED, -1, self.table.matrix)]
        for i, layer in enumerate(self.layers):
            ops.append(Op(QKV, i, layer.qkv.matrix, Matrix(), address(layer.norm), address(layer.q_norm), address(layer.k_norm)))
            ops.append(Op(ATTENTION, i))
            ops.append(Op(OUT, i, layer.out.matrix))
            ops.append(Op(GATE_UP, i, layer.gate.matrix, layer.up.matrix, address(layer.mlp_norm)))
            ops.append(Op(DOWN, i, layer.down.matrix))
        ops.append(Op(HEAD, -1, self.head.matrix, Matrix(), address(self.final_norm)))
        return ops

    def kv(self, num_slots: int) -> NDArray[np.float16]:
        """KV memory full of NaNs: what was not written must not be read."""
        spec = self.spec
        return np.full((spec.num_layers, 2, spec.num_kv_heads, num_slots, spec.head_dim), np.nan, np.float16)

    def free(self) -> None:
        self.library.model_free(self.handle)


@dataclass(frozen=True, slots=True)
class Row:
    token_ids: Sequence[int]
    start: int
    page_ids: Sequence[int]
    num_logits: int = 1


@dataclass(slots=True)
class Result:
    logits: NDArray[np.float32]  # [R, vocab]
    hidden: NDArray[np.float32]  # [T, hidden]
    profile_ns: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_OP_KINDS, np.int64))


def run(model: Model, pool: int, rows: Sequence[Row], kv: NDArray[np.float16], page_size: int = 16, wants_hidden: bool = True) -> Result:
    """One pass of `rows`."""
    tokens = [t for row in rows for t in row.token_ids]
    positions = [p for row in rows for p in range(row.start, row.start + len(row.token_ids))]
    slots = [
        row.page_ids[p // page_size] * page_size + p % page_size for row in rows for p in range(row.start, row.start + len(row.token_ids))
    ]
    query_start = np.cumsum([0, *(len(row.token_ids) for row in rows)]).astype(np.int32)
    logit_rows = [i for b, row in enumerate(rows) for i in range(query_start[b + 1] - row.num_logits, query_start[b + 1])]
    kv_lens = np.array([row.start + len(row.token_ids) for row in rows], np.int32)
    page_start = np.cumsum([0, *(len(row.page_ids) for row in rows)]).astype(np.int32)
    page_ids = np.array([page for row in rows for page in row.page_ids], np.int32)
    arrays = [np.array(values, np.int64) for values in (tokens, positions, slots, logit_rows)]
    arrays += [query_start, kv_lens, page_start, page_ids]
    batch = Batch(len(rows), len(tokens), len(logit_rows), page_size, *(array.ctypes.data for array in arrays))
    logits = np.full((len(logit_rows), model.spec.vocab), np.nan, np.float32)
    hidden = np.full((len(tokens), model.spec.hidden), np.nan, np.float32)
    result = Result(logits, hidden)
    memory = Kv(kv.ctypes.data, kv.shape[3])
    status = model.library.run(
        pool, model.handle, batch, memory, logits.ctypes.data, hidden.ctypes.data if wants_hidden else 0, result.profile_ns.ctypes.data
    )
    assert status == 0
    return result


def _product(x: Array, matrix: PackedMatrix) -> Array:
    q, step, _ = quantised(x.astype(np.float32))
    y = (q.astype(np.float64) * np.repeat(step.astype(np.float64), GROUP, 1)) @ matrix.dense.T
    return y if matrix.weights.bias is None else y + matrix.weights.bias


def _normed(x: Array, gain: NDArray[np.float32]) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * gain


def _turned(heads: Array, angles: Array) -> Array:
    first, second = np.split(heads, 2, -1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)


def _attention(spec: Spec, layer: Layer, normed: Array, angles: Array) -> Array:
    num_tokens = normed.shape[0]
    heads = _product(normed, layer.qkv).reshape(num_tokens, -1, spec.head_dim)
    q, k, v = np.split(heads, [spec.num_heads, spec.num_heads + spec.num_kv_heads], 1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _normed(q, layer.q_norm), _normed(k, layer.k_norm)
    q = _turned(q, angles) * spec.head_dim**-0.5
    keys, values = (x.astype(np.float32).astype(np.float16).astype(np.float64) for x in (_turned(k, angles), v))
    out = np.empty_like(q)
    is_later = np.arange(num_tokens)[None, :] > np.arange(num_tokens)[:, None]
    for head in range(spec.num_heads):
        kv_head = head // (spec.num_heads // spec.num_kv_heads)
        scores = np.where(is_later, -np.inf, q[:, head] @ keys[:, kv_head].T)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights @ values[:, kv_head] / weights.sum(-1, keepdims=True)
    return out.reshape(num_tokens, -1)


def expected(model: Model, token_ids: Sequence[int]) -> tuple[Array, Array]:
    """Logits `[T, vocab]` and hidden states `[T, hidden]` of one sequence, in double precision."""
    stream = model.table.dense[list(token_ids)]
    positions = np.arange(len(token_ids), dtype=np.float32)[:, None]
    angles = (positions * model.frequencies).astype(np.float64)[:, None, :]
    for layer in model.layers:
        mixed = _attention(model.spec, layer, _normed(stream, layer.norm), angles)
        stream = stream + _product(mixed, layer.out)
        normed = _normed(stream, layer.mlp_norm)
        gate = _product(normed, layer.gate)
        stream = stream + _product(gate / (1 + np.exp(-gate)) * _product(normed, layer.up), layer.down)
    return _product(_normed(stream, model.final_norm), model.head), stream
