"""The guard in a real engine with a tiny model: bad and slow drafters are off within 20 steps, and the tokens stay those of plain decoding.

Steps are timed by a clock that only models and drafters move, so that counts do not depend on the machine.
"""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.core.batch import Batch, ForwardResult
from paceline.core.draft import DraftProposal
from paceline.core.kv import KvPages
from paceline.core.plan import StepPlan
from paceline.core.request import Request, SamplingParams
from paceline.core.slot import Slot
from paceline.core.verification import Verification
from paceline.executor import step
from paceline.executor.step import Target
from paceline.forward.forward import Forward
from tests.fakes.token_engine import Engine, engine, make_models

NUM_TOKENS = 160
STEP_S = 0.003


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class TimedForward:
    """The model, at 3 ms a pass and a twentieth of that per token."""

    def __init__(self, forward: Forward, clock: Clock) -> None:
        self._forward = forward
        self._clock = clock
        self.spec, self.choices, self.weight_bytes = forward.spec, forward.choices, forward.weight_bytes

    def run(self, batch: Batch, kv: KvPages) -> ForwardResult:
        self._clock.now_s += STEP_S * (1 + 0.05 * batch.token_ids.numel())
        return self._forward.run(batch, kv)


class StagedDrafter:
    """Random tokens, or the right ones, of which it was told; as slow as it is told. `becomes_good`: at that many output tokens."""

    keeps_kv = needs_hidden = False
    num_lookahead = 0

    def __init__(self, clock: Clock, right: Mapping[tuple[int, ...], tuple[int, ...]], delay_s: float, becomes_good: int) -> None:
        self._clock = clock
        self._right = right
        self._delay_s = delay_s
        self._becomes_good = becomes_good
        self._random = random.Random(0)

    def propose(self, plan: StepPlan, slots: Mapping[int, Slot]) -> DraftProposal:
        drafts = [self._draft(slots[span.slot], span.draft_budget) for span in plan.spans]
        self._clock.now_s += self._delay_s if any(drafts) else 0.0
        return DraftProposal(drafts)

    def _draft(self, slot: Slot, budget: int) -> list[int]:
        if slot.num_output_tokens >= self._becomes_good:
            output = self._right[tuple(slot.token_ids[: slot.num_prompt_tokens])]
            return list(output[slot.num_output_tokens : slot.num_output_tokens + budget])
        return [self._random.randrange(3, 300) for _ in range(budget)]

    def observe(self, plan: StepPlan, slots: Mapping[int, Slot], verification: Verification, hidden: torch.Tensor) -> None: ...

    def num_computed_tokens(self, slot: int) -> int:
        return 0


class SlowLearner(StagedDrafter):
    """Takes its time only to see what came of a step."""

    def observe(self, plan: StepPlan, slots: Mapping[int, Slot], verification: Verification, hidden: torch.Tensor) -> None:
        self._clock.now_s += 0.02 if any(span.draft_budget for span in plan.spans) else 0.0


class AbsurdDrafter(StagedDrafter):
    """Ids that no vocabulary has."""

    def _draft(self, slot: Slot, budget: int) -> list[int]:
        return [(-1, 1 << 30, 320)[i % 3] for i in range(budget)]


def asked(num_requests: int) -> list[Request]:
    sampling = SamplingParams(NUM_TOKENS, temperature=0, ignore_eos=True)
    return [Request(f"r{i}", (3 + i, 7, 11 + i), sampling, 0.0) for i in range(num_requests)]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Clock]]:
    clock = Clock()
    monkeypatch.setattr(step, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    made = Engine(make_models(tmp_path), engine("ngram", speculation="auto", max_draft_length=5))
    executor = made.loop._executor
    executor._target = Target(TimedForward(executor._target.forward, clock), executor._target.kv, executor._target.rule)
    yield made, clock
    executor.close()


def drafted_by_step(made: Engine, requests: list[Request]) -> tuple[list[int], dict[str, tuple[int, ...]]]:
    """Draft tokens of each step in which a request decodes, and what was said."""
    for request in requests:
        made.loop.add(request)
    drafted: list[int] = []
    output: dict[str, tuple[int, ...]] = {}
    while made.loop.has_unfinished:
        deltas = made.loop.step()
        drafted.append(sum(delta.num_drafted for delta in deltas))
        for delta in deltas:
            output[delta.request_id] = output.get(delta.request_id, ()) + delta.token_ids
    return drafted, output


def right_output(made: Engine, requests: list[Request]) -> dict[tuple[int, ...], tuple[int, ...]]:
    plain = [Request(f"plain-{request.request_id}", request.prompt_token_ids, request.sampling, 0.0, 0) for request in requests]
    _, output = drafted_by_step(made, plain)
    return {request.prompt_token_ids: output[f"plain-{request.request_id}"] for request in requests}


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize(("delay_s", "becomes_good"), [(0.0, NUM_TOKENS), (0.02, 0)], ids=["random tokens", "slowed by 20 ms"])
def test_off_within_20_steps(loaded: tuple[Engine, Clock], num_requests: int, delay_s: float, becomes_good: int) -> None:
    made, clock = loaded
    requests = asked(num_requests)
    right = right_output(made, requests)
    made.loop._executor._drafter = StagedDrafter(clock, right, delay_s, becomes_good)
    drafted, output = drafted_by_step(made, requests)
    assert [output[request.request_id] for request in requests] == [right[request.prompt_token_ids] for request in requests]
    assert any(drafted), "it is tried"
    assert max(drafted[21:]) <= 1
    assert sum(drafted[21:]) <= 12, "single drafts now and then"


def test_what_a_drafter_takes_to_learn_is_its_time_too(loaded: tuple[Engine, Clock]) -> None:
    made, clock = loaded
    requests = asked(1)
    made.loop._executor._drafter = SlowLearner(clock, right_output(made, requests), 0.0, 0)
    drafted, _ = drafted_by_step(made, requests)
    assert any(drafted), "it is tried"
    assert max(drafted[21:]) <= 1
    assert "drafter_time" in made.stats().num_switch_offs_by_reason


def test_a_running_request_drafts_again_when_the_drafter_has_become_good(loaded: tuple[Engine, Clock]) -> None:
    made, clock = loaded
    requests = asked(1)
    right = right_output(made, requests)
    made.loop._executor._drafter = StagedDrafter(clock, right, 0.0, 60)
    drafted, output = drafted_by_step(made, requests)
    assert output["r0"] == right[requests[0].prompt_token_ids]
    assert max(drafted[21:40]) <= 1, "off by then"
    assert len(drafted) < NUM_TOKENS - 20
    assert max(drafted[-8:]) == 5, "and back"


def test_a_drafter_of_absurd_ids_is_off_within_20_steps_and_changes_nothing(loaded: tuple[Engine, Clock]) -> None:
    made, clock = loaded
    requests = asked(1)
    right = right_output(made, requests)
    made.loop._executor._drafter = AbsurdDrafter(clock, right, 0.0, 0)
    drafted, output = drafted_by_step(made, requests)
    assert output["r0"] == right[requests[0].prompt_token_ids]
    assert max(drafted[21:]) <= 1
    assert made.stats().num_switch_offs_by_reason
