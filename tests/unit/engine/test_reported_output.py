"""What users of such servers have reported of wrong output, for every drafter (docs/cases.md): ends, seeds, penalties, copies, company."""

import random
from dataclasses import replace

import pytest
import torch

from paceline.core.outcome import TokenDelta
from paceline.core.request import FinishReason, Request, SamplingParams
from paceline.speculative.drafter import DRAFTERS
from paceline.speculative.drafters.draft_model import DraftModelDrafter
from paceline.speculative.verify import Rule
from tests.fakes.token_engine import FullDraftLength
from tests.fakes.toy_engine import TableForward, ToyEngine, ToyLimits, cycle_table
from tests.fakes.toy_forward import ToyForward

every_drafter = pytest.mark.parametrize("draft", DRAFTERS)
CYCLE = (3, 4, 5, 6, 7, 8)
VOCAB_SIZE = 12
GREEDY = SamplingParams(60, temperature=0.0)
WIDE = ToyLimits(num_rows=64, max_len=160, max_draft_length=8)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def reciter(draft: str, table: torch.Tensor | None = None) -> ToyEngine:
    """An engine whose model and draft model say CYCLE, or what another table says."""
    model = TableForward(cycle_table(CYCLE, VOCAB_SIZE) if table is None else table)
    return ToyEngine(model, model, draft, policy=FullDraftLength(0), limits=WIDE)


def ask(sampling: SamplingParams, name: str = "r", prompt: tuple[int, ...] = CYCLE * 2, k: int | None = None) -> Request:
    return Request(name, prompt, sampling, 0.0, k)


def tokens_of(deltas: list[TokenDelta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


@every_drafter
@pytest.mark.parametrize(
    ("stop", "num_tokens", "reason"),
    [(5, 3, FinishReason.STOP), (7, 5, FinishReason.STOP), (8, 5, FinishReason.LENGTH)],
    ids=["before the cap", "at the cap", "behind the cap"],
)
def test_a_stop_token_within_an_accepted_run(draft: str, stop: int, num_tokens: int, reason: FinishReason) -> None:
    engine = reciter(draft)
    (deltas,) = engine.deltas([ask(replace(GREEDY, max_tokens=5, stop_token_ids=(stop,), num_logprobs=0))])
    assert tokens_of(deltas) == CYCLE[:num_tokens]
    assert deltas[-1].finish_reason is reason
    assert sum(len(delta.logprobs) for delta in deltas) == num_tokens, "nothing is reported of tokens behind the end"
    assert engine.stats().num_generation_tokens == num_tokens
    assert (engine.stats().num_draft_tokens > 0) == (draft != "none")


@every_drafter
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_early_end_at_any_draft_position(draft: str, temperature: float) -> None:
    """The model would end at once, wherever it stands."""
    table = cycle_table(CYCLE, VOCAB_SIZE)
    table[:, :, 2] = 40.0
    sampling = replace(GREEDY, temperature=temperature, seed=1, stop_token_ids=(2,), min_tokens=20)
    (deltas,) = reciter(draft, table).deltas([ask(sampling)])
    *text, end = tokens_of(deltas)
    assert len(text) == 20
    assert 2 not in text
    assert end == 2
    assert deltas[-1].finish_reason is FinishReason.STOP


@every_drafter
@pytest.mark.parametrize("rule", Rule)
def test_a_seed_names_one_answer(draft: str, rule: Rule) -> None:
    table = torch.randn((4, 50, 50), generator=torch.Generator().manual_seed(1))
    model = TableForward(table)
    engine = ToyEngine(model, model, draft, rule, FullDraftLength(0), WIDE)
    seeds = [42, *range(1, 51), 42]
    requests = [Request(f"{i}", (1, 2, 1, 2), SamplingParams(12, seed=seed), 0.0) for i, seed in enumerate(seeds)]
    outputs = engine.run(requests)
    assert outputs[0] == outputs[42] == outputs[-1]
    assert len(set(outputs)) == 50
    alone = ToyEngine(model, model, draft, rule, FullDraftLength(0), WIDE)
    assert alone.run(requests[:1]) == outputs[:1]


@every_drafter
@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_penalty_of_either_sign_is_heard(draft: str, penalty: str) -> None:
    table = torch.randn((1, VOCAB_SIZE, VOCAB_SIZE), generator=torch.Generator().manual_seed(2))
    values = (0.2, 1.0, 5.0) if penalty == "repetition_penalty" else (-2.0, 0.0, 2.0)
    liked, free, disliked = (
        reciter(draft, table).run([ask(replace(GREEDY, max_tokens=30, **{penalty: value}))])[0]  # type: ignore[arg-type]
        for value in values
    )
    assert len(set(liked)) <= len(set(free)) <= len(set(disliked))
    assert len(set(liked)) < len(set(disliked))


@every_drafter
def test_a_list_is_copied_exactly(draft: str) -> None:
    """Nothing is said twice and nothing is left out where an accepted run ends."""
    expected = (CYCLE * 10)[:60]
    for k in range(9):
        engine = reciter(draft)
        assert engine.run([ask(GREEDY, k=k)]) == [expected], f"K={k}"
        assert (engine.stats().num_accepted_tokens > 0) == (draft != "none" and k > 0)


def passers_by() -> list[Request]:
    rng = random.Random(7)
    prompts = [tuple(rng.randrange(4) for _ in range(rng.randrange(1, 30))) for _ in range(200)]
    return [ask(replace(GREEDY, max_tokens=rng.randrange(2, 20)), f"{i}", prompt) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def unaccompanied() -> list[tuple[int, ...]]:
    """What each of `passers_by` is answered alone."""
    alone = ToyEngine(ToyForward(4, seed=3), ToyForward(4), "none", limits=ToyLimits(num_rows=1))
    return [alone.run([request])[0] for request in passers_by()]


@every_drafter
def test_requests_that_come_and_go_leave_the_others_alone(draft: str, unaccompanied: list[tuple[int, ...]]) -> None:
    """200 requests in tight memory, a third of them aborted in mid-draft: the others are answered as they are alone, and no page is lost.

    The model reads its whole prefix back from its pages, so one page of another request would change every later token.
    """
    limits = ToyLimits(num_rows=6, num_pages=16, enable_prefix_caching=True, max_draft_length=4)
    target, drafter = ToyForward(4, seed=3), ToyForward(4, seed=3)
    drafter.table = target.table + torch.randn(target.table.shape, generator=torch.Generator().manual_seed(1))
    engine = ToyEngine(target, drafter, draft, policy=FullDraftLength(0), limits=limits)
    rng = random.Random(8)
    requests = passers_by()
    aborted = {request.request_id: rng.randrange(1, 8) for request in requests if rng.random() < 0.33}
    outputs: dict[str, list[TokenDelta]] = {request.request_id: [] for request in requests}
    waiting = requests[::-1]
    while waiting or engine.loop.has_unfinished:
        for request in (waiting.pop() for _ in range(min(len(waiting), rng.randrange(4)))):
            engine.loop.add(request)
        for delta in engine.loop.step():
            outputs[delta.request_id].append(delta)
        for request_id in [name for name, num_deltas in aborted.items() if len(outputs[name]) >= num_deltas]:
            outputs[request_id] += engine.loop.abort(request_id)
    assert engine.stats().num_free_pages == limits.pages
    for deltas, expected in zip(outputs.values(), unaccompanied, strict=True):
        is_aborted = deltas[-1].finish_reason is FinishReason.ABORT
        assert tokens_of(deltas) == (expected[: len(tokens_of(deltas))] if is_aborted else expected)
    assert sum(deltas[-1].finish_reason is FinishReason.ABORT for deltas in outputs.values()) > 30
    assert (engine.stats().num_accepted_tokens > 50) == (draft != "none")


def acceptance(rule: Rule, temperature: float) -> float:
    table = torch.randn((4, 8, 8), generator=torch.Generator().manual_seed(4)) * 2
    near = table + torch.randn(table.shape, generator=torch.Generator().manual_seed(5)) * 0.5
    limits = ToyLimits(num_rows=200, max_len=32, max_draft_length=3)
    engine = ToyEngine(TableForward(table), TableForward(near), "draft_model", rule, FullDraftLength(0), limits)
    engine.run([Request(f"{i}", (1, 2), SamplingParams(16, temperature, seed=i), 0.0) for i in range(200)])
    return engine.stats().num_accepted_tokens / engine.stats().num_draft_tokens


@pytest.mark.parametrize("rule", Rule)
def test_drawn_drafts_are_accepted_at_every_temperature(monkeypatch: pytest.MonkeyPatch, rule: Rule) -> None:
    """Not less often than drafts that are the draft model's likeliest token, and far more often where the law is flat."""
    temperatures = (0.0, 0.3, 0.6, 1.0, 1.5)
    drawn = [acceptance(rule, temperature) for temperature in temperatures]
    monkeypatch.setattr(DraftModelDrafter, "_draw", likeliest)
    likeliest_ones = [acceptance(rule, temperature) for temperature in temperatures]
    assert all(one > other - 0.03 for one, other in zip(drawn, likeliest_ones, strict=True)), (drawn, likeliest_ones)
    assert drawn[-1] > likeliest_ones[-1] + 0.1
    assert min(drawn) > 0.5


def likeliest(
    self: DraftModelDrafter, logits: torch.Tensor, rows: object, indices: torch.Tensor, position: int, probs: torch.Tensor | None
) -> torch.Tensor:
    drafts = logits.argmax(1)
    if probs is not None:
        probs[indices, position] = torch.nn.functional.one_hot(drafts, probs.shape[2]).float()
    return drafts


@every_drafter
def test_acceptance_does_not_wear_out(draft: str) -> None:
    """The same prompts between ever other traffic: each round drafts and accepts what the first one did."""
    target, drafter = ToyForward(6, seed=3), ToyForward(6, seed=3)
    drafter.table = target.table + torch.randn(target.table.shape, generator=torch.Generator().manual_seed(1))
    limits = ToyLimits(num_rows=4, max_len=64, num_pages=24, enable_prefix_caching=True)
    engine = ToyEngine(target, drafter, draft, policy=FullDraftLength(0), limits=limits)
    rng = random.Random(2)
    fixed = [ask(replace(GREEDY, max_tokens=24), f"fixed-{i}", (i, 1, 2, 3, i, 1, 2)) for i in range(4)]
    rounds: list[tuple[int, int]] = []
    for turn in range(12):
        before = engine.stats()
        engine.run(fixed)
        after = engine.stats()
        rounds.append((after.num_draft_tokens - before.num_draft_tokens, after.num_accepted_tokens - before.num_accepted_tokens))
        engine.run([ask(replace(GREEDY, max_tokens=8), f"{turn}-{i}", tuple(rng.randrange(6) for _ in range(20))) for i in range(6)])
    assert len(set(rounds)) == 1, rounds
    assert (rounds[0][1] > 0) == (draft != "none")


def test_a_draft_model_that_is_never_right_is_hardly_asked() -> None:
    wrong = TableForward(cycle_table(CYCLE[::-1], VOCAB_SIZE))
    right = TableForward(cycle_table(CYCLE, VOCAB_SIZE))
    engine = ToyEngine(right, wrong, "draft_model", limits=WIDE)
    assert engine.run([ask(replace(GREEDY, max_tokens=120), prompt=CYCLE)]) == [CYCLE * 20]
    assert engine.stats().num_accepted_tokens == 0
    assert 0 < engine.stats().num_draft_tokens < 30
