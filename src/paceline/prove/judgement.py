"""What judging is asked and what it gives: the two ends of `verdict.judge`.

    judgement = judge(measurement, load_criteria("cpu"), JudgeOptions(prompts=dataset.prompts, is_quick=True))

The command line makes the options; the report puts the judgement, the environment and the certificate together into a `Proof`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import BadInputError
from paceline.prove.datasets.prompt import Prompt
from paceline.prove.record import Arm
from paceline.prove.results import ArmSummary, Criterion, ParetoPoint, Speedup, Verdict

MAX_RESAMPLES = 1_000_000


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must meet to count as goodput; None: no objective."""

    ttft_ms: float | None = 500.0
    tpot_ms: float | None = 200.0
    e2e_ms: float | None = None

    def __str__(self) -> str:
        """In the form that `--goodput` takes."""
        named = (("ttft", self.ttft_ms), ("tpot", self.tpot_ms), ("e2e", self.e2e_ms))
        return ",".join(f"{name}:{limit_ms:g}" for name, limit_ms in named if limit_ms is not None)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """How busy the device was while an arm ran, and by whose account: "utilisation" without its counter means nothing."""

    percent: float  # mean over the arm's measured blocks
    counter: str  # such as "DCGM_FI_PROF_SM_ACTIVE"
    bandwidth_fraction: float | None = None  # of the device's memory bandwidth, 0 to 1
    device: str = "gpu"  # or "cpu"


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    """How to judge. `prompts`: what was asked, to see whether it is text at all."""

    prompts: tuple[Prompt, ...]
    is_quick: bool = False  # few samples: cells are checked only for FAIL
    objectives: Objectives = Objectives()
    utilisation: Mapping[Arm, Utilisation] = field(default_factory=dict[Arm, Utilisation])
    max_error_rate: float = 0.01  # above it the comparison is INVALID: too much of it is missing
    num_resamples: int = 9_999
    seed: int = 0

    def __post_init__(self) -> None:
        if not 199 <= self.num_resamples <= MAX_RESAMPLES:
            raise BadInputError(f"num_resamples is {self.num_resamples:,}, allowed are 199 to {MAX_RESAMPLES:,}")
        if not 0 <= self.max_error_rate < 1:
            raise BadInputError(f"max_error_rate is {self.max_error_rate}, allowed is 0 to below 1")


@dataclass(frozen=True, slots=True)
class Judgement:
    """Everything of a `Proof` that follows from the records."""

    verdict: Verdict
    reasons: tuple[str, ...]  # the first says why the verdict is what it is; the rest what it rests on
    criteria: tuple[Criterion, ...]
    arms: tuple[ArmSummary, ...]
    speedup: tuple[Speedup, ...]
    pareto: tuple[ParetoPoint, ...]
