"""Logit processing of sampled rows: temperature -> top-k -> top-p -> min-p, one implementation for every shape.

Called by `verify.py` and, through it, by drafters. Each row is computed alone and summed in a fixed order, so its result is
bit-equal whatever other rows share the call. Rows with temperature 0 pass through untouched.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline.core.verification import SamplingRows
from paceline.speculative.rows import select_rows

_WIDTHS = (256, 4096)
"""How many top tokens are sorted before the cut is looked for; most top-k and top-p cuts lie within the first, the rest sort everything."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The head of n rows, sorted by falling logit, equal logits by rising id."""

    ids: torch.Tensor  # [n, C] i64
    logits: torch.Tensor  # [n, C] f64: divided by the temperature; -inf: cut off


def process_logits(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Processed logits `[N, V]` f64 of raw logits `[N, V]` f32; tokens that an option cuts off are -inf.

    top-k keeps exactly k tokens, the lowest ids among equals at the border. top-p keeps the smallest prefix, by falling logit and then
    rising id, whose mass reaches p of what top-k left. min-p keeps tokens with at least min_p times the top probability.
    """
    out = logits.double()
    if not rows.any_sampled:
        return out
    sampled = rows.temperature > 0
    cut = is_cut(rows, logits.shape[1])
    open_rows = (sampled & ~cut).nonzero().squeeze(1)
    if open_rows.numel() > 0:
        out[open_rows] = open_logits(logits[open_rows], select_rows(rows, open_rows))
    cut_rows = (sampled & cut).nonzero().squeeze(1)
    if cut_rows.numel() > 0:
        for group, head in cut_candidates(logits[cut_rows], select_rows(rows, cut_rows)):
            kept = torch.full((group.numel(), logits.shape[1]), -torch.inf, dtype=torch.float64, device=logits.device)
            out[cut_rows[group]] = kept.scatter_(1, head.ids, head.logits)
    return out


def is_cut(rows: SamplingRows, vocab_size: int) -> torch.Tensor:
    """Rows `[N]` bool that need an order of the tokens: top-k or top-p is on."""
    return _has_top_k(rows, vocab_size) | (rows.top_p < 1)


def open_logits(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Processed logits `[n, V]` f64 of sampled rows without top-k and top-p."""
    scaled = _scaled(logits, rows)
    if not bool((rows.min_p > 0).any()):
        return scaled
    weights = (scaled - scaled.amax(1, keepdim=True)).exp_()
    return scaled.masked_fill_(weights < rows.min_p.double().unsqueeze(1), -torch.inf)


def cut_candidates(logits: torch.Tensor, rows: SamplingRows) -> Iterator[tuple[torch.Tensor, Candidates]]:
    """Processed candidates of sampled rows with top-k or top-p, as groups (rows `[n]` i64, their candidates), every row in one group.

    A row is answered from the first width that holds its whole cut; the width does not change the result.
    """
    vocab_size = logits.shape[1]
    keys = _sort_keys(logits)
    totals = _top_p_totals(logits, rows)
    pending = torch.arange(logits.shape[0], device=logits.device)
    narrowest = int(torch.where(rows.top_k > 0, rows.top_k, 1).amin())
    for width in (*(w for w in _WIDTHS if narrowest <= w < vocab_size), vocab_size):
        ids = keys.topk(width, dim=1).indices
        head, complete = _cut(logits.gather(1, ids), ids, rows, totals, vocab_size)
        if bool(complete.all()):
            yield pending, head
            return
        if bool(complete.any()):
            yield pending[complete], Candidates(head.ids[complete], head.logits[complete])
            rest = (~complete).nonzero().squeeze(1)
            pending, logits, keys, totals, rows = pending[rest], logits[rest], keys[rest], totals[rest], select_rows(rows, rest)


def row_totals(weights: torch.Tensor) -> torch.Tensor:
    """Sums `[n, 1]` f64 of rows `[n, V]` f64. A running sum, since `sum` splits a row by shape and threads and so rounds differently."""
    return weights.cumsum(1)[:, -1:]


def _cut(
    top_logits: torch.Tensor, ids: torch.Tensor, rows: SamplingRows, totals: torch.Tensor, vocab_size: int
) -> tuple[Candidates, torch.Tensor]:
    """Apply temperature and all cuts to sorted heads `[n, C]`; also returns which rows `[n]` bool have their whole cut within C."""
    width = ids.shape[1]
    has_top_k = _has_top_k(rows, vocab_size)
    top_k = torch.where(has_top_k, rows.top_k, vocab_size)
    scaled = _scaled(top_logits, rows)
    within_k = torch.arange(width, device=ids.device) < top_k.unsqueeze(1)
    weights = (scaled - scaled[:, :1]).exp_()
    mass = (weights * within_k).cumsum(1)
    total = torch.where(has_top_k.unsqueeze(1), mass[:, -1:], totals)
    wanted = torch.where(rows.top_p < 1, rows.top_p.double(), torch.inf).unsqueeze(1) * total
    mass_before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    kept = within_k & (mass_before < wanted) & (weights >= rows.min_p.double().unsqueeze(1))
    kept[:, 0] = True  # rounding must not cut the whole row
    complete = torch.where(has_top_k, top_k <= width, mass[:, -1] >= wanted[:, 0])
    if width == vocab_size:
        complete = torch.ones_like(complete)
    return Candidates(ids, scaled.masked_fill_(~kept, -torch.inf)), complete


def _top_p_totals(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Softmax denominators `[n, 1]` f64 over the whole vocabulary, relative to the top logit, for top-p without top-k."""
    if not bool(((rows.top_p < 1) & ~_has_top_k(rows, logits.shape[1])).any()):
        return torch.ones((logits.shape[0], 1), dtype=torch.float64, device=logits.device)
    scaled = _scaled(logits, rows)
    return row_totals((scaled - scaled.amax(1, keepdim=True)).exp_())


def _has_top_k(rows: SamplingRows, vocab_size: int) -> torch.Tensor:
    return (rows.top_k > 0) & (rows.top_k < vocab_size)


def _scaled(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    return logits.double().div_(rows.temperature.double().unsqueeze(1))


def _sort_keys(logits: torch.Tensor) -> torch.Tensor:
    """Distinct keys `[n, V]` i64 in the order (logit, lowest id): `topk` alone promises nothing about equal logits."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0 equal to +0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # IEEE floats order as sign and magnitude, integers as two's complement
    return ordered.to(torch.int64).mul_(1 << 32).sub_(torch.arange(logits.shape[1], device=logits.device))
