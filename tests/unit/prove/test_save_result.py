"""The files of the two other harnesses, against figures known by construction."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.prove.record import Acceptance, Arm, Phase
from paceline.prove.save_result import save_result, speed_bench_acceptance, speed_bench_timing, vllm_result
from tests.fakes.made_records import NUM_TOKENS, STEP_S, TTFT_S, made_dataset, made_measurement

DATASET = made_dataset()
MEASUREMENT = made_measurement(DATASET)


def records(arm: Arm) -> list:
    return [record for record in MEASUREMENT.records if record.arm == arm]


def test_the_files_of_each_arm_and_point(tmp_path: Path) -> None:
    written = save_result(tmp_path, MEASUREMENT, DATASET, {"cpu": "some"})
    names = sorted(str(path.relative_to(tmp_path)) for path in written)
    assert [name for name in names if "/" not in name] == [
        "openai-chat-infqps-concurrency1-toy-baseline.json",
        "openai-chat-infqps-concurrency1-toy-speculative.json",
    ]
    files = ["acceptance_rate.json", "configuration.json", "specbench_responses.jsonl", "specbench_results.json", "timing.json"]
    for arm in Arm:
        folder = tmp_path / "speed-bench" / f"{arm}-concurrency1"
        assert sorted(path.name for path in folder.iterdir()) == files
        (timing,) = json.loads((folder / "timing.json").read_text())
        assert "Output TPS/gpu" in timing
        lines = [json.loads(line) for line in (folder / "specbench_responses.jsonl").read_text().splitlines()]
        assert [line["question_id"] for line in lines] == [prompt.question_id for prompt in DATASET.prompts]
        assert [len(line["choices"][0]["turns"]) for line in lines] == [len(prompt.turns) for prompt in DATASET.prompts]
        assert json.loads((folder / "configuration.json").read_text())["dataset_sha256"] == DATASET.sha256


def test_vllms_keys_hold_what_was_measured() -> None:
    result = vllm_result(records(Arm.SPECULATIVE), 50.0, "toy")
    assert result["completed"] == result["num_prompts"] == 24
    assert result["total_output_tokens"] == 24 * NUM_TOKENS
    assert result["output_throughput"] == pytest.approx(24 * NUM_TOKENS / 50)
    assert result["median_ttft_ms"] == pytest.approx(TTFT_S * 1e3)
    assert result["p99_tpot_ms"] == pytest.approx(STEP_S[Arm.SPECULATIVE] * 1e3 / 2)
    assert result["mean_itl_ms"] == pytest.approx(STEP_S[Arm.SPECULATIVE] * 1e3)
    assert result["mean_e2el_ms"] == pytest.approx(TTFT_S * 1e3 + 20 * 25)
    assert result["spec_decode_acceptance_length"] == 2.0
    assert result["spec_decode_acceptance_rate"] == 50.0
    assert result["spec_decode_per_position_acceptance_rates"] == [1.0, 0.0]
    assert not any(key.startswith("spec_decode") for key in vllm_result(records(Arm.BASELINE), 50.0, "toy"))


def test_throughput_per_gpu_is_one_key_more(tmp_path: Path) -> None:
    result = vllm_result(records(Arm.SPECULATIVE), 50.0, "toy", num_gpus=2)
    assert result["output_throughput_per_gpu"] == pytest.approx(result["output_throughput"] / 2)
    assert "output_throughput_per_gpu" not in vllm_result(records(Arm.SPECULATIVE), 50.0, "toy")
    servers = {arm: replace(facts, num_gpus=2) for arm, facts in MEASUREMENT.servers.items()}
    save_result(tmp_path, replace(MEASUREMENT, servers=servers), DATASET, {})
    written = json.loads((tmp_path / "openai-chat-infqps-concurrency1-toy-baseline.json").read_text())
    timing = json.loads((tmp_path / "speed-bench/speculative-concurrency1/timing.json").read_text())[0]
    assert float(timing["Output TPS/gpu"]) == pytest.approx(float(timing["Output TPS"]) / 2, abs=1e-4)
    assert written["output_throughput_per_gpu"] == pytest.approx(written["output_throughput"] / 2)


def test_an_answer_that_failed_counts_as_failed_and_in_no_time() -> None:
    found = records(Arm.BASELINE)
    broken = replace(found[0], error="cut", chunk_times_s=(found[0].sent_s + 99.0,), num_output_tokens=5)
    silent = replace(found[1], error="HTTP 503", chunk_times_s=(), num_output_tokens=0)
    result = vllm_result([broken, silent, *found[2:]], 50.0, "toy")
    assert (result["completed"], result["failed"]) == (22, 2)
    assert result["p99_ttft_ms"] == pytest.approx(TTFT_S * 1e3)
    assert result["errors"][:2] == ["cut", "HTTP 503"]
    assert len(result["ttfts"]) == len(result["itls"]) == 24


def test_warm_up_is_in_no_file(tmp_path: Path) -> None:
    warm = tuple(replace(record, phase=Phase.WARM_UP, num_output_tokens=10**6) for record in MEASUREMENT.records[:4])
    save_result(tmp_path, replace(MEASUREMENT, records=warm + MEASUREMENT.records), DATASET, {})
    result = json.loads((tmp_path / "openai-chat-infqps-concurrency1-toy-baseline.json").read_text())
    assert result["total_output_tokens"] == 24 * NUM_TOKENS


def test_speed_benchs_acceptance_is_the_mean_of_questions_and_not_of_tokens() -> None:
    first, second, other = (replace(record, turn=turn) for turn, record in enumerate(records(Arm.SPECULATIVE)[:3]))
    first = replace(first, question_id="a", category="coding", acceptance=Acceptance(10, 30, 30, (0, 0, 0, 10)))
    second = replace(second, question_id="a", category="coding", acceptance=Acceptance(30, 90, 30, (20, 0, 0, 10)))
    other = replace(other, question_id="b", category="qa", acceptance=Acceptance(5, 15, 0, (5, 0, 0, 0)))
    result = speed_bench_acceptance([first, second, other])
    assert result["Request_AL"] == {"a": 2.5, "b": 1.0}
    assert result["Category_AL"] == {"coding": 2.5, "qa": 1.0}
    assert result["Average_AL"] == 1.75
    assert result["Acceptance_Length_Histogram"] == {"1": 25, "2": 0, "3": 0, "4": 20}
    assert result["Conditional_Acceptance_Rate"] == {"1": 1.0, "2": 20 / 45, "3": 1.0, "4": 1.0}  # no gap where no step had that length
    joint = result["Joint_Acceptance_Rate"]
    assert sum(joint.values()) == pytest.approx(1 + 60 / 45), "the joint rates add up to the pooled acceptance length"


def test_without_any_count_acceptance_is_empty_and_not_invented() -> None:
    result = speed_bench_acceptance(records(Arm.BASELINE))
    assert result["Average_AL"] is None
    assert result["Request_AL"] == {}


def test_speed_benchs_timing_leaves_the_first_wait_out_of_steps() -> None:
    timing = speed_bench_timing(records(Arm.BASELINE), 24 * NUM_TOKENS / 40.0)
    assert timing["Output TPS"] == "40.0000"
    assert timing["TTFT Time"]["mean"] == "0.1000"
    assert timing["Request Generation Step Time"]["max"] == "0.0200"
    assert timing["Request Generation Tokens Per Second"]["quantiles"]["0.5"] == "50.0000"
    assert timing["Number of Output Tokens"]["min"] == f"{NUM_TOKENS}.0000"
