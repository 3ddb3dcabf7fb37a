"""Servers whose truth is known, on a clock that is only counted: what the statistics of `prove` must find again.

`paired_seconds` gives many runs at once as arrays; `SyntheticServer` gives whole measurements, request by request and chunk by chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.prove.plan import Measurement, ServerFacts
from paceline.prove.record import Acceptance, Arm, BlockRun, Phase, RequestRecord
from paceline.prove.statistics.ratio import Design

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """How much slower the machine is than it should be, from request to request, in logarithms."""

    jitter: float = 0.05  # standard deviation, anew for each request
    wander: float = 0.0  # standard deviation of what is remembered ...
    memory: float = 0.0  # ... this much from one request to the next (AR(1))
    drift: float = 0.0  # from the first request to the last
    outlier_share: float = 0.0  # requests that something got in the way of
    outlier_size: float = 0.0  # mean of their extra time, in multiples of their own

    def slowness(self, rng: np.random.Generator, num_runs: int, num_moments: int) -> Floats:
        """[num_runs, num_moments], factors in the order of time."""
        log = self.jitter * rng.standard_normal((num_runs, num_moments)) + np.linspace(0, self.drift, num_moments)
        state = rng.standard_normal(num_runs)
        for moment in range(num_moments):
            log[:, moment] += self.wander * state
            state = self.memory * state + np.sqrt(1 - self.memory**2) * rng.standard_normal(num_runs)
        is_outlier = rng.random((num_runs, num_moments)) < self.outlier_share
        return np.exp(log) * (1 + is_outlier * rng.exponential(self.outlier_size or 1.0, (num_runs, num_moments)))


QUIET = Noise()
AR1 = Noise(jitter=0.03, wander=0.1, memory=0.9)
DRIFT = Noise(jitter=0.03, drift=0.3)
OUTLIERS = Noise(jitter=0.03, outlier_share=0.05, outlier_size=1.0)
SCENARIOS = {"quiet": QUIET, "AR(1)": AR1, "drift": DRIFT, "outliers": OUTLIERS}


@dataclass(frozen=True)
class Runs:
    """Many runs of one design: seconds per request and arm [num_runs, num_pairs]."""

    baseline_s: Floats
    speculative_s: Floats
    design: Design


def paired_seconds(
    rng: np.random.Generator, num_runs: int, num_blocks: int, noise: Noise, true_ratio: float, *, per_block: int = 6, spread: float = 0.15
) -> Runs:
    """Blocks of `per_block` requests, arms in the order ABBA. Prompts differ in length and in their own speed-up (`spread`, in logarithms),
    such that total baseline time over total speculative time is `true_ratio` for endlessly many prompts."""
    moments = noise.slowness(rng, num_runs, 2 * num_blocks * per_block).reshape(num_runs, num_blocks, 2, per_block)
    is_first = np.arange(num_blocks) % 2 == 0
    base_side = np.where(is_first, 0, 1)
    blocks = np.arange(num_blocks)
    length = rng.lognormal(0, 0.5, (num_runs, num_blocks, per_block))
    own = np.exp(spread * rng.standard_normal(length.shape) - spread**2 / 2)  # mean 1
    base = length * moments[:, blocks, base_side]
    other = length * own / true_ratio * moments[:, blocks, 1 - base_side]
    shape = (num_runs, num_blocks * per_block)
    return Runs(base.reshape(shape), other.reshape(shape), Design(np.repeat(blocks, per_block), is_first))


@dataclass(frozen=True)
class SyntheticServer:
    """A server that verifies drafts: K tokens each step, accepted one after the other with its `hazards`."""

    prefill_ms: float = 100.0
    plain_step_ms: float = 30.0
    draft_step_ms: float = 40.0
    hazards: tuple[float, ...] = (0.8, 0.7, 0.6)
    num_tokens: int = 96
    noise: Noise = Noise(jitter=0.0)
    plain_share: float = 0.0  # of the speculative arm's steps, those without drafts
    facts: dict[str, object] = field(default_factory=dict)

    @property
    def tokens_per_draft_step(self) -> float:
        return 1 + float(np.cumprod(self.hazards).sum())

    def measure(
        self, categories: Sequence[str], per_category: int, num_blocks: int = 8, concurrencies: Sequence[int] = (1,), seed: int = 0
    ) -> Measurement:
        """Prompts of each category dealt out to the blocks in turn; each block in both arms, ABBA, with nothing in between."""
        rng = np.random.default_rng(seed)
        records: list[RequestRecord] = []
        runs: list[BlockRun] = []
        now_s, place = 0.0, 0
        prompts = [(category, f"{category}-{number}") for number in range(per_category) for category in categories]
        for concurrency in concurrencies:
            slowness = self.noise.slowness(rng, 1, 2 * len(prompts))[0]
            moment = 0
            for block in range(num_blocks):
                mine = prompts[block::num_blocks]
                for arm in (Arm.BASELINE, Arm.SPECULATIVE) if block % 2 == 0 else (Arm.SPECULATIVE, Arm.BASELINE):
                    made: list[RequestRecord] = []
                    free_s = [now_s] * concurrency  # when each conversation slot is free
                    for category, question in mine:
                        slot = int(np.argmin(free_s))
                        record = self._answer(
                            rng, arm, (concurrency, block, place), (category, question), free_s[slot], float(slowness[moment])
                        )
                        moment += 1
                        free_s[slot] = record.end_s
                        made.append(record)
                    before = dict.fromkeys(_counters([]), 1000.0)
                    after = {name: 1000.0 + value for name, value in _counters(made).items()}
                    runs.append(BlockRun(arm, Phase.MEASURE, concurrency, block, place, now_s, max(free_s), before, after))
                    records += made
                    now_s, place = max(free_s) + 0.5, place + 1
        facts = ServerFacts("http://synthetic", "synthetic", "synthetic-1b", dtype="float32", facts=self.facts)
        return Measurement(tuple(records), tuple(runs), dict.fromkeys(Arm, facts), dict.fromkeys(concurrencies), (), 0.1, is_complete=True)

    def _answer(
        self, rng: np.random.Generator, arm: Arm, where: tuple[int, int, int], what: tuple[str, str], sent_s: float, slowness: float
    ) -> RequestRecord:
        concurrency, block, place = where
        category, question = what
        k = len(self.hazards)
        histogram, num_plain, num_accepted = [0] * (k + 1), 0, 0
        time_s = sent_s + self.prefill_ms * slowness / 1e3
        times, tokens = [time_s], [1]
        left = self.num_tokens - 1
        while left > 0:
            is_plain = arm is Arm.BASELINE or rng.random() < self.plain_share
            accepted = 0 if is_plain else int(np.cumprod(rng.random(k) < np.array(self.hazards)).sum())
            accepted = min(accepted, left)
            if is_plain:
                num_plain += 1
            else:
                histogram[accepted] += 1
                num_accepted += accepted
            time_s += (self.plain_step_ms if is_plain else self.draft_step_ms) * slowness / 1e3
            times.append(time_s)
            tokens.append(min(accepted + 1, left))
            left -= tokens[-1]
        acceptance = None
        if arm is Arm.SPECULATIVE:
            acceptance = Acceptance(sum(histogram), k * sum(histogram), num_accepted, tuple(histogram), k, num_plain, 0)
        return RequestRecord(
            arm=arm,
            phase=Phase.MEASURE,
            concurrency=concurrency,
            block=block,
            place=place,
            question_id=question,
            category=category,
            turn=0,
            sent_s=sent_s,
            chunk_times_s=tuple(times),
            chunk_tokens=tuple(tokens),
            end_s=time_s,
            num_prompt_tokens=100,
            num_cached_tokens=0,
            num_output_tokens=self.num_tokens,
            finish_reason="length",
            status=200,
            error=None,
            text="",
            max_tokens=self.num_tokens,
            acceptance=acceptance,
        )


def _counters(records: Sequence[RequestRecord]) -> dict[str, float]:
    told = [record.acceptance for record in records if record.acceptance is not None]
    return {
        "vllm:spec_decode_num_drafts_total": float(sum(each.num_spec_steps for each in told)),
        "vllm:spec_decode_num_draft_tokens_total": float(sum(each.num_draft_tokens for each in told)),
        "vllm:spec_decode_num_accepted_tokens_total": float(sum(each.num_accepted_draft_tokens for each in told)),
        "vllm:generation_tokens_total": float(sum(record.num_output_tokens for record in records)),
    }
