"""Drives a Scheduler against the fake executor as the engine loop does, and checks every invariant after every call."""

from collections import Counter, deque
from collections.abc import Callable, Sequence

from paceline.core.facts import EngineFacts
from paceline.core.outcome import TokenDelta
from paceline.core.plan import SpanKind, StepPlan
from paceline.core.request import FinishReason, Request, SamplingParams
from paceline.core.sequence import SequenceStatus
from paceline.core.stats import Speedup
from paceline.scheduler.draft_length import DraftLengthPolicy, FullDraftLength
from paceline.scheduler.observation import ControlSteps, StepObservation
from paceline.scheduler.row import Row
from paceline.scheduler.scheduler import Scheduler, SchedulerConfig
from tests.fakes.fake_executor import FakeExecutor, ToyDrafter, ToyModel


def make_facts(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_model_len: int | None = None,
    max_draft_length: int = 3,
    keeps_kv: bool = False,
    drafter_max_len: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> EngineFacts:
    limit = num_pages * page_size if max_model_len is None else max_model_len
    return EngineFacts(
        model_name="toy",
        architecture="llama",
        device="cpu",
        dtype="float32",
        vocab_size=11,
        max_model_len=limit,
        max_position_embeddings=4096,
        num_pages=num_pages,
        page_size=page_size,
        target_page_bytes=1024,
        drafter_page_bytes=256 if keeps_kv else 0,
        target_weight_bytes=0,
        drafter_weight_bytes=0,
        drafter="draft_model" if keeps_kv else "ngram",
        drafter_max_len=limit if drafter_max_len is None else drafter_max_len,
        max_draft_length=max_draft_length,
        eos_token_ids=eos_token_ids,
        choices=(),
    )


def make_config(
    *,
    max_num_batched_tokens: int = 64,
    min_batch_size: int = 1,
    max_batch_size: int = 8,
    batch_wait_ms: float = 0.0,
    enable_prefix_caching: bool = True,
    control_share: float = 0.0,
) -> SchedulerConfig:
    return SchedulerConfig(max_num_batched_tokens, min_batch_size, max_batch_size, batch_wait_ms, enable_prefix_caching, control_share)


def make_request(
    request_id: str,
    prompt: tuple[int, ...],
    max_tokens: int = 8,
    *,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    seed: int = 0,
    max_draft_length: int | None = None,
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos)
    return Request(request_id, prompt, sampling, arrival_s=0.0, max_draft_length=max_draft_length)


class ListedControl:
    """Control steps by a list over plans, in turn; `steps` holds every observation."""

    def __init__(self, flags: Sequence[bool]) -> None:
        self.steps: list[StepObservation] = []
        self._flags = list(flags)
        self._num_plans = 0

    def is_control(self, can_last: Callable[[int, int], bool]) -> bool:
        self._num_plans += 1
        return self._flags[(self._num_plans - 1) % len(self._flags)]

    def observe_step(self, step: StepObservation) -> None:
        self.steps.append(step)

    def speedups(self) -> tuple[Speedup, ...]:
        return ()


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Driver:
    """Scheduler, fake executor and the steps between them. `deltas` collects what each request received."""

    def __init__(
        self,
        facts: EngineFacts,
        config: SchedulerConfig,
        *,
        depth: int = 1,
        policy: DraftLengthPolicy | None = None,
        drafter: ToyDrafter | None = None,
        scheduler_type: type[Scheduler] = Scheduler,
        control: ControlSteps | None = None,
    ) -> None:
        self.facts = facts
        self.config = config
        self.clock = Clock()
        self.model = ToyModel()
        self.scheduler = scheduler_type(config, facts, FullDraftLength() if policy is None else policy, self.clock, control)
        self.executor = FakeExecutor(facts, config.max_batch_size, self.model, drafter or ToyDrafter(1.0, 1.0), depth)
        self.in_flight: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.requests: dict[str, Request] = {}
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.num_steps = 0
        self._covered: dict[int, int] = {}  # slot -> tokens that the last plan needs pages for
        self._num_passed_over = 0

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.requests[request.request_id] = request
            self.deltas[request.request_id] = []

    def abort(self, request_id: str) -> None:
        self._receive(self.scheduler.abort(request_id))
        self.check_state()

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self._check_budget(plan)
            self.executor.submit(plan)
            self.in_flight.append(plan)
            self.plans.append(plan)
            for span in plan.spans:
                self._covered[span.slot] = span.start_max + span.num_new_tokens + span.draft_budget
        self.check_state()
        self._check_seniority()
        return plan

    def commit(self) -> list[TokenDelta]:
        plan = self.in_flight.popleft()
        deltas = self.scheduler.commit(plan, self.executor.collect())
        self._receive(deltas, plan)
        self.check_state()
        self._check_committed(plan)
        self.num_steps += 1
        return deltas

    def step(self) -> bool:
        """One turn of the engine loop; False if nothing could run."""
        while len(self.in_flight) < self.executor.queue_depth and self.plan() is not None:
            pass
        if not self.in_flight:
            return False
        self.commit()
        return True

    def run(self, max_steps: int = 1000) -> None:
        """Until every request has ended and every step is committed."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self.in_flight:
                break
            assert self.step(), "unfinished requests, nothing in flight, and no plan"
        assert not self.scheduler.has_unfinished, f"not done after {max_steps} steps"
        self.check_drained()

    def output(self, request_id: str) -> tuple[int, ...]:
        return tuple(token_id for delta in self.deltas[request_id] for token_id in delta.token_ids)

    def final(self, request_id: str) -> TokenDelta:
        return self.deltas[request_id][-1]

    def expected(self, request_id: str) -> tuple[tuple[int, ...], FinishReason]:
        return self.model.plain_output(self.requests[request_id], self.facts.eos_token_ids, self.facts.max_model_len)

    def check_outputs(self) -> None:
        """Invariants (7) and (9): plain decoding's tokens and one finish reason for all; an aborted request has a beginning of them."""
        for request_id, deltas in self.deltas.items():
            tokens, reason = self.expected(request_id)
            final = deltas[-1]
            if final.finish_reason is FinishReason.ABORT:
                assert self.output(request_id) == tokens[: len(self.output(request_id))]
            else:
                assert (self.output(request_id), final.finish_reason) == (tokens, reason)

    def check_drained(self) -> None:
        """All pages and slots are back."""
        residents = self.scheduler._residents
        assert residents.pool.num_free == self.facts.num_pages
        assert not residents.by_slot
        assert not residents.running
        assert len(residents._free_slots) == self.config.max_batch_size

    def check_state(self) -> None:
        """Invariants (2), (3) and the order of queues; callable at any moment."""
        residents = self.scheduler._residents
        pool = residents.pool
        owners = Counter(page_id for row in residents.by_slot.values() for page_id in row.sequence.page_ids)
        assert [owners[page_id] for page_id in range(pool.num_pages)] == pool.ref_counts, "reference counts"
        free = Counter([*pool._unused, *pool._kept])
        assert all(count == 1 for count in free.values()), "a page is free twice"
        assert set(free).isdisjoint(owners), "a page is free and owned"
        assert len(free) + len(owners) == pool.num_pages, "a page is lost"
        assert set(pool._kept) <= set(residents.cache._hashes), "a kept page without an entry"
        assert {page.page_id for page in residents.cache._entries.values()} == set(residents.cache._hashes)
        assert sum(pool._is_cached) == len(residents.cache)
        orders = [row.order for row in residents.running]
        assert orders == sorted(orders), "running rows out of order"
        orders = [row.order for row in self.scheduler._waiting]
        assert orders == sorted(orders), "waiting rows out of order"
        for row in self.scheduler._waiting:
            sequence = row.sequence
            assert (sequence.status, sequence.slot, sequence.page_ids) == (SequenceStatus.WAITING, None, [])
            assert (sequence.num_computed_tokens, sequence.num_draft_computed_tokens) == (0, 0)
        for slot, row in residents.by_slot.items():
            assert row.sequence.slot == slot
            assert row.is_finished != (row in residents.running)
            assert not row.is_finished or row.in_flight, "a finished row keeps its slot with nothing in flight"
            self._check_cached_pages(row)

    def _check_seniority(self) -> None:
        """Whatever is short, the oldest running row waits at most until the steps in flight are committed."""
        running = self.scheduler._residents.running
        self._num_passed_over = self._num_passed_over + 1 if running and not running[0].in_flight else 0
        assert self._num_passed_over <= self.executor.queue_depth, "the oldest row is passed over"

    def _check_cached_pages(self, row: Row) -> None:
        """Invariant (3): what the cache knows of a row's pages is committed, full, and truly on the device."""
        sequence = row.sequence
        size = self.facts.page_size
        assert row.num_cached_pages * size <= sequence.num_computed_tokens
        cache = self.scheduler._residents.cache
        digests = self.model.digests(tuple(sequence.token_ids))
        for index in range(row.num_cached_pages):
            page_id = sequence.page_ids[index]
            page_hash = cache._hashes.get(page_id)
            if page_hash is None:
                continue
            assert page_hash == row.page_hashes[index]
            page = digests[index * size : (index + 1) * size]
            assert [self.executor.target_kv.cells.get((page_id, offset)) for offset in range(size)] == page
            if cache._entries[page_hash].has_drafter_half:
                assert [self.executor.draft_kv.cells.get((page_id, offset)) for offset in range(size)] == page

    def _check_budget(self, plan: StepPlan) -> None:
        """Invariant (6), and that a plan is what it says."""
        cost = sum(span.num_new_tokens + span.draft_budget + max(span.draft_catch_up - 1, 0) for span in plan.spans)
        assert cost <= self.config.max_num_batched_tokens, f"{cost} tokens planned"
        assert plan.num_tokens_upper_bound == sum(span.num_new_tokens + span.draft_budget for span in plan.spans)
        assert len(plan.spans) <= self.config.max_batch_size
        for span in plan.spans:
            row = self.scheduler._residents.by_slot[span.slot]
            assert span.draft_budget <= row.draft_cap
            assert span.draft_catch_up == 0 or (self.facts.drafter_keeps_kv and row.draft_cap > 0)

    def _check_committed(self, plan: StepPlan) -> None:
        """Invariants (1), (4) and (5) for the rows of a committed plan."""
        residents = self.scheduler._residents
        for span in plan.spans:
            row = residents.by_slot.get(span.slot)
            if row is None or row.is_finished:
                continue
            sequence = row.sequence
            tokens, _ = self.expected(row.request.request_id)
            assert tuple(sequence.token_ids[sequence.num_prompt_tokens :]) == tokens[: sequence.num_output_tokens], "not the truth"
            num_needed = self._covered[span.slot]
            if not row.in_flight:
                num_needed = len(sequence.token_ids)
                if span.emits:
                    assert sequence.num_pending_tokens == 1
            assert len(sequence.page_ids) <= residents.pool.pages_for(num_needed), "pages beyond need"
            assert sequence.num_draft_computed_tokens <= len(sequence.token_ids)

    def _receive(self, deltas: list[TokenDelta], plan: StepPlan | None = None) -> None:
        assert len({delta.request_id for delta in deltas}) == len(deltas), "two deltas of one request in one step"
        largest = max((span.draft_budget for span in plan.spans), default=0) + 1 if plan else 0
        for delta in deltas:
            earlier = self.deltas[delta.request_id]
            assert not earlier or earlier[-1].finish_reason is None, "a delta after the end"
            assert (delta.stats is not None) == (not earlier or delta.finish_reason is not None), "stats go with the first and the last"
            assert len(delta.token_ids) <= largest
            assert delta.token_ids or delta.finish_reason is not None
            earlier.append(delta)


def decode_budgets(plan: StepPlan) -> dict[int, int]:
    return {span.slot: span.draft_budget for span in plan.spans if span.kind is SpanKind.DECODE}
