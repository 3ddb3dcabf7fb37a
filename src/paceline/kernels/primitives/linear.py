"""A matrix packed once for the products of one device and precision. Activations go in and come out as float32, whatever the weights are.

Used by every op that has a matrix. `pack_linear` holds the ordered table of ways; how each was measured stands beside it.
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
    """A linear ready to run, the name of its way and the bytes it holds."""

    module: torch.nn.Module
    name: str
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class _Way:
    name: str
    supports: Callable[[torch.Tensor, Place], str | None]
    pack: Callable[[torch.Tensor, torch.Tensor | None, torch.dtype], torch.nn.Module]
    element_bytes: int | None  # None: as the place's dtype


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, place: Place) -> Packed:
    """Pack `weight` `[N, K]` float32 (and `bias` `[N]`) with the first way that supports it. The weight itself is not kept."""
    for way in _WAYS:
        if way.supports(weight, place) is None:
            element_bytes = place.dtype.itemsize if way.element_bytes is None else way.element_bytes
            return Packed(way.pack(weight, bias, place.dtype), way.name, weight.numel() * element_bytes)
    raise AssertionError("the plain way supports everything")


def refusals(weight: torch.Tensor, place: Place) -> dict[str, str | None]:
    """Every way in order of preference, with None or the reason why it cannot hold `weight`."""
    return {way.name: way.supports(weight, place) for way in _WAYS}


def _onednn_refusal(weight: torch.Tensor, place: Place) -> str | None:
    if place.device.type != "cpu":
        return f"oneDNN runs on the CPU, not on {place.device.type}"
    if place.dtype != torch.float32:
        return f"weights are {place.dtype}"
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    return None


def _fp16_refusal(weight: torch.Tensor, place: Place) -> str | None:
    if place.device.type != "cpu":
        return f"FBGEMM runs on the CPU, not on {place.device.type}"
    if place.dtype != torch.bfloat16:
        return f"weights are {place.dtype}"
    if torch.backends.quantized.engine not in ("fbgemm", "x86"):
        return f"torch's quantised engine is {torch.backends.quantized.engine}, FBGEMM needs AVX2"
    largest = weight.abs().max().item()
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
    _Way("onednn_f32", _onednn_refusal, _pack_onednn, 4),
    _Way("fbgemm_fp16", _fp16_refusal, _pack_fp16, 2),
    _Way("plain", _no_refusal, _pack_plain, None),
)
