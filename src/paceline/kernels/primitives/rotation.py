"""Rotary positions as one complex multiplication over q, k and v together, computed once per pass and shared by all layers.

Source: Su et al. 2021, RoFormer (section 3.4); Llama 3's scaling as in its reference code. With the two elements of a pair side by
side, turning them is a complex product: q's factor carries the attention scale as well, and v's factor is 1.
"""

import math

import torch

from paceline.core.program import ModelSpec


def frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians per position of every pair of a head, `[head_dim / 2]` f32, with Llama 3's scaling where the model has it."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    base = 1.0 / (spec.rope_theta**exponents)
    if spec.rope_scaling is None:
        return base
    factor, low_factor, high_factor, num_original = spec.rope_scaling
    wavelength = 2 * math.pi / base
    smooth = (num_original / wavelength - low_factor) / (high_factor - low_factor)
    blended = (1 - smooth) * base / factor + smooth * base
    scaled = torch.where(wavelength > num_original / low_factor, base / factor, base)
    is_between = (wavelength <= num_original / low_factor) & (wavelength >= num_original / high_factor)
    return torch.where(is_between, blended, scaled)


def interleave(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of a q or k matrix `[heads * head_dim, ...]` so that elements i and i + head_dim/2 of a head stand side by side.

    Scores do not change, for q and k are reordered alike.
    """
    heads = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return heads.transpose(1, 2).reshape(weight.shape)


class Rotation(torch.nn.Module):
    """Makes the factors of a pass from its positions: `[T]` i64 -> `[T, (Hq + 2 Hkv) * head_dim / 2]` c64."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        half = spec.head_dim // 2
        # One frequency more, 0, is where v's pairs look: its factor is exactly 1.
        self.frequencies = torch.cat([frequencies(spec), torch.zeros(1)])
        pairs = torch.arange(half)
        num_turned = spec.num_heads + spec.num_kv_heads
        self.columns = torch.cat([pairs.repeat(num_turned), torch.full((spec.num_kv_heads * half,), half)])
        scale = torch.ones(self.columns.shape[0])
        scale[: spec.num_heads * half] = spec.head_dim**-0.5
        self.scale = scale.to(torch.complex64)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        angles = positions.to(torch.float32).unsqueeze(1) * self.frequencies
        turns = torch.polar(torch.ones_like(angles), angles)
        return turns.index_select(1, self.columns).mul_(self.scale)
