"""The judgement as data: what the JSON holds and the page shows. Names are fixed, for tools read them; `pass` is `passed` here.

Computed by `summary.py`, `statistics/` and `certificate.py` from records; written by `report/`.
"""

from dataclasses import dataclass
from enum import StrEnum

from paceline.prove.record import Arm

OVERALL = "overall"  # in the place of a category: all of them together


class Work(StrEnum):
    """What both arms did between the times whose ratio is given."""

    IDENTICAL = "identical tokens"  # the same answers: total time over the same tokens
    REPLAYED = "replayed"  # prompts and lengths of one recording: total time over equal work, although the texts may differ
    EQUAL_LENGTHS = "equal lengths"  # other answers, each as long as its twin
    PER_TOKEN = "per token"  # noqa: S105 - answers of unequal length: time per output token


class Verdict(StrEnum):
    PASS = "PASS"  # noqa: S105 - a verdict
    FAIL = "FAIL"
    INVALID = "INVALID"  # the comparison itself is not fair
    INCONCLUSIVE = "INCONCLUSIVE"  # too few samples; the reasons say how many more

    @property
    def exit_code(self) -> int:
        return {"PASS": 0, "FAIL": 1, "INVALID": 4, "INCONCLUSIVE": 5}[self.value]


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class AcceptanceLength:
    """Tokens per verification, bonus token included, in both poolings."""

    mean_of_means: float  # mean over requests of each one's mean: SPEED-Bench's harness
    token_weighted: float  # over all verifications: Prometheus counters, AIPerf


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm at one concurrency in one category (or OVERALL). None: nothing was there to compute it from."""

    arm: Arm
    concurrency: int
    category: str
    num_requests: int
    num_errors: int  # cut streams and wrong finish reasons included
    num_output_tokens: int
    mean_output_tokens: float
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None  # (last chunk - first chunk) / (tokens - those of the first chunk), by token counts
    itl_ms: Percentiles | None  # per token: time since the chunk before / tokens in the chunk
    chunk_gap_ms: Percentiles | None
    e2e_ms: Percentiles | None
    user_tps: float | None  # mean over requests of tokens per second of one request
    output_tps: float | None  # all tokens / wall time of the blocks; only OVERALL has one
    requests_per_s: float | None
    goodput: float | None  # share of requests that meet the objectives
    acceptance_length: AcceptanceLength | None
    conditional_acceptance: tuple[float, ...]  # P(draft i accepted | drafts before it accepted), from draft 1
    joint_acceptance: tuple[float, ...]
    step_ms: float | None  # t_ar or t_sd: (last chunk - first chunk) / steps between them
    rate_per_s: float = 0.0  # arrival rate of an open loop (concurrency 0); 0 in closed loop
    output_tps_per_gpu: float | None = None  # output_tps / the server's GPUs; None on a CPU, and where the server does not say how many


@dataclass(frozen=True, slots=True)
class Speedup:
    """Speculative over baseline on the same prompts; above 1 is faster."""

    category: str
    concurrency: int
    ratio: float  # total time of the baseline / that of the speculative arm, over the work that `work` says
    user_tps_ratio: float | None
    output_tps_ratio: float | None
    ci95: tuple[float, float]  # of `ratio`, cluster bootstrap over blocks and prompts
    simultaneous_low: float | None  # one-sided 95 % over all cells at once
    simultaneous_high: float | None
    projected_ratio: float | None  # t_ar x acceptance length / t_sd
    num_pairs: int
    work: Work = Work.IDENTICAL


@dataclass(frozen=True, slots=True)
class Criterion:
    name: str
    threshold: str  # as text with its comparison, such as "<= 500 ms"
    value: float | None
    passed: bool | None  # None: could not be measured here


@dataclass(frozen=True, slots=True)
class Divergence:
    """Two answers that should be the same and are not."""

    question_id: str
    kind: str  # "greedy" or "seeded"
    position: int  # of the first token that differs
    tokens: tuple[str, str]
    top2_gap: float | None  # between the two likeliest tokens there, by a teacher-forced pass, in nats; None if it cannot be known
    is_near_tie: bool | None


@dataclass(frozen=True, slots=True)
class LawTest:
    """Samples under one option against the law that the option asks for."""

    option: str
    chi2: float
    p: float
    num_samples: int
    num_degrees: int = 0  # degrees of freedom of chi2, over all contexts that were tested
    num_drafted: int | None = None  # samples in which a draft was verified; None: the server does not say
    against: str = "law"  # "law": computed from the model's log-probabilities; "plain": samples of the plain arm
    threshold: float = 0.0  # p below it is a broken law (Holm over all tests)
    is_broken: bool = False
    is_as_without: bool = False  # the samples follow the law without the option


@dataclass(frozen=True, slots=True)
class Certificate:
    greedy_identical: bool | None  # None: it could not be compared
    seeded_identical: bool | None
    num_compared: int  # pairs of answers
    divergences: tuple[Divergence, ...]
    law_tests: tuple[LawTest, ...]
    plain: str = ""  # how plain decoding was asked for
    num_draft_tokens: int | None = None  # verified in the answers that were compared; None: the server does not say
    epsilon: float = 0.0  # nats: a top-2 gap below it is a near tie
    alpha: float = 0.0  # chance that any law test of a lawful server is called broken
    broken: tuple[str, ...] = ()  # what the server breaks, as sentences
    unknown: tuple[str, ...] = ()  # what could not be found out, and why

    @property
    def holds(self) -> bool | None:
        """Whether output is that of plain decoding, up to near ties; None if nothing broke and something could not be found out."""
        if self.broken:
            return False
        return None if self.unknown else True


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    concurrency: int
    arm: Arm
    user_tps: float
    output_tps: float
    output_tps_per_gpu: float | None = None  # SPEED-Bench's axis; None on a CPU, and where nobody says how many GPUs there are


@dataclass(frozen=True, slots=True)
class Proof:
    """Everything, in the order of the JSON's top level."""

    verdict: Verdict
    reasons: tuple[str, ...]
    environment: dict[
        str, object
    ]  # paceline, torch, device, driver, cpu, model sha256, draft sha256, seeds, dataset hash and label, command
    criteria: tuple[Criterion, ...]
    arms: tuple[ArmSummary, ...]
    speedup: tuple[Speedup, ...]
    certificate: Certificate | None
    pareto: tuple[ParetoPoint, ...]
