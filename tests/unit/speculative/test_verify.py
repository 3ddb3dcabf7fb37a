"""`choose` and `verify`: exact against the full draw and against plain decoding, for every option, shape and batch."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from paceline.core.draft import DraftProposal
from paceline.core.verification import HostRows, SamplingRows, Verification
from paceline.native import library
from paceline.speculative import verify as verify_module
from paceline.speculative.noise import gumbel_all
from paceline.speculative.process import process_logits
from paceline.speculative.rows import select_rows
from paceline.speculative.verify import Rule, choose, pick_tokens, residual
from tests.fakes.sampling_on_host import on_host
from tests.fakes.toy_law import Options, Sequences, ToyDecoder, law_table, related_table, toy_table

OPTIONS = {
    "greedy": Options(temperature=0.0),
    "temperature": Options(temperature=0.7),
    "top_k": Options(temperature=1.3, top_k=3),
    "top_p": Options(top_p=0.8),
    "min_p": Options(min_p=0.2),
    "all": Options(temperature=1.3, top_k=5, top_p=0.9, min_p=0.05),
}
MIXED = [*OPTIONS.values(), Options(temperature=5.0), Options(temperature=0.2, min_p=0.01), Options(temperature=0.01)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def mixed_rows(num_rows: int, options: list[Options] = MIXED) -> SamplingRows:
    cycle = [options[i % len(options)] for i in range(num_rows)]
    return SamplingRows(
        temperature=torch.tensor([o.temperature for o in cycle]),
        top_k=torch.tensor([o.top_k for o in cycle]),
        top_p=torch.tensor([o.top_p for o in cycle]),
        min_p=torch.tensor([o.min_p for o in cycle]),
        seed=torch.arange(num_rows) * 7919 - 3,
        output_index=torch.arange(num_rows) * 13,
        emits=torch.ones(num_rows, dtype=torch.bool),
        any_sampled=any(o.temperature > 0 for o in cycle),
    )


def random_logits(num_rows: int, vocab_size: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(num_rows + vocab_size)) * spread


def set_noise(monkeypatch: pytest.MonkeyPatch, some: Callable[..., torch.Tensor], every: Callable[..., torch.Tensor]) -> None:
    """Noise of the test's own instead of Philox's, which the search for contenders draws by itself."""
    monkeypatch.setattr(verify_module, "choose_on_host", lambda *_: None)
    monkeypatch.setattr(verify_module, "find_contenders", lambda logits, rows: None)
    monkeypatch.setattr(verify_module, "gumbel", some)
    monkeypatch.setattr(verify_module, "gumbel_all", every)


def full_draw(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    noise = gumbel_all(rows.seed, rows.output_index, logits.shape[1])
    return (process_logits(logits, rows) + torch.where(rows.temperature > 0, 1.0, 0.0).unsqueeze(1) * noise).argmax(1)


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("vocab_size", [1, 7, 3001])
def test_choice_equals_the_draw_of_noise_for_every_token(vocab_size: int, spread: float) -> None:
    logits, rows = random_logits(90, vocab_size, spread), mixed_rows(90)
    assert torch.equal(choose(logits, rows), full_draw(logits, rows))


@pytest.mark.parametrize(("gap", "winner"), [(25.2, 1), (25.3, 0)])
@pytest.mark.parametrize("options", [Options(), Options(top_k=2)])
def test_the_worst_noise_cannot_be_missed(monkeypatch: pytest.MonkeyPatch, gap: float, winner: int, options: Options) -> None:
    """The noisiest possible token overtakes the least noisy one from 25.2 below, and nothing can from 25.3."""
    extremes = torch.tensor([-3.0991, 32 * math.log(2)], dtype=torch.float64)
    set_noise(monkeypatch, lambda seed, index, ids: extremes[ids], lambda seed, index, vocab_size: extremes.unsqueeze(0))
    assert choose(torch.tensor([[0.0, -gap]]), mixed_rows(1, [options])).tolist() == [winner]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_ties_go_to_the_lowest_id(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    greedy = mixed_rows(1, [OPTIONS["greedy"]])
    for vocab_size, first in ((9, 4), (49_152, 40_001), (200_001, 3)):
        logits = torch.zeros((1, vocab_size))
        logits[0, first:] = 1.0
        assert choose(logits, greedy).tolist() == [first]
        assert choose(logits.expand(3, -1), mixed_rows(3, [OPTIONS["greedy"]])).tolist() == [first] * 3


@pytest.mark.parametrize("options", [Options(), Options(top_k=4), Options(min_p=0.01)])
def test_ties_of_noisy_scores_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch, options: Options) -> None:
    monkeypatch.setattr(verify_module, "find_contenders", lambda logits, rows: None)  # it has noise of its own
    set_noise(
        monkeypatch,
        lambda seed, index, ids: torch.zeros(ids.shape, dtype=torch.float64),
        lambda seed, index, vocab_size: torch.zeros((1, vocab_size), dtype=torch.float64),
    )
    assert choose(torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]]), mixed_rows(1, [options])).tolist() == [1]


def test_a_choice_does_not_depend_on_its_batch_mates(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = random_logits(120, 2000), mixed_rows(120)
    together = choose(logits, rows)
    for part in torch.randperm(120).split(7):
        assert torch.equal(choose(logits[part], select_rows(rows, part)), together[part])
    for name, values in (("_CHUNK_ELEMENTS", (1, 9000)), ("_DENSE_SHARE", (0, 1 << 30))):
        for value in values:
            monkeypatch.setattr(verify_module, name, value)
            assert torch.equal(choose(logits, rows), together), name


def test_an_all_greedy_batch_is_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "is_cut", None)  # the sampling path would call it
    logits = random_logits(5, 50)
    assert torch.equal(choose(logits, mixed_rows(5, [OPTIONS["greedy"]])), logits.argmax(1))


def test_a_seed_fixes_the_choice_and_seeds_differ() -> None:
    logits, rows = random_logits(1, 500).expand(50, -1).contiguous(), mixed_rows(50, [Options(temperature=1.5)])
    rows = replace(rows, output_index=torch.zeros(50, dtype=torch.int64))
    assert torch.equal(choose(logits, rows), choose(logits, rows))
    assert choose(logits, rows).unique().numel() > 20


def test_broken_logits_still_give_a_token_of_the_vocabulary() -> None:
    for value in (math.nan, -math.inf):
        logits, rows = torch.full((len(MIXED), 11), value), mixed_rows(len(MIXED))
        chosen = choose(logits, rows)
        assert bool(((chosen >= 0) & (chosen < 11)).all())
        result = verify(logits, DraftProposal([[]] * len(MIXED)), rows, Rule.RATIO)
        assert bool(((result.token_ids >= 0) & (result.token_ids < 11)).all())


def verify(logits: torch.Tensor, drafts: DraftProposal, rows: SamplingRows, rule: Rule) -> Verification:
    return verify_module.verify(logits, drafts, on_host(rows), rule)


def peaked(tokens: list[int], vocab_size: int = 10) -> torch.Tensor:
    """Logits whose choice is certain under every option."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab_size).float() * 1000


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rule", Rule)
def test_ragged_rows(rule: Rule, options: Options) -> None:
    rows = replace(mixed_rows(5, [options]), emits=torch.tensor([True, False, True, True, True]))
    wanted = [5, 6, 7, 1, 2, 8, 4, 4]  # rows 0 (2 drafts), 2 (1), 3 (0), 4 (1)
    result = verify(peaked(wanted), DraftProposal([[5, 6], [], [9], [], [4]]), rows, rule)
    assert result.num_accepted.tolist() == [2, 0, 0, 0, 1]
    assert result.num_emitted.tolist() == [3, 0, 1, 1, 2]
    assert result.token_ids.tolist() == [[5, 6, 7], [0, 0, 0], [1, 0, 0], [8, 0, 0], [4, 4, 0]]
    assert result.token_ids.dtype == result.num_accepted.dtype == result.num_emitted.dtype == torch.int32


@pytest.mark.parametrize("rule", Rule)
def test_plain_decoding_is_an_empty_draft(rule: Rule) -> None:
    rows = mixed_rows(4)
    result = verify(peaked([3, 1, 4, 1]), DraftProposal([[]] * 4), rows, rule)
    assert result.token_ids.tolist() == [[3], [1], [4], [1]]
    assert result.num_emitted.tolist() == [1, 1, 1, 1]
    idle = replace(rows, emits=torch.zeros(4, dtype=torch.bool))
    assert verify(torch.zeros((0, 10)), DraftProposal([[]] * 4), idle, rule).num_emitted.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("rule", Rule)
def test_acceptance_stops_at_the_first_rejection(rule: Rule) -> None:
    result = verify(peaked([1, 2, 3, 4]), DraftProposal([[1, 9, 3]]), mixed_rows(1, [OPTIONS["temperature"]]), rule)
    assert result.num_accepted.tolist() == [1]
    assert result.token_ids.tolist() == [[1, 2]]


def test_a_missing_logit_row_is_our_own_error() -> None:
    with pytest.raises(AssertionError, match="2 logit rows for 3 positions"):
        verify(peaked([1, 2]), DraftProposal([[1, 2]]), mixed_rows(1), Rule.COUPLED)


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
@pytest.mark.parametrize("option", OPTIONS)
def test_coupled_output_equals_plain_decoding(option: str, num_drafts: int) -> None:
    """For good, useless and ragged drafts alike, with the real noise."""
    length = 16
    target = toy_table(11, seed=2)
    plain = decode(ToyDecoder(target, target, OPTIONS[option], Rule.COUPLED, 0), length)
    drafters = {"twin": target, "related": related_table(target, seed=3), "stranger": toy_table(11, seed=4)}
    for name, table in drafters.items():
        toy = ToyDecoder(target, table, OPTIONS[option], Rule.COUPLED, num_drafts, one_hot_drafts=name == "stranger")
        ragged = replace(toy, trim=lambda q, drafts: (drafts + torch.arange(drafts.numel())) % 5 != 0)
        assert torch.equal(decode(toy, length), plain), name
        assert torch.equal(decode(ragged, length), plain), name


def decode(toy: ToyDecoder, length: int, num_sequences: int = 16) -> torch.Tensor:
    sequences = Sequences.start(num_sequences, length + toy.num_drafts + 1)
    seeds = torch.arange(num_sequences) - 8
    while (running := (sequences.lens < length).nonzero().squeeze(1)).numel() > 0:
        part = Sequences(sequences.tokens[running], sequences.lens[running])
        toy.step(part, seeds[running])
        sequences.tokens[running], sequences.lens[running] = part.tokens, part.lens
    return sequences.tokens[:, 2 : 2 + length]


def test_a_twin_drafter_is_always_accepted_under_coupled() -> None:
    target = toy_table(11, seed=2)
    for options in OPTIONS.values():
        sequences = Sequences.start(200, 6)
        ToyDecoder(target, target, options, Rule.COUPLED, 5).step(sequences, torch.arange(200))
        assert sequences.lens.tolist() == [6] * 200


@pytest.mark.parametrize("option", OPTIONS)
def test_coupled_law_by_enumeration(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """Two steps with every draft sequence and every outcome of the noise: the tokens are the target's own choices, one per output index.

    The arg-max of logits + Gumbel noise falls on token t with probability softmax(logits)[t] (Gumbel 1954), so an outcome of the noise
    is the winner at each output index, and the winners' probabilities given the tokens before are the target's law.
    """
    vocab_size, num_drafts = 3, 2
    length = 2 * (num_drafts + 1)
    force_winners(monkeypatch, vocab_size)
    target = toy_table(vocab_size, seed=vocab_size)
    codes = torch.cartesian_prod(
        torch.arange(vocab_size**length), torch.arange(vocab_size**num_drafts), torch.arange(vocab_size**num_drafts)
    )
    winners = torch.stack([codes[:, 0] // vocab_size**i % vocab_size for i in range(length)], dim=1)
    sequences = Sequences.start(len(codes), length)
    for step in (1, 2):
        script = torch.stack([codes[:, step] // vocab_size**j % vocab_size for j in range(num_drafts)])
        ToyDecoder(target, target, OPTIONS[option], Rule.COUPLED, num_drafts, script=script).step(sequences, codes[:, 0])
    assert int(sequences.lens.min()) == 2
    assert int(sequences.lens.max()) == length
    possible = torch.ones(len(codes), dtype=torch.bool)
    laws = torch.from_numpy(law_table(target, OPTIONS[option])) if OPTIONS[option].temperature > 0 else greedy_laws(target)
    for i in range(length):
        probability = laws[sequences.tokens[:, i], sequences.tokens[:, i + 1]]
        emitted = i < sequences.lens
        possible &= ~emitted | (probability.gather(1, winners[:, i : i + 1]).squeeze(1) > 0)
        token = sequences.tokens[:, 2 + i]
        assert torch.equal(token[emitted & possible], winners[emitted & possible, i])
        assert bool((probability.gather(1, token.unsqueeze(1)).squeeze(1) > 0)[emitted].all())
    assert int(possible.sum()) > 0


def force_winners(monkeypatch: pytest.MonkeyPatch, vocab_size: int) -> None:
    """Noise by which the token that digit `index` of the seed names wins, if it may win at all."""

    def gumbel(seed: torch.Tensor, index: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (seed // vocab_size**index % vocab_size == ids).double() * 20

    def every(seed: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
        return gumbel(seed.unsqueeze(1), index.unsqueeze(1), torch.arange(size))

    set_noise(monkeypatch, gumbel, every)


def greedy_laws(table: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(table.argmax(-1), table.shape[-1]).double()


def test_mutation_noise_by_draft_position_is_not_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toy_table(11, seed=2)
    plain = decode(ToyDecoder(target, target, OPTIONS["temperature"], Rule.COUPLED, 0), 24)
    with monkeypatch.context() as planted:
        planted.setattr(verify_module, "choose_on_host", lambda *_: None)
        planted.setattr(verify_module, "select_rows", lambda rows, row, offset=0: select_rows(rows, row))
        mistaken = decode(ToyDecoder(target, target, OPTIONS["temperature"], Rule.COUPLED, 3), 24)
    assert not torch.equal(mistaken, plain)
    if isinstance(library.load(), library.Library):
        honest = verify_module.choose_on_host

        def at_first_index(logits: torch.Tensor, rows: HostRows, widths: list[int]) -> list[int] | None:
            return honest(logits, replace(rows, output_index=[0] * len(widths)), widths)

        monkeypatch.setattr(verify_module, "choose_on_host", at_first_index)
        assert not torch.equal(decode(ToyDecoder(target, target, OPTIONS["temperature"], Rule.COUPLED, 3), 24), plain)


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_ratio_without_temperature_is_plain_decoding(num_drafts: int) -> None:
    target = toy_table(11, seed=2)
    plain = decode(ToyDecoder(target, target, OPTIONS["greedy"], Rule.COUPLED, 0), 24)
    toy = ToyDecoder(target, related_table(target, seed=3), OPTIONS["greedy"], Rule.RATIO, num_drafts)
    assert torch.equal(decode(toy, 24), plain)


def test_ratio_judges_greedy_rows_beside_sampled_ones_by_argmax() -> None:
    rows = mixed_rows(2, [Options(temperature=0.0), Options(top_k=1)])
    logits = torch.tensor([[0.0, 1.0, 0.9], [0.0, 0.9, 1.0]] * 2)
    probs = torch.tensor([[[0.0, 1.0, 0.0]], [[0.0, 0.5, 0.5]]])
    result = verify(logits, DraftProposal([[1], [2]], probs), rows, Rule.RATIO)
    assert result.token_ids.tolist() == [[1, 2], [1, 0]]


def test_picking_never_yields_a_token_without_weight() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 6.0, 0.0]], dtype=torch.float64)
    for uniform, token in ((1e-10, 1), (0.2499, 1), (0.25, 3), (0.9999999999, 3)):
        assert pick_tokens(weights, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_residual_without_mass_falls_back_to_p() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    assert residual(p, q).tolist() == [[0.5, 0.5, 0.0], [0.0, 0.25, 0.0]]
