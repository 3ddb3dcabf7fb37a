"""Each unfair comparison is INVALID, says why, and the fair one it was made from is not."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.prove.datasets.load import load
from paceline.prove.datasets.prompt import Prompt
from paceline.prove.judgement import JudgeOptions
from paceline.prove.plan import Measurement
from paceline.prove.record import Arm, RequestRecord
from paceline.prove.results import Verdict
from paceline.prove.verdict import judge
from tests.fakes.synthetic_server import SyntheticServer

PROMPTS = load("speed-bench-like", "qualitative").prompts[:60]
FAIR = SyntheticServer(num_tokens=40).measure(("qa", "math"), 16)
DRAFTED = next(record.acceptance for record in FAIR.records if record.acceptance is not None)
OPTIONS = JudgeOptions(prompts=PROMPTS, is_quick=True, num_resamples=199)


def with_records(change: Callable[[RequestRecord], RequestRecord], arm: Arm = Arm.SPECULATIVE) -> Measurement:
    return replace(FAIR, records=tuple(change(record) if record.arm is arm else record for record in FAIR.records))


def longer(record: RequestRecord) -> RequestRecord:
    return replace(record, num_output_tokens=46, acceptance=None, chunk_tokens=())


def silent(measurement: Measurement) -> Measurement:
    """A server without counters."""
    return replace(measurement, runs=tuple(replace(run, counters_before={}, counters_after={}) for run in measurement.runs))


def with_error_in(question: str) -> Callable[[RequestRecord], RequestRecord]:
    return lambda record: replace(record, error="the stream was cut") if record.question_id == question else record


def with_precision(**told: object) -> Measurement:
    servers = {
        arm: replace(facts, facts={**facts.facts, **told}) if arm is Arm.SPECULATIVE else facts for arm, facts in FAIR.servers.items()
    }
    servers[Arm.BASELINE] = replace(servers[Arm.BASELINE], facts=dict.fromkeys(told, "none"))
    return replace(FAIR, servers=servers)


def with_dtype(dtype: str | None) -> Measurement:
    facts = FAIR.servers[Arm.SPECULATIVE]
    return replace(FAIR, servers={Arm.BASELINE: facts, Arm.SPECULATIVE: replace(facts, dtype=dtype)})


def with_counters(factor: float) -> Measurement:
    name = "vllm:spec_decode_num_accepted_tokens_total"
    runs = [
        replace(run, counters_after={**run.counters_after, name: 1000 + factor * (run.counters_after[name] - 1000)}) for run in FAIR.runs
    ]
    return replace(FAIR, runs=tuple(runs))


def later_turns_with_prompts_of(num_tokens: int, is_replayed: bool) -> Measurement:
    """Every request a second turn; those of the accelerated arm have prompts of that length."""
    later = (replace(record, turn=1, is_replayed=is_replayed) for record in FAIR.records)
    lengths = {Arm.BASELINE: 100, Arm.SPECULATIVE: num_tokens}
    return replace(FAIR, records=tuple(replace(record, num_prompt_tokens=lengths[record.arm]) for record in later))


UNFAIR = {
    "unequal max_tokens": (with_records(lambda record: replace(record, max_tokens=41)), "different max_tokens"),
    "longer answers": (silent(with_records(longer)), "more than 10% apart"),
    "a warm cache": (with_records(lambda record: replace(record, num_cached_tokens=48)), "a warm cache against a cold one"),
    "another dtype": (with_dtype("bfloat16"), "differ in dtype: float32 (baseline) and bfloat16"),
    "another quantisation": (with_precision(quantization="int8"), "differ in quantization"),
    "counters that disagree": (with_counters(1.05), "the server's counters of"),
    "drafts in the baseline": (
        with_records(lambda record: replace(record, acceptance=DRAFTED), Arm.BASELINE), "of the baseline were decoded with drafts"
    ),
    "another tokenizer": (
        with_records(lambda record: replace(record, num_prompt_tokens=102)), "different numbers of tokens in the arms (such as 100"
    ),
    "another history": (later_turns_with_prompts_of(150, is_replayed=True), "different numbers of tokens in the arms"),
    "more GPUs": (
        replace(FAIR, servers={arm: replace(facts, num_gpus=2 if arm is Arm.SPECULATIVE else 1) for arm, facts in FAIR.servers.items()}),
        "computes on 1 GPU and that of the speculative arm on 2",
    ),
    "too many errors": (with_records(with_error_in("qa-3")), "the stream was cut"),
}  # fmt: skip


def test_the_fair_comparison_is_fair() -> None:
    assert judge(FAIR, None, OPTIONS).verdict is Verdict.PASS


@pytest.mark.parametrize("name", UNFAIR)
def test_unfair_comparison_is_invalid_and_says_why(name: str) -> None:
    measurement, words = UNFAIR[name]
    judgement = judge(measurement, None, OPTIONS)
    assert judgement.verdict is Verdict.INVALID
    assert words in judgement.reasons[0]


def test_random_token_prompts_are_invalid() -> None:
    noise = tuple(Prompt(str(n), "qa", (" ".join(f"w{(n * 997 + k * 31) % 10007:x}x{k:o}y" for k in range(300)),)) for n in range(20))
    letters = str.maketrans("0123456789", "ghijklmnop")
    noise = tuple(replace(prompt, turns=(prompt.turns[0].translate(letters),)) for prompt in noise)
    judgement = judge(FAIR, None, replace(OPTIONS, prompts=noise))
    assert judgement.verdict is Verdict.INVALID
    assert "look like random tokens" in judgement.reasons[0]


def test_a_precision_that_nobody_tells_is_said_not_to_be_known() -> None:
    """Of two servers; one alone is like itself."""
    silent_one = with_dtype(None)
    facts = silent_one.servers[Arm.SPECULATIVE]
    two = {**silent_one.servers, Arm.SPECULATIVE: replace(facts, base_url="http://another")}
    words = "the precision is not known of the server of the speculative arm"
    for servers, is_said in ((two, True), (silent_one.servers, False), (FAIR.servers, False)):
        judgement = judge(replace(FAIR, servers=servers), None, OPTIONS)
        assert judgement.verdict is Verdict.PASS
        assert any(words in reason for reason in judgement.reasons) is is_said


def test_prompts_in_several_blocks_are_said_to_be() -> None:
    assert not any("several blocks" in reason for reason in judge(FAIR, None, OPTIONS).reasons)
    (first, again) = (next(record.question_id for record in FAIR.records if record.block == block) for block in (0, 1))
    repeated = tuple(replace(record, question_id=first) if record.question_id == again else record for record in FAIR.records)
    (reason,) = [reason for reason in judge(replace(FAIR, records=repeated), None, OPTIONS).reasons if "several blocks" in reason]
    assert reason.startswith("at concurrency 1, 1 of 31 prompts stand in several blocks")


@pytest.mark.parametrize(
    "measurement",
    [
        with_dtype(None),  # nobody said
        with_counters(1.005),
        with_records(lambda record: replace(record, num_cached_tokens=1)),
        with_records(lambda record: replace(record, num_prompt_tokens=101)),
        later_turns_with_prompts_of(150, is_replayed=False),  # the arms' own answers stand in them
        silent(with_records(lambda record: replace(record, num_output_tokens=42, acceptance=None, chunk_tokens=()))),
    ],
)
def test_what_lies_within_the_bounds_is_fair(measurement: Measurement) -> None:
    assert judge(measurement, None, OPTIONS).verdict is Verdict.PASS


def test_a_single_error_among_very_many_requests_only_leaves_its_block_out() -> None:
    measurement = with_records(with_error_in("qa-3"))
    judgement = judge(measurement, None, replace(OPTIONS, max_error_rate=0.05))
    assert judgement.verdict is Verdict.PASS
    assert any("1 of 8 blocks were not whole" in reason for reason in judgement.reasons)
