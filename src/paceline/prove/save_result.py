"""`--save-result DIR`: the same measurement in the files of two other harnesses, for tools that read those.

`vllm bench serve`: one JSON per arm and point, with its keys. SPEED-Bench's own harness: one folder per arm and point, with its file
names and keys. Figures are computed as there where that is sound: a first token is no verification, and its wait is no step.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.prove.datasets.prompt import Dataset
from paceline.prove.plan import Measurement
from paceline.prove.record import Acceptance, Arm, Phase, RequestRecord

Json = dict[str, Any]


def save_result(folder: Path, measurement: Measurement, dataset: Dataset, environment: Mapping[str, object]) -> list[Path]:
    """Write all files below `folder` and return their paths; files of the same names are replaced. Raises OSError."""
    written: list[Path] = []
    for arm, concurrency, rate in _points(measurement.records):
        records = [
            record
            for record in measurement.records
            if record.phase == Phase.MEASURE and (record.arm, record.concurrency, record.rate_per_s) == (arm, concurrency, rate)
        ]
        runs = [run for run in measurement.runs if run.phase == Phase.MEASURE]
        wall_s = sum(run.end_s - run.start_s for run in runs if (run.arm, run.concurrency, run.rate_per_s) == (arm, concurrency, rate))
        model, num_gpus = measurement.servers[arm].model, measurement.servers[arm].num_gpus
        name = f"openai-chat-{rate or 'inf'}qps-concurrency{concurrency}-{Path(model).name}-{arm}"
        written.append(_write(folder / f"{name}.json", [vllm_result(records, wall_s, model, num_gpus)]))
        place = folder / "speed-bench" / (f"{arm}-rate{rate}" if rate else f"{arm}-concurrency{concurrency}")
        for file, lines in speed_bench_files(records, wall_s, dataset, environment, num_gpus).items():
            written.append(_write(place / file, lines))
    return written


def _points(records: Iterable[RequestRecord]) -> list[tuple[Arm, int, float]]:
    return sorted({(record.arm, record.concurrency, record.rate_per_s) for record in records if record.phase == Phase.MEASURE})


def _write(path: Path, lines: Sequence[Json | list[Json]]) -> Path:
    """A .jsonl has a line for each entry, a .json is the only one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    else:
        (content,) = lines
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    return path


def vllm_result(records: Sequence[RequestRecord], wall_s: float, model: str, num_gpus: int | None = None) -> Json:
    """One point of one arm under the keys of `vllm bench serve --save-result --save-detailed`. `wall_s`: of its blocks together.

    With `num_gpus`, those of the server, one key more: output_throughput_per_gpu.
    """
    whole = [record for record in records if record.error is None and record.chunk_times_s]
    num_in, num_out = sum(one.num_prompt_tokens for one in whole), sum(one.num_output_tokens for one in whole)
    ttfts_s = [record.chunk_times_s[0] - record.sent_s for record in whole]
    e2els_s = [record.end_s - record.sent_s for record in whole]
    tpots_s = [
        (record.chunk_times_s[-1] - record.chunk_times_s[0]) / (record.num_output_tokens - 1)
        for record in whole
        if record.num_output_tokens > 1
    ]
    gaps_s = [_gaps_s(record) for record in records]
    result: Json = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": records[0].arm.value,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(records),
        "request_rate": records[0].rate_per_s or "inf",
        "burstiness": 1.0,
        "max_concurrency": records[0].concurrency or None,
        "duration": wall_s,
        "completed": len(whole),
        "failed": len(records) - len(whole),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": _rate(len(whole), wall_s),
        "output_throughput": _rate(num_out, wall_s),
        "total_token_throughput": _rate(num_in + num_out, wall_s),
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "ttfts": [record.chunk_times_s[0] - record.sent_s if record.chunk_times_s else 0.0 for record in records],
        "itls": gaps_s,
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }
    if num_gpus and (throughput := _rate(num_out, wall_s)) is not None:
        result["output_throughput_per_gpu"] = throughput / num_gpus
    flat_gaps_s = [gap for gaps in gaps_s for gap in gaps]
    for name, values_s in (("ttft", ttfts_s), ("tpot", tpots_s), ("itl", flat_gaps_s), ("e2el", e2els_s)):
        result |= _milliseconds(name, values_s)
    return result | _vllm_acceptance([record.acceptance for record in whole if record.acceptance is not None])


def _gaps_s(record: RequestRecord) -> list[float]:
    return [after - before for before, after in pairwise(record.chunk_times_s)]


def _rate(num: int, wall_s: float) -> float | None:
    return num / wall_s if wall_s > 0 else None


def _milliseconds(name: str, values_s: Sequence[float]) -> Json:
    if not values_s:
        return {}
    values_ms = np.array(values_s) * 1e3
    shares = {f"p{share}_{name}_ms": float(np.percentile(values_ms, share)) for share in (50, 90, 95, 99)}
    centre = {f"mean_{name}_ms": float(values_ms.mean()), f"median_{name}_ms": float(np.median(values_ms))}
    return centre | {f"std_{name}_ms": float(values_ms.std())} | shares


def _vllm_acceptance(found: Sequence[Acceptance]) -> Json:
    num_steps = sum(one.num_spec_steps for one in found)
    num_drafted, num_accepted = sum(one.num_draft_tokens for one in found), sum(one.num_accepted_draft_tokens for one in found)
    if not num_steps or not num_drafted:
        return {}
    histogram = pooled_histogram(found)
    return {
        "spec_decode_acceptance_rate": 100 * num_accepted / num_drafted,
        "spec_decode_acceptance_length": 1 + num_accepted / num_steps,
        "spec_decode_num_drafts": num_steps,
        "spec_decode_draft_tokens": num_drafted,
        "spec_decode_accepted_tokens": num_accepted,
        # unconditional: the share of steps that accepted the draft at each position
        "spec_decode_per_position_acceptance_rates": [sum(histogram[place:]) / num_steps for place in range(1, len(histogram))],
    }


def pooled_histogram(found: Iterable[Acceptance]) -> list[int]:
    """Steps by the number of drafts that they accepted, over all requests."""
    counts: Counter[int] = Counter()
    for one in found:
        counts.update(dict(enumerate(one.histogram)))
    return [counts[place] for place in range(max(counts, default=-1) + 1)]


def speed_bench_files(
    records: Sequence[RequestRecord], wall_s: float, dataset: Dataset, environment: Mapping[str, object], num_gpus: int | None = None
) -> dict[str, Sequence[Json | list[Json]]]:
    """One point of one arm as the files of SPEED-Bench's harness, by name; the JSON lists hold one run."""
    acceptance = speed_bench_acceptance(records)
    configuration = {
        "dataset": dataset.label,
        "dataset_sha256": dataset.sha256,
        "arm": records[0].arm.value,
        "concurrency": records[0].concurrency,
        "output_length": max(record.max_tokens for record in records),
        "acceptance": "per verification, from the server's count for each request; steps without a draft and first tokens left out",
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "serving_config": dict(environment),
    }
    return {
        "configuration.json": [configuration],
        "timing.json": [[speed_bench_timing(records, wall_s, num_gpus)]],
        "acceptance_rate.json": [[acceptance]],
        "specbench_results.json": [acceptance],
        "specbench_responses.jsonl": _responses(records, dataset),
    }


def speed_bench_acceptance(records: Iterable[RequestRecord]) -> Json:
    """The object of acceptance_rate.json. A question's length is over all of its turns; Average_AL is the mean over questions."""
    by_question: dict[str, list[Acceptance]] = {}
    category_of: dict[str, str] = {}
    for record in records:
        if record.acceptance is not None and record.acceptance.num_spec_steps:
            by_question.setdefault(record.question_id, []).append(record.acceptance)
            category_of[record.question_id] = record.category
    lengths = {
        question: 1 + sum(one.num_accepted_draft_tokens for one in found) / sum(one.num_spec_steps for one in found)
        for question, found in by_question.items()
    }
    by_category: dict[str, list[float]] = {}
    for question, length in lengths.items():
        by_category.setdefault(category_of[question], []).append(length)
    histogram = pooled_histogram(one for found in by_question.values() for one in found)
    at_least = [sum(histogram[place:]) for place in range(len(histogram))]  # steps with this many drafts accepted, or more
    conditional = {"1": 1.0} if histogram else {}
    joint = dict(conditional)
    for place in range(1, len(histogram)):
        if at_least[place - 1]:
            conditional[str(place + 1)] = at_least[place] / at_least[place - 1]
            joint[str(place + 1)] = at_least[place] / at_least[0]
    return {
        "Request_AL": lengths,
        "Category_AL": {name: float(np.mean(found)) for name, found in sorted(by_category.items())},
        "Average_AL": float(np.mean(list(lengths.values()))) if lengths else None,
        "Acceptance_Length_Histogram": {str(place + 1): num for place, num in enumerate(histogram)},
        "Conditional_Acceptance_Rate": conditional,
        "Joint_Acceptance_Rate": joint,
    }


def speed_bench_timing(records: Sequence[RequestRecord], wall_s: float, num_gpus: int | None = None) -> Json:
    """The object of timing.json: seconds, and rates per second; statistics as text with four decimals, as the harness prints them.

    Where nobody says how many GPUs there are, the rate per GPU is that of one.
    """
    whole = [record for record in records if record.error is None and record.chunk_times_s]
    num_tokens = sum(record.num_output_tokens for record in whole)
    spans = [(record, record.chunk_times_s[-1] - record.chunk_times_s[0]) for record in whole if len(record.chunk_times_s) > 2]
    throughput = num_tokens / wall_s if wall_s > 0 else None
    return {
        "Output TPS": None if throughput is None else _text(throughput),
        "Output TPS/gpu": None if throughput is None else _text(throughput / (num_gpus or 1)),
        "E2E Request Time": _statistics([record.chunk_times_s[-1] - record.sent_s for record in whole]),
        "TTFT Time": _statistics([record.chunk_times_s[0] - record.sent_s for record in whole]),
        "Request Generation Step Time": _statistics([gap for record in whole for gap in _gaps_s(record)]),
        "Request Generation Tokens Per Second": _statistics([(one.num_output_tokens - 1) / span_s for one, span_s in spans if span_s > 0]),
        "Number of Output Tokens": _statistics([record.num_output_tokens for record in whole]),
    }


def _statistics(values: Sequence[float]) -> Json:
    if not values:
        return {}
    array = np.array(values, dtype=float)
    quantiles = {str(share): _text(float(np.quantile(array, share))) for share in (0.25, 0.5, 0.75)}
    figures = {"min": array.min(), "max": array.max(), "mean": array.mean(), "std": array.std()}
    return {name: _text(float(value)) for name, value in figures.items()} | {"quantiles": quantiles}


def _text(value: float) -> str:
    return f"{value:.4f}"


def _responses(records: Iterable[RequestRecord], dataset: Dataset) -> list[Json]:
    """One line per conversation, in the order of the data set; of several runs of one question the first."""
    answers: dict[str, dict[int, str]] = {}
    for record in records:
        answers.setdefault(record.question_id, {}).setdefault(record.turn, record.text)
    return [
        {
            "question_id": prompt.question_id,
            "category": prompt.category,
            "turns": list(prompt.turns),
            "choices": [{"index": 0, "turns": [text for _, text in sorted(answers[prompt.question_id].items())]}],
        }
        for prompt in dataset.prompts
        if prompt.question_id in answers
    ]
