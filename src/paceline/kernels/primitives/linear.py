"""A matrix packed once for the products of one device and precision. Activations go in and come out as float32, whatever the weights are.

Used by every op that has a matrix. `_WAYS` is the table, in order of preference; docs/decisions/0001 has the measurements.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.kernels.primitives.table import Place

_FP16_LIMIT = 65504.0  # the largest finite half
_ROW_HINT = 8  # oneDNN's layout for this many rows gives a row the same bits for 1..300 rows; a hint of 1 does not


class OneDnnLinear(torch.nn.Module):
    """float32 through oneDNN's packed layout. A row's result has the same bits whatever rows share the call."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROW_HINT)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class Fp16Linear(torch.nn.Module):
    """Half-precision weights, float32 activations and accumulation, through FBGEMM.

    A bfloat16 weight keeps its value exactly between 2^-17 and 65504 in magnitude (half has more mantissa bits); what is smaller moves
    by at most 2^-25. A row's bits are the same for 3..6 rows and for 1 or 2 only up to the order of a float32 sum.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


class PlainLinear(torch.nn.Module):
    """F.linear in the weights' own precision: runs everywhere."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = weight.contiguous()
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias).to(torch.float32)


@dataclass(frozen=True, slots=True)
class Packed:
    """A linear ready to run, the name of its way, why a better one was not taken ("" if none was refused), and the bytes it holds."""

    module: torch.nn.Module
    name: str
    reason: str
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class _Way:
    name: str
    dtype: torch.dtype | None  # of the place; None: any
    refusal: Callable[[torch.Tensor, Place], str | None]
    pack: Callable[[torch.Tensor, torch.Tensor | None, torch.dtype], torch.nn.Module]


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, place: Place) -> Packed:
    """Pack `weight` `[N, K]` float32 (and `bias` `[N]`) with the first way that can hold it. The weight itself is not kept."""
    refusals: list[str] = []
    for way in _WAYS:
        if way.dtype not in (None, place.dtype):
            continue
        refusal = way.refusal(weight, place)
        if refusal is None:
            module = way.pack(weight, bias, place.dtype)
            return Packed(module, way.name, "; ".join(refusals), weight.numel() * place.dtype.itemsize)
        refusals.append(f"not {way.name}: {refusal}")
    raise AssertionError("the plain way holds everything")


def _onednn_refusal(weight: torch.Tensor, place: Place) -> str | None:
    if place.device.type != "cpu":
        return f"oneDNN runs on the CPU, not on {place.device.type}"
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    return None


def _fp16_refusal(weight: torch.Tensor, place: Place) -> str | None:
    if place.device.type != "cpu":
        return f"FBGEMM runs on the CPU, not on {place.device.type}"
    if torch.backends.quantized.engine not in ("fbgemm", "x86"):
        return f"torch's quantised engine is {torch.backends.quantized.engine}; FBGEMM needs an x86 CPU with AVX2"
    low, high = weight.aminmax()  # abs() would copy the largest matrix of the model
    largest = torch.maximum(-low, high).item()
    if not largest <= _FP16_LIMIT:  # NaN fails too
        return f"a weight of magnitude {largest:g} does not fit half precision (limit {_FP16_LIMIT:g})"
    return None


def _no_refusal(weight: torch.Tensor, place: Place) -> str | None:
    return None


def _pack_onednn(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.nn.Module:
    return OneDnnLinear(weight, bias)


def _pack_fp16(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.nn.Module:
    return Fp16Linear(weight, bias)


def _pack_plain(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.nn.Module:
    return PlainLinear(weight.to(dtype), None if bias is None else bias.to(dtype))


_WAYS = (
    _Way("onednn_f32", torch.float32, _onednn_refusal, _pack_onednn),
    _Way("fbgemm_fp16", torch.bfloat16, _fp16_refusal, _pack_fp16),
    _Way("plain", None, _no_refusal, _pack_plain),
)
