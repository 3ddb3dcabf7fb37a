"""What every drafter in `DRAFTERS` owes the executor, run over the table itself."""

import random
from collections.abc import Callable

import pytest
import torch

from paceline.core.draft import DraftProposal
from paceline.core.request import SamplingParams
from paceline.errors import BadInputError
from paceline.speculative.drafter import DRAFTERS, DrafterSetup, DraftModel, load_drafter_class
from paceline.speculative.verify import Rule
from tests.fakes.drafter_driver import DrafterDriver, Work
from tests.fakes.toy_forward import ToyForward

VOCAB_SIZE = 13
PAGE_SIZE = 4
NUM_PAGES = 400

Make = Callable[[], DrafterDriver]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=DRAFTERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=Rule)
def make(name: str, request: pytest.FixtureRequest) -> Make:
    def build() -> DrafterDriver:
        drafter_class = load_drafter_class(name)
        toy = ToyForward(VOCAB_SIZE, seed=1)
        model = DraftModel(toy, toy.allocate_kv(NUM_PAGES, PAGE_SIZE)) if drafter_class.keeps_kv else None
        drafter = drafter_class(DrafterSetup(request.param, VOCAB_SIZE, model))
        return DrafterDriver(drafter, ToyForward(VOCAB_SIZE, seed=2, spread=4.0), request.param, PAGE_SIZE, NUM_PAGES)

    return build


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=1000, temperature=(0.0, 0.8, 1.2)[seed % 3], top_k=(0, 5)[seed % 2], seed=(1 << 64) - 1 - seed)


def check(proposal: DraftProposal, budgets: list[int]) -> None:
    num_rows, width = proposal.token_ids.shape
    assert num_rows == len(budgets)
    assert proposal.token_ids.dtype == torch.int32
    assert proposal.lens.dtype == torch.int32
    assert proposal.lens.device.type == "cpu"
    for row, budget in enumerate(budgets):
        length = int(proposal.lens[row])
        assert 0 <= length <= min(budget, width)
        assert bool(((proposal.token_ids[row] >= 0) & (proposal.token_ids[row] < VOCAB_SIZE)).all())
        assert proposal.token_ids[row, length:].tolist() == [0] * (width - length)
        if proposal.probs is not None:
            assert proposal.probs.shape == (num_rows, width, VOCAB_SIZE)
            assert proposal.probs[row, :length].sum(1).tolist() == pytest.approx([1.0] * length)
            drawn = proposal.probs[row, :length].gather(1, proposal.token_ids[row, :length, None].long())
            assert bool((drawn > 0).all())


def run_schedule(driver: DrafterDriver, seed: int, num_steps: int = 25) -> list[list[list[int]]]:
    """Random admissions, releases, budgets, partial catch-up and prompt chunks; returns all proposals."""
    rng = random.Random(seed)
    running: list[int] = []
    proposals: list[list[list[int]]] = []
    for step in range(num_steps):
        for slot in list(running):
            if rng.random() < 0.1:
                driver.release(slot)
                running.remove(slot)
        for slot in range(4):
            if slot not in running and rng.random() < 0.4:
                length = rng.randrange(1, 30)
                prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
                driver.admit(slot, prompt, params(step), num_prompt_tokens=rng.randrange(1, length + 1))
                running.append(slot)
        rng.shuffle(running)
        work = [random_work(rng, slot) for slot in running if rng.random() < 0.9]
        lengths = {item.slot: len(driver.slots[item.slot].token_ids) for item in work if item.slot in driver.slots}
        proposal = driver.step(work)
        check(proposal, [item.draft_budget for item in work])
        for item in work:
            count = driver.drafter.num_computed_tokens(item.slot)
            assert 0 <= count < len(driver.slots[item.slot].token_ids) or item.prefill_end is not None
            assert driver.drafter.keeps_kv or count == 0
            assert len(driver.slots[item.slot].token_ids) > lengths.get(item.slot, 0) or item.prefill_end is not None
        proposals.append([row[:n] for row, n in zip(proposal.token_ids.tolist(), proposal.lens.tolist(), strict=True)])
    return proposals


def random_work(rng: random.Random, slot: int) -> Work:
    kind = rng.random()
    if kind < 0.15:
        return Work(slot, prefill_end=1, catch_up=rng.randrange(1, 4))
    if kind < 0.3:
        return Work(slot, draft_budget=0, catch_up=rng.randrange(3))
    return Work(slot, draft_budget=rng.randrange(6))


@pytest.mark.parametrize("seed", range(3))
def test_proposals_are_well_formed_and_repeatable(make: Make, seed: int) -> None:
    assert run_schedule(make(), seed) == run_schedule(make(), seed)


def test_without_budget_nothing_is_proposed(make: Make) -> None:
    driver = make()
    driver.admit(0, [1, 2, 1, 2, 1, 2], params(1))
    driver.admit(3, [1, 2, 1, 2, 1, 2], params(2))
    for _ in range(3):
        proposal = driver.step([Work(0), Work(3)])
        assert proposal.token_ids.shape == (2, 0)
        assert proposal.lens.tolist() == [0, 0]
    assert driver.step([]).token_ids.shape[0] == 0


def test_a_readmitted_slot_is_like_a_fresh_one(make: Make) -> None:
    used, fresh = make(), make()
    used.admit(0, [1, 2, 3, 1, 2, 3, 1, 2], params(1))
    for _ in range(4):
        used.step([Work(0, draft_budget=3)])
    used.release(0)
    if used.drafter.keeps_kv:
        assert used.drafter.num_computed_tokens(0) > 0
    for driver in (used, fresh):
        driver.admit(0, [4, 5, 6, 7, 4, 5, 6, 7, 4, 5], params(1), num_prompt_tokens=6)
    for _ in range(5):
        work = [Work(0, draft_budget=4)]
        assert used.step(work).token_ids.tolist() == fresh.step(work).token_ids.tolist()
    assert used.slots[0].token_ids == fresh.slots[0].token_ids


def test_rows_do_not_depend_on_their_batch_mates(make: Make) -> None:
    together, alone = make(), make()
    prompts = {0: [1, 2, 3, 1, 2, 3, 1], 1: [5, 5, 5, 5], 2: [7, 8, 9, 1, 7, 8, 9]}
    for slot, prompt in prompts.items():
        together.admit(slot, prompt, params(slot))
        alone.admit(slot, prompt, params(slot))
    for step in range(6):
        work = [Work(slot, draft_budget=(slot + step) % 4) for slot in prompts]
        both = together.step(work)
        for row, item in enumerate(work):
            single = alone.step([item])
            length = int(single.lens[0])
            assert length == int(both.lens[row])
            assert single.token_ids[0, :length].tolist() == both.token_ids[row, :length].tolist()
    assert {slot: state.token_ids for slot, state in together.slots.items()} == {s: state.token_ids for s, state in alone.slots.items()}


def test_an_unknown_name_is_refused_with_what_there_is() -> None:
    with pytest.raises(BadInputError, match="unknown drafter 'medusa'; this build has none, ngram, draft_model"):
        load_drafter_class("medusa")
