"""A device without tensors: a toy model, a toy drafter, and KV memory that records what each cell holds.

It carries out plans as the real executor does and asserts, at every step, that what a row reads is the KV of its own true tokens and that
what it writes nobody else relies on. Scheduler and engine tests use it; `submit` and `collect` are the executor's.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from paceline.core.facts import EngineFacts
from paceline.core.outcome import SlotOutcome, StepOutcome, StepStats
from paceline.core.plan import Span, SpanKind, StepPlan
from paceline.core.request import FinishReason, Request, SamplingParams

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class ToyModel:
    """The next token is a hash of all previous ones and the request's seed."""

    vocab_size: int = 11

    def digest(self, parent: int, token_id: int) -> int:
        """Stands for the KV of a token: it depends on the token and everything before it."""
        mixed = ((parent ^ (token_id + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
        return mixed ^ (mixed >> 29)

    def digests(self, token_ids: tuple[int, ...]) -> list[int]:
        found: list[int] = []
        for token_id in token_ids:
            found.append(self.digest(found[-1] if found else 0, token_id))
        return found

    def next_token(self, digest: int, seed: int) -> int:
        return self.digest(digest, seed) % self.vocab_size

    def plain_output(self, request: Request, eos_token_ids: tuple[int, ...], max_model_len: int) -> tuple[tuple[int, ...], FinishReason]:
        """What plain decoding gives: the oracle for every schedule."""
        sampling = request.sampling
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
        digest = self.digests(request.prompt_token_ids)[-1]
        output: list[int] = []
        while True:
            output.append(self.next_token(digest, sampling.seed))
            if output[-1] in stops:
                return tuple(output), FinishReason.STOP
            if len(output) == sampling.max_tokens or len(request.prompt_token_ids) + len(output) == max_model_len:
                return tuple(output), FinishReason.LENGTH
            digest = self.digest(digest, output[-1])


@dataclass(frozen=True)
class ToyDrafter:
    """Right with a set probability at each position; `eagerness` is the probability of using the whole budget."""

    accuracy: float
    eagerness: float = 0.8

    def num_drafts(self, digest: int, budget: int) -> int:
        rng = random.Random(digest)
        return budget if rng.random() < self.eagerness else rng.randint(0, budget)

    def draft(self, digest: int, right_token: int, vocab_size: int) -> int:
        rng = random.Random(digest + 1)
        return right_token if rng.random() < self.accuracy else (right_token + 1) % vocab_size


@dataclass
class FakeSlot:
    token_ids: list[int]
    digests: list[int]  # digests[i]: of token_ids[: i + 1]
    sampling: SamplingParams
    num_computed_tokens: int
    num_draft_computed_tokens: int
    page_ids: list[int] = field(default_factory=list[int])


class FakeKv:
    """One half of the KV memory: cell (page, offset) -> the digest written there last."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.cells: dict[tuple[int, int], int] = {}

    def cell(self, slot: FakeSlot, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.page_size)
        assert index < len(slot.page_ids), f"position {position} lies beyond {len(slot.page_ids)} pages of {self.page_size}"
        return slot.page_ids[index], offset

    def check(self, slot: FakeSlot, num_tokens: int, what: str) -> None:
        """The first `num_tokens` tokens of a slot can be read."""
        for position in range(num_tokens):
            cell = self.cell(slot, position)
            assert self.cells.get(cell) == slot.digests[position], (
                f"{what} KV of position {position} in page {cell[0]} is not the sequence's"
            )


class FakeExecutor:
    """Runs plans in the order they are submitted. The outcome is known at once; the caller decides how late it is collected."""

    def __init__(self, facts: EngineFacts, num_slots: int, model: ToyModel, drafter: ToyDrafter, queue_depth: int = 1) -> None:
        self.facts = facts
        self.num_slots = num_slots
        self.model = model
        self.drafter = drafter
        self.queue_depth = queue_depth
        self.slots: dict[int, FakeSlot] = {}
        self.target_kv = FakeKv(facts.page_size)
        self.draft_kv = FakeKv(facts.page_size)
        self.num_draft_kv_tokens = 0  # tokens the drafter has run since start
        self._outcomes: deque[StepOutcome] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._apply(plan)
        self._check_plan(plan)
        for span in plan.spans:  # all rows read before any writes: within one pass no row sees another's new KV
            slot = self.slots[span.slot]
            self.target_kv.check(slot, self._start(span, slot), "target")
            self.draft_kv.check(slot, slot.num_draft_computed_tokens, "drafter")
        written: set[tuple[int, int]] = set()
        outcomes = tuple(self._run(span, written) for span in plan.spans)
        num_tokens = sum(span.num_new_tokens + outcome.num_drafted for span, outcome in zip(plan.spans, outcomes, strict=True))
        assert num_tokens <= plan.num_tokens_upper_bound
        propose_ms = 1.0 if any(span.draft_budget or span.draft_catch_up for span in plan.spans) else 0.0
        stats = StepStats(
            propose_ms=propose_ms,
            forward_ms=2.0,
            verify_ms=0.5,
            total_ms=3.0 + propose_ms,
            num_rows=len(plan.spans),
            num_tokens=num_tokens,
            num_drafted_tokens=sum(outcome.num_drafted for outcome in outcomes),
            num_accepted_tokens=sum(outcome.num_accepted for outcome in outcomes),
        )
        self._outcomes.append(StepOutcome(plan.step_id, outcomes, stats))

    def collect(self) -> StepOutcome:
        return self._outcomes.popleft()

    def _apply(self, plan: StepPlan) -> None:
        for slot_id in plan.released_slots:
            del self.slots[slot_id]
        for admission in plan.admitted:
            assert admission.slot not in self.slots, f"slot {admission.slot} is admitted twice"
            assert 0 <= admission.slot < self.num_slots
            assert admission.num_draft_computed_tokens <= admission.num_computed_tokens < len(admission.token_ids)
            self.slots[admission.slot] = FakeSlot(
                token_ids=list(admission.token_ids),
                digests=self.model.digests(admission.token_ids),
                sampling=admission.sampling,
                num_computed_tokens=admission.num_computed_tokens,
                num_draft_computed_tokens=admission.num_draft_computed_tokens,
            )
        for slot_id, num_pages in plan.freed_pages:
            assert num_pages <= len(self.slots[slot_id].page_ids), f"slot {slot_id} is cut to more pages than it has"
            del self.slots[slot_id].page_ids[num_pages:]
        for slot_id, page_ids in plan.new_pages:
            self.slots[slot_id].page_ids.extend(page_ids)

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.spans, "a plan without spans"
        assert len({span.slot for span in plan.spans}) == len(plan.spans), "two spans for one slot"
        for slot in self.slots.values():
            assert len(set(slot.page_ids)) == len(slot.page_ids), "a page stands twice in one list"
            assert all(0 <= page_id < self.facts.num_pages for page_id in slot.page_ids)
        for span in plan.spans:
            slot = self.slots[span.slot]
            num_covered = span.start_max + span.num_new_tokens + span.draft_budget
            assert num_covered <= self.facts.max_model_len, f"{span} may run beyond {self.facts.max_model_len} tokens"
            assert num_covered <= len(slot.page_ids) * self.facts.page_size, f"{span} has only {len(slot.page_ids)} pages"
            assert span.draft_budget <= self.facts.max_draft_length
            assert span.num_new_tokens > 0
            if span.kind is SpanKind.PREFILL:
                assert span.draft_budget == 0
                assert span.start == span.start_max == slot.num_computed_tokens, f"{span} starts elsewhere: {slot.num_computed_tokens}"
                assert span.emits == (span.start + span.num_new_tokens == len(slot.token_ids))
            else:
                assert span.emits
                assert span.num_new_tokens == 1
                assert slot.num_computed_tokens == len(slot.token_ids) - 1
                assert span.start <= slot.num_computed_tokens <= span.start_max, f"{span} does not bound {slot.num_computed_tokens}"

    def _start(self, span: Span, slot: FakeSlot) -> int:
        """The true start: at queue depth 2 only the device knows it."""
        return span.start if span.kind is SpanKind.PREFILL else len(slot.token_ids) - 1

    def _run(self, span: Span, written: set[tuple[int, int]]) -> SlotOutcome:
        slot = self.slots[span.slot]
        drafts = self._propose(span, slot)
        start = self._start(span, slot)
        tokens = slot.token_ids[start : start + span.num_new_tokens] + drafts
        digest = slot.digests[start - 1] if start else 0
        digests: list[int] = []
        for position, token_id in enumerate(tokens, start=start):
            digest = self.model.digest(digest, token_id)
            digests.append(digest)
            cell = self.target_kv.cell(slot, position)
            assert cell not in written, f"two rows write position {position} of page {cell[0]}"
            self._check_private(slot, cell[0])
            written.add(cell)
            self.target_kv.cells[cell] = digest
        slot.num_computed_tokens = start + span.num_new_tokens
        if not span.emits:
            return SlotOutcome(span.slot, (), 0, 0, slot.num_draft_computed_tokens)
        new = [self.model.next_token(digests[span.num_new_tokens - 1], slot.sampling.seed)]
        while len(new) <= len(drafts) and drafts[len(new) - 1] == new[-1]:
            new.append(self.model.next_token(digests[span.num_new_tokens - 1 + len(new)], slot.sampling.seed))
        num_accepted = len(new) - 1
        if self.facts.drafter_keeps_kv and drafts:  # the last draft was proposed but not run
            slot.num_draft_computed_tokens += min(num_accepted, len(drafts) - 1)
        slot.num_computed_tokens += num_accepted
        for token_id in new:
            slot.digests.append(self.model.digest(slot.digests[-1], token_id))
            slot.token_ids.append(token_id)
        return SlotOutcome(span.slot, tuple(new), len(drafts), num_accepted, slot.num_draft_computed_tokens)

    def _check_private(self, slot: FakeSlot, page_id: int) -> None:
        for other in self.slots.values():
            assert other is slot or page_id not in other.page_ids, f"page {page_id} is written by one row and held by another"

    def _propose(self, span: Span, slot: FakeSlot) -> list[int]:
        """Catch-up as planned, then drafts; the drafter must have run every committed token before it can propose."""
        if self.facts.drafter_keeps_kv:
            self._catch_up(span, slot)
        else:
            assert span.draft_catch_up == 0, "catch-up for a drafter without KV"
        if span.draft_budget == 0:
            return []
        digest = slot.digests[-1]
        drafts: list[int] = []
        for _ in range(self.drafter.num_drafts(digest, span.draft_budget)):
            right_token = self.model.next_token(digest, slot.sampling.seed)
            drafts.append(self.drafter.draft(digest, right_token, self.model.vocab_size))
            digest = self.model.digest(digest, drafts[-1])
            if self.facts.drafter_keeps_kv and len(drafts) > 1:
                self._run_draft(slot, drafts)
        assert len(slot.token_ids) + len(drafts) <= self.facts.drafter_max_len, "the drafter runs beyond its context"
        return drafts

    def _catch_up(self, span: Span, slot: FakeSlot) -> None:
        start = slot.num_draft_computed_tokens
        limit = span.start + span.num_new_tokens if span.kind is SpanKind.PREFILL else len(slot.token_ids)
        end = min(start + span.draft_catch_up, limit)
        if span.kind is SpanKind.PREFILL and span.draft_catch_up:
            assert end == start + span.draft_catch_up, f"{span} catches up from {start} beyond its own tokens"
        for position in range(start, end):
            # The drafter's half of a shared page may be filled in, always with the same KV.
            self.draft_kv.cells[self.draft_kv.cell(slot, position)] = slot.digests[position]
        assert end <= self.facts.drafter_max_len or end == start, "the drafter runs beyond its context"
        assert end >= start, "the drafter is ahead of the tokens"
        assert span.draft_budget == 0 or end == len(slot.token_ids), (
            f"drafts without catch-up: {len(slot.token_ids) - end} tokens are pending"
        )
        slot.num_draft_computed_tokens = end
        self.num_draft_kv_tokens += end - start

    def _run_draft(self, slot: FakeSlot, drafts: list[int]) -> None:
        """Writes the drafter KV of the last but one draft, from which the last one was drawn."""
        position = len(slot.token_ids) + len(drafts) - 2
        digest = slot.digests[-1]
        for token_id in drafts[:-1]:
            digest = self.model.digest(digest, token_id)
        cell = self.draft_kv.cell(slot, position)
        self._check_private(slot, cell[0])
        self.draft_kv.cells[cell] = digest
        self.num_draft_kv_tokens += 1
