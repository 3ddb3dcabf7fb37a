"""The draft model: its drafts are those of its own model on the true prefix, its KV count is right, its passes are few."""

import pytest
import torch

from paceline.core.plan import Admission, Span, SpanKind, StepPlan
from paceline.core.request import SamplingParams
from paceline.core.slot import Slot
from paceline.core.verification import SamplingRows, Verification
from paceline.speculative.drafter import DrafterSetup, DraftModel
from paceline.speculative.drafters.draft_model import DraftModelDrafter
from paceline.speculative.rows import host_rows, sampling_rows, select_rows
from paceline.speculative.verify import Rule, choose, draw_drafts
from tests.fakes.drafter_driver import DrafterDriver, Work
from tests.fakes.toy_forward import ToyForward

PAGE_SIZE = 4
NUM_PAGES = 200
GREEDY = SamplingParams(max_tokens=1000, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=1000, temperature=0.9, top_k=6, top_p=0.95, seed=(1 << 64) - 5)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Pair:
    """A driver, its drafter and the drafter's model."""

    def __init__(self, rule: Rule, *, twin: bool = False, vocab_sizes: tuple[int, int] = (12, 12), max_len: int = 4096) -> None:
        target = ToyForward(vocab_sizes[0], seed=2)
        self.model = target if twin else ToyForward(vocab_sizes[1], seed=1, max_len=max_len)
        kv = self.model.allocate_kv(NUM_PAGES, PAGE_SIZE)
        self.drafter = DraftModelDrafter(DrafterSetup(rule, vocab_sizes[0], DraftModel(self.model, kv)))
        self.driver = DrafterDriver(self.drafter, target, rule, PAGE_SIZE, NUM_PAGES)
        self.rule = rule

    def expected(self, slot: int, num_drafts: int) -> list[int]:
        """Drafts by definition: one token at a time on the true prefix, by the request's own parameters."""
        state, drafts = self.driver.slots[slot], list[int]()
        rows = sampling_rows(host_rows([Span(slot, SpanKind.DECODE, 0, 0, 1, 0, 0, emits=True)], self.driver.slots))
        for j in range(num_drafts):
            logits = self.model.prefix_logits([*state.token_ids, *drafts]).unsqueeze(0)[:, : self.driver.target.spec.vocab_size]
            drafts.append(int(self.draw(logits, select_rows(rows, torch.tensor([0]), j))))
        return drafts

    def draw(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        return draw_drafts(logits, rows)[0] if self.rule is Rule.RATIO else choose(logits, rows)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rule", Rule)
def test_drafts_are_the_models_own_on_the_true_prefix(rule: Rule, sampling: SamplingParams) -> None:
    """Over many steps with rejections: one stale KV entry would change the hash of the prefix and so the drafts."""
    pair = Pair(rule)
    for slot in range(3):
        pair.driver.admit(slot, PROMPT[slot:], sampling)
    pair.driver.step([Work(slot, draft_budget=0, catch_up=2) for slot in range(3)])
    num_accepted = num_rejected = 0
    for step in range(40):
        budgets = [(step + slot) % 5 for slot in range(3)]
        expected = [pair.expected(slot, budget) for slot, budget in enumerate(budgets)]
        before = [len(pair.driver.slots[slot].token_ids) for slot in range(3)]
        proposal = pair.driver.step([Work(slot, budget) for slot, budget in enumerate(budgets)])
        assert proposal.drafts_host == expected
        for slot, budget in enumerate(budgets):
            accepted = len(pair.driver.slots[slot].token_ids) - before[slot] - 1
            num_accepted += accepted
            num_rejected += budget - accepted
            wanted = min(before[slot] + max(budget - 1, 0), before[slot] + accepted)
            assert pair.drafter.num_computed_tokens(slot) == wanted
    assert num_accepted > 5
    assert num_rejected > 5


def test_mutation_a_count_that_trusts_rejected_drafts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftModelDrafter, "observe", lambda self, plan, slots, verification, hidden: None)
    with pytest.raises(AssertionError):
        test_drafts_are_the_models_own_on_the_true_prefix(Rule.COUPLED, SAMPLED)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_twin_of_the_target_is_always_accepted_under_coupled(sampling: SamplingParams) -> None:
    pair = Pair(Rule.COUPLED, twin=True)
    pair.driver.admit(0, PROMPT, sampling)
    for _ in range(10):
        before = len(pair.driver.slots[0].token_ids)
        pair.driver.step([Work(0, draft_budget=4)])
        assert len(pair.driver.slots[0].token_ids) == before + 5


def test_catch_up_runs_in_planned_pieces_and_drafts_wait_for_it() -> None:
    pair = Pair(Rule.COUPLED)
    pair.driver.admit(0, PROMPT, GREEDY)
    assert pair.driver.step([Work(0, prefill_end=4, catch_up=4)]).lens.tolist() == [0]
    assert pair.drafter.num_computed_tokens(0) == 4
    assert pair.driver.step([Work(0, draft_budget=0, catch_up=3)]).lens.tolist() == [0]
    assert pair.drafter.num_computed_tokens(0) == 7
    assert pair.driver.step([Work(0, draft_budget=3, catch_up=2)]).lens.tolist() == [0], "one token is still missing"
    assert pair.drafter.num_computed_tokens(0) == 9
    assert pair.driver.step([Work(0, draft_budget=3)]).lens.tolist() == [3]


def test_one_pass_catches_up_all_rows_and_each_further_draft_is_one_pass() -> None:
    pair = Pair(Rule.COUPLED)
    for slot in range(3):
        pair.driver.admit(slot, PROMPT, SAMPLED)
    pair.driver.step([Work(0, 4), Work(1, 2), Work(2, 0)])
    assert pair.model.num_runs == 4
    assert pair.model.num_tokens_run == 3 * len(PROMPT) + 3 + 1


def test_ratio_hands_over_the_law_it_drew_from() -> None:
    pair = Pair(Rule.RATIO, vocab_sizes=(15, 12))
    pair.driver.admit(0, PROMPT, SAMPLED)
    pair.driver.admit(1, PROMPT, GREEDY)
    plan = pair.driver.plan([Work(0, 2), Work(1, 1)])
    proposal = pair.drafter.propose(plan, pair.driver.slots)
    assert proposal.probs is not None
    assert proposal.probs.shape == (2, 2, 15)
    logits = pair.model.prefix_logits(PROMPT).unsqueeze(0)
    q = draw_drafts(logits, select_rows(sampling_rows(host_rows(plan.spans, pair.driver.slots)), torch.tensor([0])))[1]
    assert torch.equal(proposal.probs[0, 0, :12], q[0])
    assert proposal.probs[1, 0].tolist() == [float(i == int(logits.argmax())) for i in range(15)]


@pytest.mark.parametrize("vocab_sizes", [(12, 20), (20, 12)], ids=["draft padded more", "target padded more"])
@pytest.mark.parametrize("rule", Rule)
def test_vocabularies_of_different_padding(rule: Rule, vocab_sizes: tuple[int, int]) -> None:
    pair = Pair(rule, vocab_sizes=vocab_sizes)
    pair.model.table[:, 12:] += 50.0  # padding that would win every draw if it were let in
    pair.driver.admit(0, PROMPT, SAMPLED)
    for _ in range(20):
        proposal = pair.driver.step([Work(0, draft_budget=3)])
        if vocab_sizes == (12, 20):
            assert int(proposal.token_ids.max()) < 12
        assert proposal.probs is None or proposal.probs.shape[2] == vocab_sizes[0]


def test_no_draft_lies_beyond_the_models_positions() -> None:
    pair = Pair(Rule.COUPLED, max_len=14)
    pair.driver.admit(0, PROMPT, GREEDY)
    for _ in range(12):
        length = len(pair.driver.slots[0].token_ids)
        lens = pair.driver.step([Work(0, draft_budget=4)]).lens.tolist()
        assert lens == [max(0, min(4, 14 - length))]
        assert pair.drafter.num_computed_tokens(0) <= 14


def test_the_prefix_cache_supplies_drafter_tokens() -> None:
    """An admission says how many leading tokens have drafter KV in shared pages; only the rest is run."""
    pair = Pair(Rule.COUPLED)
    pair.driver.admit(0, PROMPT, GREEDY)
    pair.driver.step([Work(0, draft_budget=1)])
    shared = pair.driver.slots[0].page_ids[:2]
    slots = {1: Slot(PROMPT[:], len(PROMPT), GREEDY, [*shared, 199], 8)}
    span = Span(1, SpanKind.DECODE, 8, 8, 1, 1, 1, emits=True)
    admission = Admission(1, tuple(PROMPT), len(PROMPT), GREEDY, (), 8, 8)
    tokens_before = pair.model.num_tokens_run
    proposal = pair.drafter.propose(StepPlan(9, (0,), (admission,), (), (), (span,), 2), slots)
    assert pair.model.num_tokens_run == tokens_before + 1
    assert proposal.token_ids.tolist() == [[int(pair.model.prefix_logits(PROMPT).argmax())]]
    assert pair.drafter.num_computed_tokens(0) == 0


def test_a_span_that_emits_nothing_keeps_its_count() -> None:
    pair = Pair(Rule.COUPLED)
    pair.driver.admit(0, PROMPT, GREEDY)
    plan = pair.driver.plan([Work(0, prefill_end=9, catch_up=9)])
    pair.drafter.propose(plan, pair.driver.slots)
    nothing = Verification([[]])
    pair.drafter.observe(plan, pair.driver.slots, nothing, torch.zeros((9, 1)))
    assert pair.drafter.num_computed_tokens(0) == 9
