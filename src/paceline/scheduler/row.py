"""A sequence with what the scheduler alone must remember of it: steps in flight, its page hashes, its times.

`look_ahead` is the arithmetic of overlap: where a row will stand once everything in flight is done. No pages or slots change hands here.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.outcome import DraftStats, RequestStats, TokenLogprobs
from paceline.core.plan import Span, SpanKind
from paceline.core.request import Request
from paceline.core.sequence import Sequence, SequenceStatus


class Outlook(NamedTuple):
    """A row after all its steps in flight: exact in prefill, bounds in decode, where the device alone knows how many drafts it accepted."""

    is_decode: bool  # exactly one token will be pending
    num_computed_tokens: int  # in prefill: where the next chunk starts
    min_len: int
    max_len: int
    num_draft_pending_tokens: int  # at most so many committed tokens without drafter KV


@dataclass(slots=True, eq=False)
class Row:
    """Scheduler-side state of one request from `add` until its pages are back."""

    sequence: Sequence
    order: int  # grows with arrival: the smaller, the older
    draft_cap: int  # K of this request
    stop_token_ids: frozenset[int]
    in_flight: deque[Span] = field(default_factory=deque[Span])
    num_covered_tokens: int = 0  # tokens that pages must cover for the last planned span
    page_hashes: list[bytes] = field(default_factory=list[bytes])
    num_cached_pages: int = 0  # leading pages known to the prefix cache, or found there in another copy
    num_cached_draft_pages: int = 0  # the same for the drafter's half
    num_hit_tokens: int = 0  # prompt tokens that the prefix cache supplied at first admission
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])  # of the prompt's tokens from the second on
    num_preemptions: int = 0
    admitted_s: float | None = None  # first admission
    first_token_s: float | None = None

    @property
    def request(self) -> Request:
        return self.sequence.request

    @property
    def is_finished(self) -> bool:
        return self.sequence.status is SequenceStatus.FINISHED

    def look_ahead(self) -> Outlook:
        """Fold the spans in flight over the committed state."""
        sequence = self.sequence
        num_computed = sequence.num_computed_tokens
        min_len = max_len = len(sequence.token_ids)
        draft_pending = min_len - sequence.num_draft_computed_tokens
        is_decode = min_len - num_computed == 1
        for span in self.in_flight:
            covers_drafter = span.draft_catch_up >= draft_pending
            if span.kind is SpanKind.PREFILL:
                num_computed = span.start + span.num_new_tokens
                draft_pending -= span.draft_catch_up
            elif covers_drafter:
                # Draft tokens j < K are run to draft j + 1, the last one is not: with all K accepted it is pending beside the bonus token.
                draft_pending = 1 if span.draft_budget else 0
            else:
                draft_pending -= span.draft_catch_up
            if span.emits:
                is_decode = True
                min_len += 1
                max_len += span.draft_budget + 1
                draft_pending += 1
        return Outlook(is_decode, num_computed, min_len, max_len, draft_pending)


def new_row(request: Request, order: int, draft_cap: int, eos_token_ids: tuple[int, ...]) -> Row:
    """A waiting row. Its stop tokens are the request's own and, unless it ignores them, the model's."""
    stop_token_ids = frozenset(request.sampling.stop_token_ids)
    if not request.sampling.ignore_eos:
        stop_token_ids |= frozenset(eos_token_ids)
    sequence = Sequence(
        request=request,
        token_ids=list(request.prompt_token_ids),
        num_prompt_tokens=len(request.prompt_token_ids),
        draft_stats=DraftStats(accepted_histogram=[0] * (draft_cap + 1)),
    )
    return Row(sequence, order, draft_cap, stop_token_ids)


def request_stats(row: Row, end_s: float) -> RequestStats:
    """What a request cost. Phases it never reached count 0 ms; queueing ends at first admission, prefill at the first token."""
    admitted_s = end_s if row.admitted_s is None else row.admitted_s
    first_token_s = end_s if row.first_token_s is None else row.first_token_s
    return RequestStats(
        draft=row.sequence.draft_stats,
        max_draft_length=row.draft_cap,
        num_cached_tokens=row.num_hit_tokens,
        num_preemptions=row.num_preemptions,
        queue_ms=(admitted_s - row.request.arrival_s) * 1e3,
        prefill_ms=(first_token_s - admitted_s) * 1e3,
        decode_ms=(end_s - first_token_s) * 1e3,
    )
