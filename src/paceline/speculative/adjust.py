"""From raw logits to those a request is judged by: penalties, logit bias, bans, then the grammar. For `verify.py` and for drawn drafts.

Each position counts the committed output and the drafts before it, so an accepted draft leaves the logits as plain decoding has them.
Rows whose request asks for none of this keep their bits. Temperature and cuts come after (`process.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from paceline.core.slot import Slot, TokenCounts

BANNED = -1e30
"""Logit of a token that must not be chosen. Finite: if everything is banned there is still a law, not not-a-number."""
OUTSIDE = -2e30
"""Logit of a token that the grammar does not allow. The lowest: where the options ban all that it allows, the grammar is kept."""


_BITS = torch.arange(8, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class AdjustedRows:
    """Consecutive logits rows of one slot: row i predicts the token behind `drafts[: first + i]`."""

    start: int  # of the rows in the logits
    num_rows: int
    slot: Slot
    drafts: Sequence[int]
    first: int = 0


def adjust(logits: torch.Tensor, rows: Iterable[AdjustedRows]) -> torch.Tensor:
    """Logits `[R, V]` f32 with the options of each slot in `rows` applied; `logits` itself, untouched, if no slot has any.

    Token ids beyond V, those of a longer vocabulary than a draft model has, are passed over.
    """
    asking = [each for each in rows if each.slot.sampling.adjusts_logits]
    if not asking:
        return logits
    adjusted = logits.clone()
    for each in asking:
        _adjust_rows(adjusted[each.start : each.start + each.num_rows], each)
    return adjusted


def _adjust_rows(logits: torch.Tensor, rows: AdjustedRows) -> None:
    """In place on `[n, V]`."""
    slot, vocab_size = rows.slot, logits.shape[1]
    if slot.counts is not None:
        _penalise(logits, slot.counts, rows)
    bias = [(token_id, value) for token_id, value in slot.sampling.logit_bias if token_id < vocab_size]
    if bias:
        logits[:, torch.tensor([token_id for token_id, _ in bias])] += torch.tensor([value for _, value in bias])
    for index in range(rows.num_rows):
        banned = [token_id for token_id in _banned(slot, rows.drafts[: rows.first + index]) if token_id < vocab_size]
        if banned:
            logits[index, torch.tensor(banned)] = BANNED
    if slot.grammar is not None:
        _mask(logits, slot.grammar.masks(rows.drafts, rows.first, rows.num_rows))


def _mask(logits: torch.Tensor, masks: Sequence[bytes]) -> None:
    """Rows without a mask are never reached and stay as they are. Ids beyond a mask, padding of a draft model, are outside."""
    for index, mask in enumerate(masks):
        if mask:
            octets = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
            inside = (octets.unsqueeze(1) >> _BITS & 1).view(torch.bool).flatten()[: logits.shape[1]]
            logits[index, : inside.shape[0]].masked_fill_(~inside, OUTSIDE)
            logits[index, inside.shape[0] :] = OUTSIDE


def _penalise(logits: torch.Tensor, counts: TokenCounts, rows: AdjustedRows) -> None:
    """Repetition, then frequency and presence, as vLLM orders them; on the tokens that have occurred, and only on those."""
    sampling = rows.slot.sampling
    seen = [token_id for token_id in {**counts.output, **dict.fromkeys((*counts.prompt, *rows.drafts))} if token_id < logits.shape[1]]
    if not seen:
        return
    column = {token_id: index for index, token_id in enumerate(seen)}
    num_before = torch.tensor([counts.output.get(token_id, 0) for token_id in seen], dtype=torch.float32)
    occurred = num_before.repeat(rows.num_rows, 1)
    for position, token_id in enumerate(rows.drafts):
        if token_id in column:
            occurred[max(position + 1 - rows.first, 0) :, column[token_id]] += 1
    ids = torch.tensor(seen)
    values = logits[:, ids]
    if sampling.repetition_penalty != 1:
        in_prompt = torch.tensor([token_id in counts.prompt for token_id in seen])
        repeated = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
        values = torch.where(in_prompt | (occurred > 0), repeated, values)
    values -= sampling.frequency_penalty * occurred
    values -= sampling.presence_penalty * (occurred > 0)
    logits[:, ids] = values


def _banned(slot: Slot, drafts: Sequence[int]) -> list[int]:
    """Tokens that may not follow `drafts`: those that would end too short an answer or complete a banned sequence."""
    sampling = slot.sampling
    banned: list[int] = []
    if slot.num_output_tokens + len(drafts) < sampling.min_tokens:
        banned += slot.stop_token_ids
    for sequence in sampling.banned_sequences:
        num_wanted = len(sequence) - 1
        if num_wanted == 0 or _output_tail(slot, drafts, num_wanted) == sequence[:-1]:
            banned.append(sequence[-1])
    return banned


def _output_tail(slot: Slot, drafts: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """The last output tokens, drafts included; fewer if there are not so many."""
    num_committed = min(max(num_tokens - len(drafts), 0), slot.num_output_tokens)
    committed = slot.token_ids[len(slot.token_ids) - num_committed :]
    return (*committed, *drafts[max(len(drafts) - num_tokens, 0) :])
