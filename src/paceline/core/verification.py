"""Inputs and result of verification, the only sampler. Device half."""

from dataclasses import dataclass

import torch

from paceline.core.padding import padded
from paceline.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class HostRows:
    """How the next tokens of B rows are chosen, in the plan's order: all that a step without noise or cuts needs to know."""

    sampling: list[SamplingParams]  # [B]
    output_index: list[int]  # [B]: output tokens committed so far, the index of the next one
    emits: list[bool]  # [B]: rows that end at their last committed token

    @property
    def any_sampled(self) -> bool:
        """False lets an all-greedy batch skip every sampling op."""
        return any(params.temperature > 0 for params in self.sampling)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The same as tensors; see `core.request.SamplingParams` for the ranges."""

    temperature: torch.Tensor  # [B] f32
    top_k: torch.Tensor  # [B] i64
    top_p: torch.Tensor  # [B] f32
    min_p: torch.Tensor  # [B] f32
    seed: torch.Tensor  # [B] i64, the unsigned seed's bits
    output_index: torch.Tensor  # [B] i64
    emits: torch.Tensor  # [B] bool
    any_sampled: bool  # host knowledge


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of one step for B rows. Python integers; the properties are tensors of them, made anew each time."""

    tokens_host: list[list[int]]  # [B]: accepted drafts, then exactly one more; none for rows that do not emit

    @property
    def token_ids(self) -> torch.Tensor:
        """`[B, K + 1]` i32, K the most accepted drafts; padding is 0."""
        return padded(self.tokens_host)

    @property
    def num_accepted(self) -> torch.Tensor:
        """`[B]` i32."""
        return torch.tensor([max(len(tokens) - 1, 0) for tokens in self.tokens_host], dtype=torch.int32)

    @property
    def num_emitted(self) -> torch.Tensor:
        """`[B]` i32: num_accepted + 1, or 0 for rows that do not emit."""
        return torch.tensor([len(tokens) for tokens in self.tokens_host], dtype=torch.int32)
