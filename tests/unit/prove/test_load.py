"""Slots, turns and arrivals, without a server."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from paceline.prove.client import Answer, Message
from paceline.prove.datasets.prompt import Prompt
from paceline.prove.load import LagMeter, arrivals_s, closed_loop, converse, open_loop
from tests.fakes.prove_prompts import make_dataset

WHOLE = Answer(0.0, 1.0, 200, None)


class Recorder:
    """Answers after a few turns of the loop; keeps who was in flight."""

    def __init__(self, failing: str = "") -> None:
        self.asked: list[tuple[str, int, tuple[Message, ...]]] = []
        self.begun_s: dict[str, float] = {}
        self.running: list[str] = []
        self.most_running = 0
        self._failing = failing

    async def send(self, prompt: Prompt, turn: int, messages: Sequence[Message]) -> Answer:
        self.asked.append((prompt.question_id, turn, tuple(messages)))
        self.begun_s.setdefault(prompt.question_id, asyncio.get_running_loop().time())
        assert prompt.question_id not in self.running, "turns of a conversation come one after the other"
        self.running.append(prompt.question_id)
        self.most_running = max(self.most_running, len(self.running))
        for _ in range(len(self.asked) % 4 + 1):
            await asyncio.sleep(0)
        self.running.remove(prompt.question_id)
        error = "broke" if prompt.question_id.endswith(self._failing) and self._failing else None
        return Answer(0.0, 1.0, 200, error, content=f"answer {turn}", text=f"thought, answer {turn}")


async def test_a_conversation_goes_on_with_the_models_own_answers() -> None:
    recorder = Recorder()
    await converse(Prompt("a", "qa", ("one", "two", "three"), system="be brief"), recorder.send)
    assert [turn for _, turn, _ in recorder.asked] == [0, 1, 2]
    assert [(message["role"], message["content"]) for message in recorder.asked[-1][2]] == [
        ("system", "be brief"), ("user", "one"), ("assistant", "answer 0"), ("user", "two"), ("assistant", "answer 1"), ("user", "three"),
    ]  # fmt: skip
    assert len(recorder.asked[0][2]) == 2, "what was sent first has not grown"


@pytest.mark.parametrize("concurrency", [1, 3, 8, 20])
async def test_a_closed_loop_keeps_its_slots_full(concurrency: int) -> None:
    recorder, prompts = Recorder(), make_dataset(17).prompts
    await closed_loop(prompts, concurrency, recorder.send)
    assert sorted((question, turn) for question, turn, _ in recorder.asked) == sorted(
        (prompt.question_id, turn) for prompt in prompts for turn in range(len(prompt.turns))
    )
    assert recorder.most_running == min(concurrency, 17)


async def test_a_failed_turn_ends_its_conversation_and_no_other() -> None:
    recorder, prompts = Recorder(failing="05"), make_dataset(11, every_multi=1).prompts
    await closed_loop(prompts, 3, recorder.send)
    turns = {prompt.question_id: 0 for prompt in prompts}
    for question, _, _ in recorder.asked:
        turns[question] += 1
    assert turns == {prompt.question_id: 1 if prompt.question_id.endswith("05") else 2 for prompt in prompts}


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    recorder, prompts = Recorder(), make_dataset(20).prompts
    start_s = asyncio.get_running_loop().time()
    await open_loop(prompts, 400.0, "seed", recorder.send)
    for prompt, at_s in zip(prompts, arrivals_s(20, 400.0, "seed"), strict=True):
        assert recorder.begun_s[prompt.question_id] - start_s >= at_s - 1e-3
    assert len(recorder.begun_s) == 20


def test_arrivals_are_a_poisson_process_and_the_same_for_a_seed() -> None:
    times = arrivals_s(4001, 5.0, "a")
    assert times == arrivals_s(4001, 5.0, "a") != arrivals_s(4001, 5.0, "b")
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert abs(mean - 0.2) < 0.2 * 4 / 4000**0.5, "4 standard errors"
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert 0.8 < variance / mean**2 < 1.2, "of an exponential law: its mean squared"
    assert arrivals_s(0, 5.0, "a") == ()


def test_lateness_is_a_percentile() -> None:
    meter = LagMeter()
    assert meter.p99_ms == 0.0
    for _ in range(980):
        meter.add(0.0002)
    assert meter.p99_ms == pytest.approx(0.2)
    for _ in range(20):
        meter.add(0.0305)
    assert meter.p99_ms == pytest.approx(30.5, abs=0.11)
    for _ in range(1000):
        meter.add(99.0)
    assert meter.p99_ms == pytest.approx(1000)


async def test_a_blocked_loop_is_noticed() -> None:
    async with LagMeter() as meter:
        for _ in range(5):
            await asyncio.sleep(0.021)
            busy_until_s = asyncio.get_running_loop().time() + 0.05
            while asyncio.get_running_loop().time() < busy_until_s:
                pass
    assert meter.p99_ms > 20
