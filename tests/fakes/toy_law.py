"""Toy language models as tables, many sequences decoded at once through the production sampler, and the law that must come out.

`ToyDecoder` drives `speculative.verify` as the executor does, for thousands of independent sequences; `reference_law` and
`joint_law` say in plain Python what distribution each request asked for. Used by the law tests.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.draft import DraftProposal
from paceline.core.verification import SamplingRows
from paceline.speculative import verify as verify_module
from paceline.speculative.verify import Rule
from tests.fakes.sampling_on_host import as_lists, on_host


@dataclass(frozen=True)
class Options:
    """Sampling options that all sequences of one test share."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def rows(self, seeds: torch.Tensor, output_index: torch.Tensor) -> SamplingRows:
        num_rows = seeds.numel()
        return SamplingRows(
            temperature=torch.full((num_rows,), self.temperature),
            top_k=torch.full((num_rows,), self.top_k),
            top_p=torch.full((num_rows,), self.top_p),
            min_p=torch.full((num_rows,), self.min_p),
            seed=seeds,
            output_index=output_index,
            emits=torch.ones(num_rows, dtype=torch.bool),
            any_sampled=self.temperature > 0,
        )


def toy_table(vocab_size: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    """Logits `[V, V, V]` f32 of the next token by the last two tokens."""
    return torch.randn((vocab_size,) * 3, generator=torch.Generator().manual_seed(seed)) * spread


def related_table(table: torch.Tensor, seed: int, distance: float = 1.0) -> torch.Tensor:
    """A drafter's table: the target's with noise, so that it is often but not always right."""
    return table + torch.randn(table.shape, generator=torch.Generator().manual_seed(seed)) * distance


@dataclass
class Sequences:
    """`tokens` `[N, 2 + L]` i64 begin with two prompt tokens; `lens` `[N]` i64 counts output tokens."""

    tokens: torch.Tensor
    lens: torch.Tensor

    @staticmethod
    def start(num_sequences: int, max_output: int) -> "Sequences":
        return Sequences(torch.zeros((num_sequences, 2 + max_output), dtype=torch.int64), torch.zeros(num_sequences, dtype=torch.int64))

    def outputs(self) -> NDArray[np.int64]:
        """`[N, L]`; -1 behind each sequence's end."""
        out = self.tokens[:, 2:].clone()
        out[torch.arange(out.shape[1]) >= self.lens.unsqueeze(1)] = -1
        return out.numpy()


Draw = Callable[[torch.Tensor, SamplingRows], tuple[torch.Tensor, torch.Tensor]]
Trim = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class ToyDecoder:
    """Target and drafter as tables. `draw` makes drafts under `ratio`; `trim(q, drafts)` says which rows still propose."""

    target: torch.Tensor
    drafter: torch.Tensor
    options: Options
    rule: Rule
    num_drafts: int
    one_hot_drafts: bool = False  # propose the drafter's arg-max, as ngram does, without q
    draw: Draw | None = None
    trim: Trim | None = None
    script: torch.Tensor | None = None  # [K, N] i64: these drafts and no others

    def step(self, sequences: Sequences, seeds: torch.Tensor) -> None:
        """One propose -> verify -> commit for all sequences."""
        num, width = seeds.numel(), self.num_drafts
        rows = self.options.rows(seeds, sequences.lens)
        each = torch.arange(num)
        context = torch.zeros((num, 2 + width), dtype=torch.int64)
        context[:, 0] = sequences.tokens[each, sequences.lens]
        context[:, 1] = sequences.tokens[each, sequences.lens + 1]
        probs = torch.zeros((num, width, self.target.shape[-1]))
        lens = torch.zeros(num, dtype=torch.int32)
        drafting = torch.ones(num, dtype=torch.bool)
        for j in range(width):
            drafts, q = self._draft(j, self.drafter[context[:, j], context[:, j + 1]], replace(rows, output_index=sequences.lens + j))
            if self.trim is not None:
                drafting = drafting & self.trim(q, drafts)
            lens += drafting.to(torch.int32)
            context[:, 2 + j] = drafts * drafting
            probs[:, j] = q
        has_probs = self.rule is Rule.RATIO and not self.one_hot_drafts
        proposal = DraftProposal(as_lists(context[:, 2:], lens), probs if has_probs else None)
        all_logits = self.target[context[:, :-1], context[:, 1:]]  # [N, K+1, V]
        logits = all_logits[torch.arange(width + 1) <= lens.unsqueeze(1)]
        result = verify_module.verify(logits, proposal, on_host(rows), self.rule)
        token_ids, num_emitted = result.token_ids, result.num_emitted
        for j in range(token_ids.shape[1]):
            emitted = (j < num_emitted).nonzero().squeeze(1)
            sequences.tokens[emitted, 2 + sequences.lens[emitted] + j] = token_ids[emitted, j].to(torch.int64)
        sequences.lens = sequences.lens + num_emitted

    def _draft(self, position: int, logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        if self.script is not None:
            return self.script[position], torch.zeros_like(logits)
        if self.one_hot_drafts:
            return logits.argmax(1), torch.zeros_like(logits)
        if self.rule is Rule.COUPLED:
            return verify_module.choose(logits, rows), torch.zeros_like(logits)
        return (self.draw or verify_module.draw_drafts)(logits, rows)


def reference_law(logits: list[float], options: Options) -> list[float]:
    """The law of one token in plain Python: temperature, top-k, top-p, min-p in this order; equal logits rank by rising id."""
    scaled = [x / float(np.float32(options.temperature)) for x in logits]
    ranked = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if options.top_k > 0:
        ranked = ranked[: options.top_k]
    weight = {i: math.exp(scaled[i] - scaled[ranked[0]]) for i in ranked}
    if options.top_p < 1:
        wanted, mass, kept = float(np.float32(options.top_p)) * math.fsum(weight.values()), 0.0, list[int]()
        for i in ranked:
            kept.append(i)
            mass += weight[i]
            if mass >= wanted:
                break
        ranked = kept
    ranked = [i for i in ranked if weight[i] >= float(np.float32(options.min_p))]
    total = math.fsum(weight[i] for i in ranked)
    return [weight[i] / total if i in ranked else 0.0 for i in range(len(scaled))]


def law_table(table: torch.Tensor, options: Options) -> NDArray[np.float64]:
    """`reference_law` of every context: `[V, V, V]`."""
    vocab_size = table.shape[0]
    laws = [[reference_law(table[a, b].tolist(), options) for b in range(vocab_size)] for a in range(vocab_size)]
    return np.array(laws)


def joint_law(laws: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """Probability of every output of `length` tokens after the prompt (0, 0): `[V ** length]`, first token most significant."""
    masses, contexts = np.ones(1), np.zeros((1, 2), dtype=np.int64)
    for _ in range(length):
        masses, contexts = _extend(masses, contexts, laws)
    return masses


def completed_law(outputs: NDArray[np.int64], weights: NDArray[np.float64], laws: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """The joint law of the first `length` tokens if weighted outputs that end early are continued by the target's own law.

    Equal to `joint_law` exactly if the sampler keeps the law: how many tokens a step emits may depend on the tokens, so the
    lengths themselves cannot be compared.
    """
    vocab_size = laws.shape[0]
    ends = (outputs >= 0).sum(1)
    masses, contexts = np.zeros(1), np.zeros((1, 2), dtype=np.int64)
    codes = np.zeros(len(outputs), dtype=np.int64)
    for position in range(length):
        np.add.at(masses, codes[ends == position], weights[ends == position])
        masses, contexts = _extend(masses, contexts, laws)
        codes = codes * vocab_size + np.maximum(outputs[:, position], 0)
    going_on = ends >= length
    np.add.at(masses, codes[going_on], weights[going_on])
    return masses


def _extend(
    masses: NDArray[np.float64], contexts: NDArray[np.int64], laws: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    vocab_size = laws.shape[0]
    longer = (masses[:, None] * laws[contexts[:, 0], contexts[:, 1]]).reshape(-1)
    last = np.repeat(contexts[:, 1], vocab_size)
    return longer, np.stack((last, np.tile(np.arange(vocab_size), len(masses))), axis=1)
