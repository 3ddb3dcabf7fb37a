"""How many drafts each row may have in the next step. The scheduler asks here, once per step, and divides the token budget accordingly.

Under the rule `coupled` the output never depends on the answer: a wrong length costs time, never a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.facts import EngineFacts
from paceline.core.stats import GuardState, SwitchOff
from paceline.scheduler.acceptance import Acceptance
from paceline.scheduler.allotment import Allotment, Candidate, divide
from paceline.scheduler.bands import rows_band
from paceline.scheduler.cost import BatchCost, CostModel
from paceline.scheduler.draft_record import DraftRecord, DraftReport
from paceline.scheduler.guard import DRAFTING_SHARE, Account
from paceline.scheduler.observation import StepObservation
from paceline.scheduler.trials import Trial, Trials

_EXTENSION = ""  # key of the trials of longer drafts; no request has it
_MAX_CATCH_UP_STEPS = 64  # steps within which the drafter's catch-up must have paid


_QUIET_STEPS = 16  # plain steps of the same rows, with nothing learned of acceptance, for which one decision holds at most
_HOLDING_SHARE = 0.6  # of the best row's acceptance: a row below it is what holds a batch back


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A row of the step being planned."""

    request_id: str
    limit: int  # most drafts that it could use; 0 for a row that must not or cannot have any
    num_context_tokens: int
    num_catch_up_tokens: int  # what the drafter must run before it can propose; 0 if it keeps no KV
    num_prompt_tokens: int = 0  # above 0: a prompt chunk of so many tokens, which itself has no drafts
    num_tokens_to_go: int = 0  # output tokens that the request may still bring

    @property
    def num_late_tokens(self) -> int:
        """Catch-up beyond the two tokens that drafting itself leaves behind."""
        return max(self.num_catch_up_tokens - 2, 0)


class DraftLengthPolicy(Protocol):
    """Decides draft lengths. Called by the scheduler only."""

    def stays_plain(self, request_ids: Sequence[str]) -> bool:
        """Whether this step of just these rows, all in decode, has no drafts by an earlier decision; else `allot` is to be asked.

        True counts as a planned step.
        """
        ...

    def allot(self, rows: Sequence[DraftRow], num_tokens_left: int) -> list[int]:
        """Drafts wanted for each row of the step, 0 .. its limit; with 0 the drafter does not run for the row at all.

        `num_tokens_left`: what drafts and catch-up may cost together. For a prompt chunk a number above 0 only means that the drafter
        shall run its tokens.
        """
        ...

    def observe(self, request_id: str, num_allotted: int, num_drafted: int, num_accepted: int) -> None:
        """Learns from one committed decode step of a row; all three are 0 for a plain one."""
        ...

    def observe_step(self, step: StepObservation) -> None:
        """Learns from a committed step as a whole, after its rows."""
        ...

    def forget(self, request_id: str) -> None:
        """Drops what was learned of a request that ended."""
        ...

    def report(self) -> DraftReport:
        """State and events, for EngineStats."""
        ...


class FullDraftLength:
    """As many drafts as each row can use, always: `--speculation on`."""

    def stays_plain(self, request_ids: Sequence[str]) -> bool:
        """Never by an earlier decision."""
        return False

    def allot(self, rows: Sequence[DraftRow], num_tokens_left: int) -> list[int]:
        """Every row's limit."""
        return [row.limit for row in rows]

    def observe(self, request_id: str, num_allotted: int, num_drafted: int, num_accepted: int) -> None:
        """Nothing is learned."""

    def observe_step(self, step: StepObservation) -> None:
        """Nothing is learned."""

    def forget(self, request_id: str) -> None:
        """Nothing was learned."""

    def report(self) -> DraftReport:
        """There is no guard."""
        return DraftReport({}, {}, {})


class NoDraftLength(FullDraftLength):
    """Where there is no drafter every limit is 0, so that nobody need ask."""

    def stays_plain(self, request_ids: Sequence[str]) -> bool:
        """Always."""
        return True


@dataclass(frozen=True, slots=True)
class _Batch:
    """The decoding rows of the step being planned, and what decides about them all."""

    rows: Sequence[DraftRow]
    costs: BatchCost
    plain_ms: float
    max_drafts: int
    band: str


class GuardedDraftLength:
    """As many drafts as make the step's tokens per second highest, as long as no row pays for it and the account is solvent.

    Steps with a prompt chunk have no drafts: the chunk takes most of their time, and what they would take without drafts is never measured.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self._acceptance = Acceptance()
        self._costs = CostModel(facts)
        self._account = Account()
        self._trials = Trials()
        self._record = DraftRecord()
        self._step = 0
        self._quiet_rows: list[str] = []  # of the last decision not to draft
        self._quiet_band = ""
        self._quiet_state = GuardState.PLAIN
        self._quiet_version = 0
        self._quiet_until = 0
        self._is_catching_up = True  # whether prompts are worth running through the drafter
        self._collapsed_position: int | None = None

    def stays_plain(self, request_ids: Sequence[str]) -> bool:
        """See DraftLengthPolicy. To decide takes a noticeable part of a step, to see that nothing has changed hardly any."""
        is_over = self._step + 1 >= self._quiet_until or self._acceptance.version != self._quiet_version
        if is_over or request_ids != self._quiet_rows:
            return False
        self._step += 1
        self._record.note(self._quiet_band, self._quiet_state, 0.0)
        return True

    def allot(self, rows: Sequence[DraftRow], num_tokens_left: int) -> list[int]:
        """See DraftLengthPolicy."""
        if any(row.num_prompt_tokens for row in rows):
            return self._prompts_to_run(rows)
        num_may_draft = sum(row.limit > 0 for row in rows)
        if num_may_draft == 0:
            return [0] * len(rows)
        self._step += 1
        num_context_tokens = sum(row.num_context_tokens for row in rows)
        band = rows_band(len(rows))
        costs = self._costs.batch(len(rows), num_context_tokens)
        if costs.place.needs_reference:
            state, lengths = GuardState.MEASURING, [0] * len(rows)
        else:
            state, lengths = self._lengths(_Batch(rows, costs, costs.plain_ms, num_tokens_left, band))
            if not any(lengths):
                self._be_quiet(rows, band, state)
            self._is_catching_up = self._record.is_drafting(band) or state is GuardState.DRAFTING
        self._record.note(band, state, sum(lengths) / num_may_draft)
        return lengths

    def observe(self, request_id: str, num_allotted: int, num_drafted: int, num_accepted: int) -> None:
        """See DraftLengthPolicy."""
        self._acceptance.observe(request_id, num_allotted, num_drafted, num_accepted)
        if num_allotted:
            self._trials.end(request_id, num_drafted, num_accepted)

    def observe_step(self, step: StepObservation) -> None:
        """Books the step in the account, at the cost of plain decoding as known before it, then learns what it cost."""
        if step.num_allotted_tokens or step.num_late_tokens:
            self._costs.drafter.observe(step.propose_ms, step.longest_draft, step.num_late_tokens)
        if step.has_prefill or step.num_rows == 0:
            self._account.credit(-step.propose_ms)
            return
        self._account.spend(step.duration_ms)
        if step.num_drafted_tokens:
            # A step with drafts runs all that a plain one does, so the latter cannot take longer.
            plain_ms = min(self._costs.batch(step.num_rows, step.num_context_tokens).low_plain_ms, step.duration_ms - step.propose_ms)
            self._account.credit(step.num_emitted_tokens / step.num_rows * plain_ms - step.duration_ms)
            self._watch_positions(step.num_rows)
        else:
            self._account.credit(-step.propose_ms)
        self._costs.observe(step)

    def forget(self, request_id: str) -> None:
        """See DraftLengthPolicy."""
        self._acceptance.forget(request_id)
        self._trials.forget(request_id)

    def report(self) -> DraftReport:
        """See DraftLengthPolicy."""
        return self._record.report()

    def _prompts_to_run(self, rows: Sequence[DraftRow]) -> list[int]:
        """1 for each prompt chunk that the drafter shall run: oldest first, as far as drafting pays and the account can lose their time."""
        lengths = [0] * len(rows)
        if not self._is_catching_up:
            return lengths
        num_tokens, least_plain_ms = 0, self._costs.least_plain_ms()
        for i, row in enumerate(rows):
            if row.num_prompt_tokens and row.limit:
                num_tokens += row.num_catch_up_tokens
                if not self._account.can_lose(self._costs.drafter.high_catch_up_ms(num_tokens), least_plain_ms, DRAFTING_SHARE):
                    break
                lengths[i] = 1
        return lengths

    def _be_quiet(self, rows: Sequence[DraftRow], band: str, state: GuardState) -> None:
        """Lets a decision not to draft hold until a trial is due; for as long as ever if one is due now that the budget does not allow."""
        self._quiet_rows = [row.request_id for row in rows]
        self._quiet_band, self._quiet_state = band, state
        self._quiet_version = self._acceptance.version
        self._quiet_until = self._step + _QUIET_STEPS
        next_trial = self._trials.next_step(self._quiet_rows, self._step)
        if next_trial is not None:
            self._quiet_until = min(self._quiet_until, next_trial)

    def _lengths(self, batch: _Batch) -> tuple[GuardState, list[int]]:
        """State and drafts of a step whose plain cost is known."""
        found = self._divide(batch, has_free_drafter=False)
        lengths = list(found.lengths)
        state, reason = GuardState.DRAFTING, None
        if not any(lengths):
            state, reason = GuardState.PLAIN, SwitchOff.ROW if found.is_held_by_row else SwitchOff.ACCEPTANCE
        elif not self._pays_for_catch_up(batch, found):
            state, reason = GuardState.PLAIN, SwitchOff.DRAFTER_TIME
        elif not self._account.can_lose(self._worst_loss_ms(batch, lengths), self._costs.least_plain_ms(), DRAFTING_SHARE):
            state, reason = GuardState.INSOLVENT, SwitchOff.ACCOUNT
        if reason is not None:
            lengths = [0] * len(batch.rows)
            if self._record.is_drafting(batch.band):
                is_of_time = reason is SwitchOff.ACCEPTANCE and self._is_drafter_slow(batch)
                self._record.switch_off(batch.band, SwitchOff.DRAFTER_TIME if is_of_time else reason)
        if self._try_again(batch, lengths, reason is SwitchOff.ROW) and state is GuardState.PLAIN:
            state = GuardState.TRIAL
        return state, lengths

    def _divide(self, batch: _Batch, has_free_drafter: bool) -> Allotment:
        acceptance = self._acceptance
        candidates = [
            Candidate(acceptance.survival(row.request_id, row.limit), acceptance.propensity(row.request_id)) for row in batch.rows
        ]
        drafter_ms = _no_time if has_free_drafter else self._costs.drafter.ms
        return divide(candidates, batch.costs.target_ms, drafter_ms, batch.plain_ms, batch.max_drafts)

    def _is_drafter_slow(self, batch: _Batch) -> bool:
        """Whether drafts that do not pay would, if they took no time to make."""
        return any(self._divide(batch, has_free_drafter=True).lengths)

    def _pays_for_catch_up(self, batch: _Batch, found: Allotment) -> bool:
        """Whether the drafter's catch-up is earned back while the rows that need it still run."""
        late = [row for row, length in zip(batch.rows, found.lengths, strict=True) if length and row.num_late_tokens]
        if not late:
            return True
        num_steps = min(min(row.num_tokens_to_go for row in late) / found.speed, _MAX_CATCH_UP_STEPS)
        gain_ms = (found.speed - 1) * batch.plain_ms * num_steps
        return self._costs.drafter.catch_up_ms(sum(row.num_late_tokens for row in late)) < gain_ms

    def _worst_loss_ms(self, batch: _Batch, lengths: Sequence[int]) -> float:
        """What the step loses if it is slow and no draft is accepted."""
        num_late = sum(row.num_late_tokens for row, length in zip(batch.rows, lengths, strict=True) if length)
        drafter = self._costs.drafter
        worst_ms = batch.costs.worst_ms(len(batch.rows) + sum(lengths)) + drafter.high_ms(max(lengths))
        return worst_ms + drafter.high_catch_up_ms(num_late) - batch.plain_ms

    def _try_again(self, batch: _Batch, lengths: list[int], is_held_by_row: bool) -> bool:
        """Adds one draft to `lengths` where that was not worth it lately, if it is time and the budget allows."""
        chosen = self._row_to_try(batch, self._rows_that_hold(batch) if is_held_by_row else range(len(lengths)), lengths)
        if chosen is None or sum(lengths) >= batch.max_drafts:
            return False
        row, before = batch.rows[chosen], lengths[chosen]
        longer = lengths.copy()
        longer[chosen] += 1
        num_tokens, drafter = len(batch.rows) + sum(lengths), self._costs.drafter
        loss_ms = batch.costs.target_ms(num_tokens + 1) - batch.costs.target_ms(num_tokens)
        drafter_ms = max(drafter.ms(max(longer)) - drafter.ms(max(lengths)), 0.0)
        if before == 0:
            drafter_ms += drafter.catch_up_ms(row.num_late_tokens)
        loss_ms = max(loss_ms, 0.0) + drafter_ms
        if not self._trials.can_lose(loss_ms, self._account.elapsed_ms, batch.plain_ms):
            return False
        if not self._account.can_lose(self._worst_loss_ms(batch, longer), self._costs.least_plain_ms()):
            return False
        is_of_time = before == 0 and self._is_drafter_slow(batch)
        key = _EXTENSION if before else row.request_id
        self._trials.begin(row.request_id, Trial(key, longer[chosen], loss_ms, drafter_ms, is_of_time), self._step)
        lengths[chosen] += 1
        return True

    def _rows_that_hold(self, batch: _Batch) -> Sequence[int]:
        """The rows whose record keeps a batch from drafting: only of them a trial can change anything; none if some row has no drafts."""
        if any(row.limit == 0 for row in batch.rows):
            return ()
        firsts = [self._acceptance.survival(row.request_id, 1)[0] for row in batch.rows]
        return [i for i, first in enumerate(firsts) if first < _HOLDING_SHARE * max(firsts)]

    def _row_to_try(self, batch: _Batch, candidates: Sequence[int], lengths: Sequence[int]) -> int | None:
        """A candidate without drafts whose time has come; else, in its turn, one that could have longer drafts."""
        for i in candidates:
            if batch.rows[i].limit and lengths[i] == 0 and self._trials.is_due(batch.rows[i].request_id, self._step):
                return i
        extensible = [i for i in candidates if 0 < lengths[i] < batch.rows[i].limit]
        if not extensible or not self._trials.is_due(_EXTENSION, self._step):
            return None
        return max(extensible, key=lambda i: lengths[i])

    def _watch_positions(self, num_rows: int) -> None:
        """Counts it once when drafts collapse at a position."""
        position = self._acceptance.collapsed_position()
        if position is not None and position != self._collapsed_position:
            self._record.count(rows_band(num_rows), SwitchOff.POSITION)
        self._collapsed_position = position


def _no_time(longest: int) -> float:
    """A drafter that is done at once."""
    return 0.0
