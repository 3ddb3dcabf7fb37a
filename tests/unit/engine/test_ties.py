"""Equal logits: the lowest id wins whatever the shape of the step, so drafts, batches and draft lengths change no token."""

from dataclasses import replace

import pytest
import torch

from paceline.core.request import Request, SamplingParams
from paceline.speculative import process, verify
from paceline.speculative.drafter import DRAFTERS
from tests.fakes.slow_sampler import slow_choice
from tests.fakes.token_engine import FullDraftLength, RandomDraftLength
from tests.fakes.toy_engine import TableForward, ToyEngine, ToyLimits

VOCAB_SIZE = 9
GREEDY = SamplingParams(24, temperature=0.0)
OPTIONS = {
    "greedy": GREEDY,
    "penalised": replace(GREEDY, presence_penalty=1.0),
    "biased": replace(GREEDY, logit_bias=((3, 1.0), (5, -1.0))),
    "top_k": replace(GREEDY, temperature=1.0, top_k=3, seed=5),
    "top_p": replace(GREEDY, temperature=1.0, top_p=0.5, seed=6),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def table(seed: int) -> torch.Tensor:
    """Three values for nine tokens: ties in every row."""
    return torch.randint(0, 3, (4, VOCAB_SIZE, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed)).float()


def requests(sampling: SamplingParams) -> list[Request]:
    prompts = [(i, 1, 2, i, 1, 2) for i in range(6)]
    return [Request(f"{i}", prompt, replace(sampling, seed=i + (sampling.seed or 0)), 0.0) for i, prompt in enumerate(prompts)]


def drafted(draft: str, sampling: SamplingParams) -> list[tuple[int, ...]]:
    """With a draft model that breaks no tie otherwise than its target and is seldom wrong elsewhere."""
    near = torch.where(torch.rand((4, VOCAB_SIZE, VOCAB_SIZE), generator=torch.Generator().manual_seed(9)) < 0.05, table(2), table(1))
    policy = RandomDraftLength(3) if draft == "none" else FullDraftLength(0)
    return ToyEngine(TableForward(table(1)), TableForward(near), draft, policy=policy, limits=ToyLimits(num_rows=4)).run(requests(sampling))


def plain(sampling: SamplingParams) -> list[tuple[int, ...]]:
    """One token of one request at a time."""
    model = TableForward(table(1))
    alone = ToyEngine(model, model, "none", limits=ToyLimits(num_rows=1))
    return [alone.run([request])[0] for request in requests(sampling)]


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("option", OPTIONS)
def test_ties_are_broken_alike_in_every_shape(draft: str, option: str) -> None:
    assert drafted(draft, OPTIONS[option]) == plain(OPTIONS[option])


@pytest.mark.parametrize("option", ["greedy", "top_k", "top_p"])
def test_the_lowest_id_wins(option: str) -> None:
    for request, tokens in zip(requests(OPTIONS[option]), plain(OPTIONS[option]), strict=True):
        text = (*request.prompt_token_ids, *tokens)
        for index in range(len(tokens)):
            place = len(request.prompt_token_ids) + index - 1
            row = table(1)[place % 4, text[place]].tolist()
            assert tokens[index] == slow_choice(row, tokens[:index], request.sampling)


def greedy_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows at once give the highest of equal ids."""
    honest = verify._argmax

    def argmax(logits: torch.Tensor) -> torch.Tensor:
        return honest(logits) if len(logits) == 1 else VOCAB_SIZE - 1 - logits.flip(1).argmax(1)

    monkeypatch.setattr(verify, "choose_on_host", lambda *_: None)
    monkeypatch.setattr(verify, "_argmax", argmax)


def cuts_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows at once keep the highest of equal ids at the border of top-k and top-p."""
    honest = process._sort_keys

    def sort_keys(logits: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(VOCAB_SIZE)
        return honest(logits) if len(logits) == 1 else honest(logits) + 2 * ids

    monkeypatch.setattr(process, "_sort_keys", sort_keys)


@pytest.mark.parametrize(("fault", "option"), [(greedy_by_shape, "greedy"), (cuts_by_shape, "top_k"), (cuts_by_shape, "top_p")])
def test_planted_faults_are_noticed(monkeypatch: pytest.MonkeyPatch, fault, option: str) -> None:  # type: ignore[no-untyped-def]
    expected = plain(OPTIONS[option])
    fault(monkeypatch)
    assert plain(OPTIONS[option]) == expected, "a single row is left alone"
    assert drafted("draft_model", OPTIONS[option]) != expected
