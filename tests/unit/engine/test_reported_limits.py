"""What users of such servers have reported of context, memory and counts, for every drafter (docs/cases.md)."""

import random
from dataclasses import replace

import pytest
import torch

from paceline.core.request import FinishReason, Request, SamplingParams
from paceline.speculative.drafter import DRAFTERS
from tests.fakes.token_engine import FullDraftLength
from tests.fakes.toy_engine import TableForward, ToyEngine, ToyLimits, cycle_table
from tests.fakes.toy_forward import ToyForward

every_drafter = pytest.mark.parametrize("draft", DRAFTERS)
CYCLE = (3, 4, 5, 6, 7, 8)
MODEL_LEN = 40
GREEDY = SamplingParams(100, temperature=0.0)
LIMITS = ToyLimits(num_rows=8, max_len=MODEL_LEN)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def reciter(draft: str, max_len: int = 4096, limits: ToyLimits = LIMITS) -> ToyEngine:
    """The model and the draft model say CYCLE; the draft model has `max_len` positions."""
    table = cycle_table(CYCLE, 12)
    return ToyEngine(TableForward(table), TableForward(table, max_len), draft, policy=FullDraftLength(0), limits=limits)


def recital(num_tokens: int, name: str = "r", **sampling: int) -> Request:
    """A prompt of so many tokens of CYCLE, without an end of its own."""
    return Request(name, (CYCLE * MODEL_LEN)[:num_tokens], replace(GREEDY, **sampling), 0.0)  # type: ignore[arg-type]


@every_drafter
def test_drafts_are_clamped_at_the_context_limit(draft: str) -> None:
    """With 5 drafts allowed, prompts that leave room for 1, 2, ... tokens are answered with exactly so many."""
    engine = reciter(draft)
    for room in range(1, 14):
        before = engine.stats().num_draft_tokens
        (deltas,) = engine.deltas([recital(MODEL_LEN - room)])
        output = tuple(token for delta in deltas for token in delta.token_ids)
        assert output == (CYCLE * MODEL_LEN)[MODEL_LEN - room : MODEL_LEN], f"room for {room}"
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        # The first token needs no draft, and the last of a step is the model's own.
        assert engine.stats().num_draft_tokens - before <= max(room - 2, 0)
    assert (engine.stats().num_draft_tokens > 0) == (draft != "none")


@every_drafter
@pytest.mark.parametrize("prompt_len", [8, 15, 16, 30])
def test_a_drafter_with_a_shorter_context_stops_drafting(draft: str, prompt_len: int) -> None:
    """The request goes on with the same tokens; only the draft model knows such a limit."""
    engine = reciter(draft, max_len=16)
    (deltas,) = engine.deltas([recital(prompt_len)])
    assert tuple(token for delta in deltas for token in delta.token_ids) == (CYCLE * MODEL_LEN)[prompt_len:MODEL_LEN]
    length, num_drafted = prompt_len, 0
    for delta in deltas:
        assert draft != "draft_model" or length + delta.num_drafted <= 16 or delta.num_drafted == 0
        num_drafted += delta.num_drafted
        length += len(delta.token_ids)
    if draft == "draft_model":
        assert (num_drafted > 0) == (prompt_len < 15)
    else:
        assert (num_drafted > 0) == (draft == "ngram")


@every_drafter
def test_a_second_identical_prompt_hits_the_cache(draft: str) -> None:
    """As much of it as without a drafter; and the draft model does not run what it has run."""
    limits = ToyLimits(num_rows=4, max_len=256, enable_prefix_caching=True)
    drafter = ToyForward(9, seed=3)
    engine = ToyEngine(ToyForward(9, seed=3), drafter, draft, policy=FullDraftLength(0), limits=limits)
    prompt = tuple(i * i % 9 for i in range(220))
    num_run: list[int] = []
    outputs = []
    for _ in range(2):
        before = drafter.num_tokens_run
        (deltas,) = engine.deltas([Request("r", prompt, replace(GREEDY, max_tokens=4), 0.0)])
        outputs.append(tuple(token for delta in deltas for token in delta.token_ids))
        num_run.append(drafter.num_tokens_run - before)
    assert outputs[0] == outputs[1]
    assert engine.stats().num_prefix_hit_tokens == 208, "all 13 full pages"
    assert deltas[0].stats is not None
    assert deltas[0].stats.num_cached_tokens == 208
    if draft == "draft_model":
        assert num_run[0] >= 220
        assert num_run[1] < 0.1 * num_run[0]


@every_drafter
def test_speculation_is_switched_off_for_one_request_alone(draft: str) -> None:
    engine = reciter(draft)
    requests = [replace(recital(12, f"{i}"), max_draft_length=k) for i, k in enumerate((0, None, 0, 2))]
    answers = engine.deltas(requests)
    for request, deltas in zip(requests, answers, strict=True):
        assert tuple(token for delta in deltas for token in delta.token_ids) == (CYCLE * MODEL_LEN)[12:MODEL_LEN]
        stats = deltas[-1].stats
        assert stats is not None
        assert (stats.draft.num_draft_tokens > 0) == (draft != "none" and request.max_draft_length != 0)
        assert max((delta.num_drafted for delta in deltas), default=0) <= (
            5 if request.max_draft_length is None else request.max_draft_length
        )


@every_drafter
def test_counts_agree_and_misses_are_counted(draft: str) -> None:
    """Of whole and partly accepted drafts and of missed ones."""
    target, drafter = ToyForward(4, seed=3), ToyForward(4, seed=3)
    drafter.table = target.table + torch.randn(target.table.shape, generator=torch.Generator().manual_seed(1))
    engine = ToyEngine(target, drafter, draft, policy=FullDraftLength(0), limits=ToyLimits(num_rows=8))
    answers = engine.deltas([Request(f"{i}", (i, 1, 2, 3, 1, 2), replace(GREEDY, max_tokens=40), 0.0) for i in range(4)])
    totals = engine.stats()
    per_position = totals.num_accepted_tokens_per_pos
    assert totals.num_accepted_tokens <= totals.num_draft_tokens
    assert sum(per_position) == totals.num_accepted_tokens
    assert per_position == sorted(per_position, reverse=True), "a token is accepted only behind accepted ones"
    drafted = [(delta.num_drafted, len(delta.token_ids) - 1) for deltas in answers for delta in deltas if delta.num_drafted]
    assert totals.num_drafts == len(drafted)
    assert totals.num_draft_tokens == sum(num for num, _ in drafted)
    if draft != "none":
        assert 0 < per_position[0] < totals.num_drafts, "the rate of the first position knows its misses"
    finals = [deltas[-1].stats for deltas in answers]
    own = [stats.draft for stats in finals if stats is not None]
    assert len(own) == 4
    assert sum(stats.num_accepted_tokens for stats in own) == totals.num_accepted_tokens
    for stats in own:
        assert len(stats.accepted_histogram) == (1 if draft == "none" else 6)
        assert sum(stats.accepted_histogram) == stats.num_spec_steps
        assert sum(i * num for i, num in enumerate(stats.accepted_histogram)) == stats.num_accepted_tokens
        assert stats.num_accepted_tokens + stats.num_spec_steps + stats.num_plain_steps + 1 == 40, "every token is accounted for"


@every_drafter
def test_ten_thousand_requests_a_third_cancelled_give_every_page_back(draft: str) -> None:
    """In tight memory, cancelled in mid-draft: the free pages are those of the start, and nobody reads what another one left."""
    limits = ToyLimits(num_rows=64, max_len=MODEL_LEN, num_pages=100, enable_prefix_caching=True)
    engine = reciter(draft, limits=limits)
    num_free, rng = engine.stats().num_pages, random.Random(7)
    waiting = [recital(1 + number % 7, f"r{number}", max_tokens=2 + number % 11) for number in range(10_000)]
    starts = {request.request_id: len(request.prompt_token_ids) for request in waiting}
    lengths = {request.request_id: request.sampling.max_tokens for request in waiting}
    doomed = set(rng.sample(sorted(starts), len(starts) // 3))
    outputs: dict[str, list[int]] = {request_id: [] for request_id in starts}
    num_cancelled = 0
    while waiting or engine.loop.has_unfinished:
        for request in waiting[:40]:
            engine.loop.add(request)
        del waiting[:40]
        for delta in engine.loop.step():
            outputs[delta.request_id] += delta.token_ids
            if delta.request_id in doomed and delta.finish_reason is None and rng.random() < 0.5:
                assert [end.finish_reason for end in engine.loop.abort(delta.request_id)] == [FinishReason.ABORT]
                doomed.remove(delta.request_id)
                num_cancelled += 1
    for request_id, output in outputs.items():
        start = starts[request_id]
        assert tuple(output) == (CYCLE * MODEL_LEN)[start : start + len(output)], request_id
        assert len(output) <= lengths[request_id]
    assert num_cancelled > 1000
    assert engine.stats().num_free_pages == num_free
