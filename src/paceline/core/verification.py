"""Inputs and result of verification, the only sampler. Device half."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of B rows as tensors, in the plan's order; see `core.request.SamplingParams` for the ranges."""

    temperature: torch.Tensor  # [B] f32
    top_k: torch.Tensor  # [B] i64
    top_p: torch.Tensor  # [B] f32
    min_p: torch.Tensor  # [B] f32
    seed: torch.Tensor  # [B] i64, the unsigned seed's bits
    output_index: torch.Tensor  # [B] i64: output tokens committed so far, the index of the next one
    emits: torch.Tensor  # [B] bool: rows that end at their last committed token
    any_sampled: bool  # host knowledge: False lets an all-greedy batch skip every sampling op


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of one step for B rows."""

    num_accepted: torch.Tensor  # [B] i32
    token_ids: torch.Tensor  # [B, K+1] i32: accepted drafts, then exactly one more; the rest is padding (0)
    num_emitted: torch.Tensor  # [B] i32: num_accepted + 1, or 0 for rows that do not emit
