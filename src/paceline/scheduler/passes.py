"""The four passes that fill one step: decode rows, prompt chunks, admission, then drafts and drafter catch-up from what is left.

`Scheduler.plan` makes one `StepBuilder` per step and turns its result into a StepPlan. Outcomes are none of its business.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from paceline.core.plan import Span, SpanKind
from paceline.core.sequence import SequenceStatus
from paceline.scheduler.draft_length import DraftLengthPolicy, DraftRow
from paceline.scheduler.fair_share import fair_shares
from paceline.scheduler.prefix_cache import CachedPage
from paceline.scheduler.residents import Residents
from paceline.scheduler.row import Outlook, Row

_MAX_LOGPROBS_CHUNK = 256
"""Prompt tokens per step whose logits are all wanted: with a vocabulary of 150,000 these take 150 MB."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What no step may exceed; constant from start."""

    max_num_batched_tokens: int  # new tokens, drafts and drafter catch-up beyond one token per row, all rows together
    max_num_running: int
    max_model_len: int
    drafter_max_len: int
    drafter_keeps_kv: bool


@dataclass(slots=True)
class Work:
    """A span under construction."""

    row: Row
    slot: int
    outlook: Outlook
    kind: SpanKind
    start: int
    start_max: int
    num_new_tokens: int
    emits: bool
    draft_room: int = 0  # drafts the row can use
    catch_up_wish: int = 0  # tokens the drafter must run before it can propose
    draft_budget: int = 0
    draft_catch_up: int = 0

    def span(self) -> Span:
        return Span(
            slot=self.slot,
            kind=self.kind,
            start=self.start,
            start_max=self.start_max,
            num_new_tokens=self.num_new_tokens,
            draft_budget=self.draft_budget,
            draft_catch_up=self.draft_catch_up,
            emits=self.emits,
        )


class StepBuilder:
    """One step in the making.

    Older rows come first wherever something is short. A row that finds no page takes them from the youngest row that nothing in flight
    works for; if there is none, all younger rows sit this step out, so that one of them is idle at the next plan. The oldest
    row therefore always gets its pages in the end, and every request finishes.
    """

    def __init__(
        self,
        residents: Residents,
        waiting: deque[Row],
        policy: DraftLengthPolicy,
        limits: StepLimits,
        rotation: int,
        is_control: bool = False,
    ) -> None:
        """`is_control`: no row gets drafts, whatever the policy would say, and the drafter runs nothing but prompt chunks.

        These have no part in what control steps measure; skipped here, they would weigh on the speculative steps behind.
        """
        self._residents = residents
        self._waiting = waiting
        self._policy = policy
        self._limits = limits
        self._rotation = rotation
        self._is_control = is_control
        self._num_tokens_left = limits.max_num_batched_tokens
        self._blocked_order: int | None = None  # age of the oldest row that found no page
        self._is_prompt_held_back = False  # a prompt got less than the budget, and counts on free pages for the rest
        self._works: dict[int, Work] = {}  # by slot, in planning order
        self.admitted: list[Row] = []
        self.preempted: list[Row] = []

    def build(self) -> list[Work]:
        """Runs the four passes. Rows change slot, pages and status here; nothing else of theirs does."""
        prefills = self._decode_rows()
        self._prompt_chunks(prefills)
        self._admissions()
        works = list(self._works.values())
        drafting = [work for work in works if work.kind is SpanKind.PREFILL] if self._is_control else works
        if drafting and self._num_tokens_left > 0 and not self._stays_plain(drafting):
            self._drafts(drafting)
        return works

    # Pass 1

    def _decode_rows(self) -> list[tuple[Row, Outlook]]:
        """One token for each row in decode; returns the others, which are in prefill.

        Pages go by age, so the oldest prompt takes its next page here, in its turn; pass 2 has a token left for it, because there are no
        more rows than the budget has tokens.
        """
        prefills: list[tuple[Row, Outlook]] = []
        for row in tuple(self._residents.running):
            if row.sequence.slot is None:  # preempted by an older row just now
                continue
            outlook = row.look_ahead()
            if not outlook.is_decode:
                if prefills or (self._may_run(row) and self._make_room(row, outlook.num_computed_tokens + 1)):
                    prefills.append((row, outlook))
            elif self._may_run(row) and self._is_needed(row, outlook) and self._make_room(row, outlook.max_len):
                self._add_decode(row, outlook)
        return prefills

    def _is_needed(self, row: Row, outlook: Outlook) -> bool:
        """False if the row certainly ends with what is in flight, or may already stand at the model's limit."""
        sequence = row.sequence
        if outlook.min_len - sequence.num_prompt_tokens >= row.request.sampling.max_tokens:
            return False
        return outlook.max_len <= self._limits.max_model_len and outlook.min_len < self._limits.max_model_len

    def _add_decode(self, row: Row, outlook: Outlook) -> None:
        self._add(Work(row, _slot(row), outlook, SpanKind.DECODE, outlook.min_len - 1, outlook.max_len - 1, 1, True))

    # Pass 2

    def _prompt_chunks(self, prefills: list[tuple[Row, Outlook]]) -> None:
        for row, outlook in prefills:
            if row.sequence.slot is not None and self._may_run(row):
                self._add_chunk(row, outlook)

    def _add_chunk(self, row: Row, outlook: Outlook) -> None:
        """As many pending tokens as budget and free pages allow, if any."""
        start = outlook.num_computed_tokens
        num_tokens = len(row.sequence.token_ids)
        end = min(num_tokens, start + self._num_tokens_left)
        if row.request.sampling.num_prompt_logprobs is not None:
            end = min(end, start + _MAX_LOGPROBS_CHUNK)
            self._is_prompt_held_back = end < num_tokens
        covered = self._residents.stretch(row, end)
        if covered > start:
            self._add(Work(row, _slot(row), outlook, SpanKind.PREFILL, start, start, covered - start, covered == num_tokens))

    # Pass 3

    def _admissions(self) -> None:
        """Waiting rows in order, until one does not fit: nobody overtakes."""
        residents = self._residents
        while self._waiting and self._may_admit():
            row = self._waiting[0]
            cached = residents.match(row)
            if not self._fits(row, cached):
                break
            self._waiting.popleft()
            residents.admit(row, cached)
            self.admitted.append(row)
            outlook = row.look_ahead()
            if outlook.is_decode:
                is_covered = residents.grow(row, outlook.max_len)
                assert is_covered, "admission found enough pages"
                self._add_decode(row, outlook)
            else:
                self._add_chunk(row, outlook)

    def _may_admit(self) -> bool:
        residents = self._residents
        has_room = residents.has_free_slot and len(residents.running) < self._limits.max_num_running
        return has_room and self._num_tokens_left > 0 and not self._is_prompt_held_back

    def _fits(self, row: Row, cached: list[CachedPage]) -> bool:
        """All its known tokens must find pages, and each running row one more: else it would soon be preempted, its prefill lost.

        No running prompt still counts on free pages here: it has taken the whole budget, all free pages, or all it needs.
        """
        pool = self._residents.pool
        num_new_pages = pool.pages_for(len(row.sequence.token_ids)) - len(cached)
        num_revived_pages = sum(pool.ref_counts[page.page_id] == 0 for page in cached)
        return num_new_pages + num_revived_pages + len(self._residents.running) <= pool.num_free

    # Pass 4

    def _drafts(self, works: list[Work]) -> None:
        """Shares the rest of the budget among the rows that can use it; a row's catch-up comes before its drafts."""
        rows = [self._draft_row(work) for work in works]
        lengths = self._policy.allot(rows, self._num_tokens_left)
        wishes = [self._wish(work, row, length) for work, row, length in zip(works, rows, lengths, strict=True)]
        first = self._rotation % len(works)
        shares = fair_shares(wishes, self._num_tokens_left, first)
        for index in (*range(first, len(works)), *range(first)):
            self._spend(works[index], wishes[index], shares[index])

    def _stays_plain(self, works: list[Work]) -> bool:
        """Whether nothing of this pass is needed: most steps of an engine whose drafter does not pay."""
        if any(work.kind is SpanKind.PREFILL for work in works):
            return False
        if not any(work.row.draft_cap for work in works):
            return True  # asked for without drafts: no dearer than without a drafter
        return self._policy.stays_plain([work.row.request.request_id for work in works])

    def _draft_row(self, work: Work) -> DraftRow:
        """What the policy decides by. A prompt chunk catches up for the drafts of the decode steps to come, if there can be any."""
        row, outlook = work.row, work.outlook
        request_id = row.request.request_id
        keeps_kv = self._limits.drafter_keeps_kv
        if work.kind is SpanKind.DECODE:
            num_pending = outlook.num_draft_pending_tokens if keeps_kv else 0
            room = self._draft_room(row, outlook.min_len, outlook.max_len)
            num_to_go = row.request.sampling.max_tokens - (outlook.min_len - row.sequence.num_prompt_tokens)
            return DraftRow(request_id, room, outlook.max_len, num_pending, num_tokens_to_go=num_to_go)
        num_tokens, end = len(row.sequence.token_ids), work.start + work.num_new_tokens
        limit = self._draft_room(row, num_tokens + 1, num_tokens + 1) if keeps_kv else 0
        num_pending = end - (num_tokens - outlook.num_draft_pending_tokens) if keeps_kv else 0
        return DraftRow(request_id, limit, end, num_pending, work.num_new_tokens)

    def _draft_room(self, row: Row, min_len: int, max_len: int) -> int:
        """Drafts that a decode step between these lengths could use: the step itself yields one token more."""
        sampling = row.request.sampling
        room = min(
            row.draft_cap,
            sampling.max_tokens - (min_len - row.sequence.num_prompt_tokens) - 1,
            self._limits.max_model_len - min_len - 1,
            self._limits.max_model_len - max_len,
            self._limits.drafter_max_len - max_len,
        )
        return max(room, 0)

    def _wish(self, work: Work, row: DraftRow, length: int) -> int:
        """Notes the drafts and the catch-up that a row shall have; returns their cost in tokens. The drafter's first token is free."""
        length = max(min(row.limit, length), 0)
        if length == 0:
            return 0
        work.catch_up_wish = row.num_catch_up_tokens
        if work.kind is SpanKind.DECODE:
            work.draft_room = length
        return max(work.catch_up_wish - 1, 0) + work.draft_room

    def _spend(self, work: Work, wish: int, share: int) -> None:
        """Turns a share into catch-up and, once that is complete, drafts; an unfinished catch-up takes all of its share."""
        if share == 0 and wish > 0:
            return
        work.draft_catch_up = min(work.catch_up_wish, share + 1)
        if work.draft_room == 0:
            return
        draft_budget = share - max(work.draft_catch_up - 1, 0)
        # Drafts never cost another row its pages: with few free ones the budget shrinks.
        num_certain = work.start_max + 1
        work.draft_budget = self._residents.stretch(work.row, num_certain + draft_budget) - num_certain

    # All passes

    def _may_run(self, row: Row) -> bool:
        return self._num_tokens_left > 0 and (self._blocked_order is None or row.order < self._blocked_order)

    def _make_room(self, row: Row, num_tokens: int) -> bool:
        """Pages for `num_tokens` tokens, if need be those of younger rows; False if the row must wait for a commit."""
        while not self._residents.grow(row, num_tokens):
            victim = self._youngest_idle(row)
            if victim is None:
                self._blocked_order = row.order
                return False
            self._preempt(victim)
        return True

    def _youngest_idle(self, row: Row) -> Row | None:
        """The youngest row, younger than `row`, with nothing in flight. Pass 1 goes by age, so this step has no work for it yet."""
        for victim in reversed(self._residents.running):
            if victim.order <= row.order:
                return None
            if not victim.in_flight:
                return victim
        return None

    def _preempt(self, victim: Row) -> None:
        """Back to the waiting rows, in order of age, to be computed again: prompt and output alike."""
        sequence = victim.sequence
        self._residents.stop_running(victim)
        self._residents.release(victim)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_draft_computed_tokens = 0
        victim.num_preemptions += 1
        self._waiting.insert(bisect_left(self._waiting, victim.order, key=lambda row: row.order), victim)
        self.preempted.append(victim)

    def _add(self, work: Work) -> None:
        self._works[work.slot] = work
        self._num_tokens_left -= work.num_new_tokens


def _slot(row: Row) -> int:
    slot = row.sequence.slot
    assert slot is not None, "a running row has a slot"
    return slot
