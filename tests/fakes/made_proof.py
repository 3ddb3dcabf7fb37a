"""A whole proof with every part filled, made by formulas: for tests of the report, where the figures themselves do not matter."""

import math

from paceline.prove.datasets.prompt import CATEGORIES
from paceline.prove.record import Arm
from paceline.prove.results import (
    OVERALL,
    AcceptanceLength,
    ArmSummary,
    Certificate,
    Criterion,
    Divergence,
    LawTest,
    ParetoPoint,
    Percentiles,
    Proof,
    Speedup,
    Verdict,
)

CONCURRENCIES = (1, 4)


def percentiles(middle: float) -> Percentiles:
    return Percentiles(middle, middle * 1.7, middle * 2.4)


def arm_summary(arm: Arm, concurrency: int, category: str, gain: float = 1.0) -> ArmSummary:
    is_fast = arm == Arm.SPECULATIVE
    step_ms = 24.0 * (1 + 0.08 * concurrency) * (1.35 if is_fast else 1.0)
    token_ms = step_ms / ((1.35 * gain) if is_fast else 1.0)
    conditional = tuple(0.35 + 0.12 * gain + 0.05 * place for place in range(5)) if is_fast else ()
    num_requests = 44 if category == OVERALL else 4
    return ArmSummary(
        arm=arm,
        concurrency=concurrency,
        category=category,
        num_requests=num_requests,
        num_errors=0,
        num_output_tokens=num_requests * 92,
        mean_output_tokens=92.0,
        ttft_ms=percentiles(61.0 * concurrency**0.6),
        tpot_ms=percentiles(token_ms),
        itl_ms=percentiles(token_ms),
        chunk_gap_ms=percentiles(step_ms),
        e2e_ms=percentiles(60 + 92 * token_ms),
        user_tps=1e3 / token_ms,
        output_tps=concurrency * 950 / token_ms if category == OVERALL else None,
        requests_per_s=concurrency * 10.3 / token_ms if category == OVERALL else None,
        goodput=0.98,
        acceptance_length=AcceptanceLength(1.35 * gain, 1.4 * gain) if is_fast else None,
        conditional_acceptance=conditional,
        joint_acceptance=tuple(math.prod(conditional[: place + 1]) for place in range(len(conditional))),
        step_ms=step_ms,
    )


def speedup(category: str, concurrency: int, ratio: float) -> Speedup:
    spread = 0.02 if category == OVERALL else 0.09
    return Speedup(
        category=category,
        concurrency=concurrency,
        ratio=ratio,
        user_tps_ratio=ratio * 1.01,
        output_tps_ratio=ratio * 0.99,
        ci95=(ratio * (1 - spread), ratio * (1 + spread)),
        simultaneous_low=ratio * (1 - 1.3 * spread),
        simultaneous_high=ratio * (1 + 1.3 * spread),
        projected_ratio=ratio * 1.03,
        num_pairs=44 if category == OVERALL else 4,
    )


def made_environment() -> dict[str, object]:
    return {
        "model": "smollm2-135m-instruct",
        "date": "2026-11-30",
        "paceline": "0.3.0",
        "torch": None,
        "device": "cpu",
        "cpu": "AMD EPYC, 2 cores",
        "model_sha256": "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
        "seeds": [1, 2, 3],
        "settings": {"concurrency": [1, 4], "max_tokens": 96, "temperature": 0.0},
        "dataset": {"label": "speed-bench-like v1 (not SPEED-Bench), qualitative", "sha256": "0" * 64, "num_prompts": 44},
        "utilisation": [
            {"concurrency": one, "counter": "CPU time of the server's processes, of 2 cores", "baseline": 93.0, "speculative": 96.5}
            for one in CONCURRENCIES
        ],
        "warnings": ["Too few samples to show cell by cell that no category is slower."],
        "command": "paceline prove --quick --seed 1",
    }


def made_proof(verdict: Verdict = Verdict.PASS, environment: dict[str, object] | None = None) -> Proof:
    gains = {category: 0.96 + 0.09 * place for place, category in enumerate(CATEGORIES)} | {OVERALL: 1.38}
    cells = [(category, concurrency) for concurrency in CONCURRENCIES for category in gains]
    return Proof(
        verdict=verdict,
        reasons=("The lower bound of the speed-up is above 1 at every concurrency (Holm).",),
        environment=made_environment() if environment is None else environment,
        criteria=(
            Criterion("first token, 95th percentile", "<= 500 ms", 148.2, True),
            Criterion("requests per second", ">= 200", 0.31, False),
            Criterion("GPU utilisation", "> 80 %", None, None),
        ),
        arms=tuple(arm_summary(arm, concurrency, category, gains[category]) for category, concurrency in cells for arm in Arm),
        speedup=tuple(speedup(category, concurrency, gains[category] - 0.02 * concurrency) for category, concurrency in cells),
        certificate=Certificate(
            greedy_identical=False,
            seeded_identical=True,
            num_compared=88,
            divergences=(Divergence("a" * 32, "greedy", 41, (" the", " a"), 0.00031, True),),
            law_tests=(LawTest("temperature 0.7", 13.1, 0.59, 2000), LawTest("top_p 0.9", 17.9, 0.27, 2000)),
        ),
        pareto=tuple(
            ParetoPoint(one.concurrency, one.arm, one.user_tps or 0, one.output_tps or 0)
            for one in (arm_summary(arm, concurrency, OVERALL, 1.38) for concurrency in (1, 4, 16) for arm in Arm)
        ),
    )
