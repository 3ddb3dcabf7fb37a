"""Verification of drafts, the only sampler: plain decoding is the verification of an empty draft. Pure; no state, no policy.

Called by `executor/step.py` for the target and by drafters that draw with the request's own parameters. Logit processing lives in
`process.py`, randomness in `noise.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch

from paceline.core.draft import DraftProposal
from paceline.core.verification import HostRows, SamplingRows, Verification
from paceline.speculative.contenders import find_contenders
from paceline.speculative.host_choice import choose_on_host
from paceline.speculative.noise import NOISE_SPREAD, Purpose, gumbel, gumbel_all, uniforms
from paceline.speculative.process import Candidates, cut_candidates, is_cut, open_logits, process_logits, row_totals
from paceline.speculative.rows import host_ints, sampling_rows, select_rows

_CHUNK_ELEMENTS = 1 << 19
"""Logits of sampled rows that are processed at once: bounds the f64 temporaries to a few times 4 MiB, whatever the batch."""
_DENSE_SHARE = 8
"""With more than 1/8 of the vocabulary in reach of winning, noise for all of it costs less than picking out its tokens."""


class Rule(StrEnum):
    """How a draft token is judged."""

    COUPLED = "coupled"  # accept iff it equals the target's own choice, whose noise depends on (seed, output index, token id) alone
    RATIO = "ratio"  # accept with probability p/q; Leviathan et al. 2023, Chen et al. 2023


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where each of the R logit rows belongs, and the draft that was proposed for the token it predicts."""

    row: torch.Tensor  # [R] i64: b
    position: torch.Tensor  # [R] i64: j in 0 .. lens[b]
    is_draft: torch.Tensor  # [R] bool: j < lens[b]
    drafts: torch.Tensor  # [R] i64: token_ids[b, j]; 0 at j = lens[b]
    num_rows: int  # B
    num_columns: int  # K + 1


def verify(logits: torch.Tensor, proposal: DraftProposal, rows: HostRows, rule: Rule) -> Verification:
    """Judge a proposal: each emitting row yields its accepted drafts and exactly one more token.

    `logits` `[R, V]` f32: `lens[b] + 1` consecutive rows for each emitting row b, none for the others. Under `coupled` the tokens equal
    plain decoding's, whatever the drafts; under `ratio` they have the same law.
    """
    if rule is Rule.COUPLED or not rows.any_sampled:
        return _verify_coupled(logits, proposal, rows)
    layout = _layout(proposal, rows, logits.device)
    assert logits.shape[0] == layout.row.numel(), f"{logits.shape[0]} logit rows for {layout.row.numel()} positions"
    params = sampling_rows(rows)
    accepted = _accepted_by_ratio(logits, proposal, params, layout)
    return _finish_by_ratio(logits, proposal, params, layout, accepted)


def choose(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The coupled choice `[N]` i64 of each row of logits `[N, V]` f32: argmax(processed + Gumbel noise of seed and output index).

    Temperature 0 has no noise. Ties go to the lowest id. Noise is drawn only for tokens that can still win, which changes nothing.
    """
    if not rows.any_sampled:
        return _argmax(logits)
    chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    greedy = (rows.temperature <= 0).nonzero().squeeze(1)
    if greedy.numel() > 0:
        chosen[greedy] = _argmax(logits[greedy])
    is_sampled, cut = rows.temperature > 0, is_cut(rows, logits.shape[1])
    for part, part_logits, part_rows in _parts(is_sampled & ~cut, logits, rows):
        chosen[part] = _choose_open(part_logits, part_rows)
    for part, part_logits, part_rows in _parts(is_sampled & cut, logits, rows):
        for group, head in cut_candidates(part_logits, part_rows):
            chosen[part[group]] = _choose_cut(head, select_rows(part_rows, group))
    return chosen


def draw_drafts(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Rule `ratio`: a draft token `[N]` i64 drawn from q, and q `[N, V]` f32 itself, for the drafter's raw logits `[N, V]` f32."""
    q = probabilities(logits, rows).float()
    return pick_tokens(q.double(), uniforms(rows.seed, rows.output_index, Purpose.DRAFT)), q


def probabilities(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The law `[N, V]` f64 that raw logits `[N, V]` f32 mean for each request; one-hot at the arg-max for temperature 0."""
    processed = process_logits(logits, rows)
    weights = (processed - processed.amax(1, keepdim=True)).exp_()
    weights /= row_totals(weights)
    greedy = (rows.temperature <= 0).nonzero().squeeze(1)
    if greedy.numel() > 0:
        weights[greedy] = torch.nn.functional.one_hot(logits[greedy].argmax(1), logits.shape[1]).double()
    return weights


def pick_tokens(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw `[N]` i64 from weights `[N, V]` f64 with uniforms `[N]` f64: the first id whose running sum exceeds its share."""
    cumulated = weights.cumsum(1)
    picked = torch.searchsorted(cumulated, uniform.unsqueeze(1) * cumulated[:, -1:], right=True).squeeze(1)
    return picked.clamp_(max=weights.shape[1] - 1)  # a row of NaN must not leave the vocabulary and take its batch mates down


def accepts(p: torch.Tensor, q: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Accept `[N]` bool a token of target probability p and draft probability q: happens with probability min(1, p / q)."""
    return uniform * q < p


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Weights `[N, V]` f64 of the token after a rejection, (p - q)+; p itself where rounding leaves no mass."""
    weights = (p - q).clamp_(min=0)
    return torch.where(row_totals(weights) > 0, weights, p)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The lowest id `[N]` i64 of the largest logit of each row."""
    if logits.device.type == "cpu":
        # Both return the first of equal maxima; at 49,152 logits numpy takes a fifth of torch's time.
        return torch.as_tensor(logits.numpy().argmax(1))
    return logits.argmax(1)


def _verify_coupled(logits: torch.Tensor, proposal: DraftProposal, rows: HostRows) -> Verification:
    """Take the target's own choices as far as the drafts agree with them, and one more.

    The bookkeeping is in host lists: for the few tokens of a step it costs a fifth of what small tensor ops cost.
    """
    drafts = proposal.drafts_host
    widths = [len(draft) + 1 if emits else 0 for draft, emits in zip(drafts, rows.emits, strict=True)]
    assert logits.shape[0] == sum(widths), f"{logits.shape[0]} logit rows for {sum(widths)} positions"
    choices = _choices(logits, rows, widths)
    tokens: list[list[int]] = []
    first = 0
    for width, draft in zip(widths, drafts, strict=True):
        accepted = 0
        while accepted < width - 1 and choices[first + accepted] == draft[accepted]:
            accepted += 1
        tokens.append(choices[first : first + accepted + 1] if width else [])
        first += width
    return Verification(tokens)


def _choices(logits: torch.Tensor, rows: HostRows, widths: list[int]) -> list[int]:
    """The target's own choice at each of `widths[b]` positions of every row, which are the rows of `logits`."""
    chosen = choose_on_host(logits, rows, widths)
    if chosen is not None:
        return chosen
    if not rows.any_sampled:
        return host_ints(_argmax(logits))
    places = [(row, position) for row, width in enumerate(widths) for position in range(width)]
    row, position = torch.tensor(places, dtype=torch.int64, device=logits.device).reshape(-1, 2).unbind(1)
    return host_ints(choose(logits, select_rows(sampling_rows(rows), row, position)))


def _choose_cut(head: Candidates, rows: SamplingRows) -> torch.Tensor:
    reachable = head.logits >= head.logits[:, :1] - NOISE_SPREAD
    row, column = reachable.nonzero(as_tuple=True)
    ids = head.ids[row, column]
    scores = torch.full_like(head.logits, -torch.inf)
    scores[row, column] = head.logits[row, column] + gumbel(rows.seed[row], rows.output_index[row], ids)
    tied = scores == scores.amax(1, keepdim=True)
    return head.ids.masked_fill(~tied, torch.iinfo(torch.int64).max).amin(1)


def _choose_among(contenders: list[list[int]], logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    if all(len(ids) == 1 for ids in contenders):
        return torch.tensor([ids[0] for ids in contenders])
    width = max(len(ids) for ids in contenders)
    padded = torch.tensor([ids + [ids[0]] * (width - len(ids)) for ids in contenders])
    # Not sorted by logit, which only widens what `_choose_cut` takes for reachable.
    return _choose_cut(Candidates(padded, logits.gather(1, padded).double().div_(rows.temperature.double().unsqueeze(1))), rows)


def _choose_open(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    contenders = find_contenders(logits, rows)
    if contenders is not None:
        return _choose_among(contenders, logits, rows)
    processed = open_logits(logits, rows)
    reachable = processed >= processed.amax(1, keepdim=True) - NOISE_SPREAD
    if int(reachable.sum()) * _DENSE_SHARE > reachable.numel():
        return processed.add_(gumbel_all(rows.seed, rows.output_index, logits.shape[1])).argmax(1)
    row, ids = reachable.nonzero(as_tuple=True)
    scores = torch.full_like(processed, -torch.inf)
    scores[row, ids] = processed[row, ids] + gumbel(rows.seed[row], rows.output_index[row], ids)
    return scores.argmax(1)


def _accepted_by_ratio(logits: torch.Tensor, proposal: DraftProposal, rows: SamplingRows, layout: _Layout) -> torch.Tensor:
    """The accept test of every draft position `[R]` bool; False at the positions behind the drafts."""
    accepted = torch.zeros_like(layout.is_draft)
    for part in _chunks(layout.is_draft.nonzero().squeeze(1), logits):
        part_rows = select_rows(rows, layout.row[part], layout.position[part])
        drafts = layout.drafts[part].unsqueeze(1)
        p = probabilities(logits[part], part_rows).gather(1, drafts).squeeze(1)
        q = _draft_law(proposal, layout, part, logits.shape[1]).gather(1, drafts).squeeze(1)
        by_ratio = accepts(p, q, uniforms(part_rows.seed, part_rows.output_index, Purpose.ACCEPT))
        accepted[part] = torch.where(part_rows.temperature > 0, by_ratio, p > 0)
    return accepted


def _finish_by_ratio(
    logits: torch.Tensor, proposal: DraftProposal, rows: SamplingRows, layout: _Layout, accepted: torch.Tensor
) -> Verification:
    """Draw the one more token of each emitting row, at the position behind its accepted drafts."""
    tokens = layout.drafts.clone()
    num_accepted = _num_accepted(layout, accepted)
    last = (layout.position == num_accepted[layout.row]).nonzero().squeeze(1)
    for part in _chunks(last, logits):
        part_rows = select_rows(rows, layout.row[part], layout.position[part])
        weights = probabilities(logits[part], part_rows)
        uniform = uniforms(part_rows.seed, part_rows.output_index, Purpose.BONUS)
        rejected = layout.is_draft[part].nonzero().squeeze(1)
        if rejected.numel() > 0:
            weights[rejected] = residual(weights[rejected], _draft_law(proposal, layout, part[rejected], logits.shape[1]))
            uniform[rejected] = uniforms(part_rows.seed[rejected], part_rows.output_index[rejected], Purpose.RESIDUAL)
        tokens[part] = pick_tokens(weights, uniform)
    return _result(layout, num_accepted, tokens)


def _draft_law(proposal: DraftProposal, layout: _Layout, part: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """q `[n, V]` f64 at draft positions `part`, normalised as `pick_tokens` drew from it; one-hot if the drafts were not drawn."""
    if proposal.probs is None:
        return torch.nn.functional.one_hot(layout.drafts[part], vocab_size).double()
    q = proposal.probs[layout.row[part], layout.position[part]].double()
    return q / row_totals(q)


def _layout(proposal: DraftProposal, rows: HostRows, device: torch.device) -> _Layout:
    # Host lists: for the batches of a server they cost a third of what the same bookkeeping costs in small tensor ops.
    row: list[int] = []
    position: list[int] = []
    is_draft: list[bool] = []
    drafts: list[int] = []
    for b, (draft, emits) in enumerate(zip(proposal.drafts_host, rows.emits, strict=True)):
        if emits:
            row += [b] * (len(draft) + 1)
            position += range(len(draft) + 1)
            is_draft += [True] * len(draft) + [False]
            drafts += [*draft, 0]
    integers = torch.tensor([row, position, drafts], dtype=torch.int64, device=device)
    return _Layout(
        row=integers[0],
        position=integers[1],
        is_draft=torch.tensor(is_draft, dtype=torch.bool, device=device),
        drafts=integers[2],
        num_rows=len(proposal.drafts_host),
        num_columns=max(map(len, proposal.drafts_host), default=0) + 1,
    )


def _num_accepted(layout: _Layout, accepted: torch.Tensor) -> torch.Tensor:
    """Length `[B]` i64 of each row's leading run of accepted drafts."""
    if layout.num_columns == 1:
        return torch.zeros(layout.num_rows, dtype=torch.int64, device=accepted.device)
    grid = torch.zeros((layout.num_rows, layout.num_columns), dtype=torch.int64, device=accepted.device)
    grid[layout.row, layout.position] = accepted.to(torch.int64)
    return grid.cumprod(1).sum(1)


def _result(layout: _Layout, num_accepted: torch.Tensor, tokens: torch.Tensor) -> Verification:
    """Assemble from `tokens` `[R]`: the right token behind every run of accepted drafts, whatever stands after it."""
    kept: list[list[int]] = [[] for _ in range(layout.num_rows)]
    counts = host_ints(num_accepted)
    for row, position, token in zip(host_ints(layout.row), host_ints(layout.position), host_ints(tokens), strict=True):
        if position <= counts[row]:
            kept[row].append(token)
    return Verification(kept)


def _parts(wanted: torch.Tensor, logits: torch.Tensor, rows: SamplingRows) -> Iterator[tuple[torch.Tensor, torch.Tensor, SamplingRows]]:
    """The wanted rows `[N]` bool in chunks: (their indices, their logits, their parameters)."""
    indices = wanted.nonzero().squeeze(1)
    for part in _chunks(indices, logits):
        if part.numel() == logits.shape[0]:
            yield part, logits, rows  # the usual case, all rows alike, needs no copies
        else:
            yield part, logits[part], select_rows(rows, part)


def _chunks(indices: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if indices.numel() == 0:
        return ()
    return torch.split(indices, max(1, _CHUNK_ELEMENTS // logits.shape[1]))
