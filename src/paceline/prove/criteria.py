"""Thresholds of a YAML file, and what was measured held against them. For `verdict.py`; `criteria/` beside this file holds those shipped.

    name: source
    description: what the thresholds are for
    criteria:
      - {name: first token, metric: ttft_ms, statistic: p95, at_most: 500}

A criterion holds at every concurrency measured (`concurrency: each`, the worst counts), at the highest, or at one given by its number. What
could not be measured has no value and is neither passed nor failed; a required one then keeps the verdict from PASS.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

import yaml

from paceline.errors import BadInputError
from paceline.prove.judgement import JudgeOptions
from paceline.prove.record import Arm, Phase, RequestRecord
from paceline.prove.results import OVERALL, ArmSummary, Criterion, Percentiles, Speedup

MAX_FILE_BYTES = 1 << 20
SHIPPED = ("cpu", "source")
_STATISTICS = ("p50", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Rule:
    """One threshold. Exactly one of `at_most` and `at_least` is set."""

    name: str
    metric: str
    statistic: str | None = None  # p50, p95 or p99, for times
    at_most: float | None = None
    at_least: float | None = None
    arm: Arm = Arm.SPECULATIVE
    concurrency: str | int = "each"  # each, highest, or a number
    min_prompt_tokens: float = 0.0  # mean of the run; below, it was not measured under the stated conditions
    min_output_tokens: float = 0.0
    required: bool = True


@dataclass(frozen=True, slots=True)
class Criteria:
    name: str
    description: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What criteria are held against."""

    arms: Sequence[ArmSummary]
    speedup: Sequence[Speedup]
    records: Sequence[RequestRecord]
    model: str
    options: JudgeOptions


@dataclass(frozen=True, slots=True)
class _Metric:
    unit: str
    is_time: bool
    read: Callable[[ArmSummary, Rule], float | None]


def _time(pick: Callable[[ArmSummary], Percentiles | None]) -> Callable[[ArmSummary, Rule], float | None]:
    def read(summary: ArmSummary, rule: Rule) -> float | None:
        times = pick(summary)
        return None if times is None else {"p50": times.p50, "p95": times.p95, "p99": times.p99}[rule.statistic or "p95"]

    return read


_OF_ARM: dict[str, _Metric] = {
    "ttft_ms": _Metric("ms", True, _time(lambda summary: summary.ttft_ms)),
    "tpot_ms": _Metric("ms", True, _time(lambda summary: summary.tpot_ms)),
    "itl_ms": _Metric("ms", True, _time(lambda summary: summary.itl_ms)),
    "e2e_ms": _Metric("ms", True, _time(lambda summary: summary.e2e_ms)),
    "user_tps": _Metric("tokens/s", False, lambda summary, _: summary.user_tps),
    "output_tps": _Metric("tokens/s", False, lambda summary, _: summary.output_tps),
    "requests_per_s": _Metric("requests/s", False, lambda summary, _: summary.requests_per_s),
    "goodput": _Metric("of requests", False, lambda summary, _: summary.goodput),
    "acceptance_length": _Metric(
        "tokens", False, lambda summary, _: None if summary.acceptance_length is None else summary.acceptance_length.token_weighted
    ),
}
_OF_RUN = {"error_rate": "of requests", "speedup": "x", "gpu_utilisation_percent": "%", "bandwidth_fraction": "of the bandwidth"}
METRICS = (*_OF_ARM, *_OF_RUN)


def load_criteria(source: str | Path) -> Criteria:
    """Thresholds by name (`cpu`, `source`) or from a file. Raises BadInputError naming the file, what is wrong in it and what is right."""
    if isinstance(source, str) and source in SHIPPED:
        source = Path(__file__).with_name("criteria") / f"{source}.yaml"
    path = Path(source)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadInputError(f"{path} has more than {MAX_FILE_BYTES:,} bytes; a file of criteria has a few hundred")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read criteria from {path}: {error}. Give a YAML file, or one of {', '.join(SHIPPED)}") from error
    return parse_criteria(text, str(path))


def parse_criteria(text: str, file: str) -> Criteria:
    """The same from text; `file` names it in errors."""
    try:
        loaded: object = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise BadInputError(f"{file} is no YAML: {error}") from error
    top = _mapping(loaded, file, ("name", "description", "criteria"))
    entries = top.get("criteria")
    if not isinstance(entries, list) or not entries:
        raise BadInputError(
            f"{file}: `criteria` must be a list of at least one threshold, such as {{name: first token, metric: ttft_ms, ...}}"
        )
    rules = tuple(_rule(entry, f"{file}, criterion {number}") for number, entry in enumerate(cast("list[object]", entries), start=1))
    if len({rule.name for rule in rules}) != len(rules):
        raise BadInputError(f"{file}: two criteria have the same name; rename one")
    return Criteria(_text(top.get("name"), f"{file}: `name`"), _text(top.get("description", ""), f"{file}: `description`"), rules)


def evaluate(criteria: Criteria, evidence: Evidence) -> tuple[Criterion, ...]:
    """Each rule against the evidence, in the order of the file."""
    return tuple(_evaluate(rule, evidence) for rule in criteria.rules)


def _evaluate(rule: Rule, evidence: Evidence) -> Criterion:
    value, note = _of_run(rule, evidence) if rule.metric in _OF_RUN else _of_arm(rule, evidence)
    unit = _OF_RUN[rule.metric] if rule.metric in _OF_RUN else _OF_ARM[rule.metric].unit
    threshold = f"<= {rule.at_most:g} {unit}" if rule.at_most is not None else f">= {rule.at_least:g} {unit}"
    if rule.statistic:
        threshold = f"{rule.statistic} {threshold}"
    return Criterion(rule.name, f"{threshold} ({note})" if note else threshold, value, None if value is None else bool(_holds(rule, value)))


def _holds(rule: Rule, value: float) -> bool:
    return value <= rule.at_most if rule.at_most is not None else rule.at_least is not None and value >= rule.at_least


def _of_arm(rule: Rule, evidence: Evidence) -> tuple[float | None, str]:
    mine = [summary for summary in evidence.arms if summary.arm is rule.arm and summary.category == OVERALL]
    if isinstance(rule.concurrency, int):
        mine = [summary for summary in mine if summary.concurrency == rule.concurrency]
        if not mine:
            return None, f"concurrency {rule.concurrency} was not measured"
    elif rule.concurrency == "highest":
        mine = mine[-1:]  # summaries are in ascending order
    if not mine:
        return None, f"the {rule.arm} arm was not measured"
    at = ", ".join(_point_name(summary) for summary in mine)
    conditions, is_as_stated = _conditions(rule, evidence, {(summary.concurrency, summary.rate_per_s) for summary in mine})
    if not is_as_stated:
        return None, f"{conditions}; not measured under the stated lengths"
    values = [_OF_ARM[rule.metric].read(summary, rule) for summary in mine]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None, f"at {at}: could not be measured"
    worst = max(known) if rule.at_most is not None else min(known)
    return worst, f"{conditions}, at {at}"


def _point_name(summary: ArmSummary) -> str:
    return f"concurrency {summary.concurrency}" if summary.concurrency else f"{summary.rate_per_s:g} arrivals/s"


def _conditions(rule: Rule, evidence: Evidence, points: set[tuple[int, float]]) -> tuple[str, bool]:
    """The model and mean lengths that a figure holds for, and whether they are what the rule asks."""
    mine = [
        record
        for record in evidence.records
        if record.arm is rule.arm
        and record.phase is Phase.MEASURE
        and record.error is None
        and (record.concurrency, record.rate_per_s) in points
    ]
    if not mine:
        return f"{evidence.model}, no whole answer", False
    prompt = sum(record.num_prompt_tokens for record in mine) / len(mine)
    output = sum(record.num_output_tokens for record in mine) / len(mine)
    words = f"{evidence.model}, {prompt:.0f} prompt and {output:.0f} output tokens on average"
    return words, prompt >= rule.min_prompt_tokens and output >= rule.min_output_tokens


def _of_run(rule: Rule, evidence: Evidence) -> tuple[float | None, str]:
    if rule.metric == "error_rate":
        mine = [record for record in evidence.records if record.arm is rule.arm and record.phase is Phase.MEASURE]
        num_failed = sum(record.error is not None for record in mine)
        counted = f"{num_failed} of {len(mine)} requests, cut streams and wrong finish reasons counted"
        return (num_failed / len(mine) if mine else None), counted
    if rule.metric == "speedup":
        ratios = [each.ratio for each in evidence.speedup if each.category == OVERALL]
        return (min(ratios) if rule.at_most is None else max(ratios)) if ratios else None, "of the mix"
    told = evidence.options.utilisation.get(rule.arm)
    if rule.metric == "bandwidth_fraction":
        if told is None or told.bandwidth_fraction is None:
            return None, "no counter of the bandwidth could be read here"
        return told.bandwidth_fraction, f"beside {told.percent:.0f} % by {told.counter}"
    if told is None or told.device != "gpu":
        return None, "no counter of a GPU could be read here"
    bandwidth = "not known" if told.bandwidth_fraction is None else f"{told.bandwidth_fraction:.0%}"
    return told.percent, f"by {told.counter}; memory bandwidth used: {bandwidth}"


def _rule(entry: object, where: str) -> Rule:
    given = _mapping(entry, where, tuple(field.name for field in fields(Rule)))
    metric = _choice(given.get("metric"), METRICS, f"{where}: `metric`")
    is_time = metric in _OF_ARM and _OF_ARM[metric].is_time
    statistic = _choice(given.get("statistic", "p95"), _STATISTICS, f"{where}: `statistic`") if is_time else None
    if not is_time and "statistic" in given:
        raise BadInputError(f"{where}: `statistic` is for times only, and {metric} is none; remove it")
    if ("at_most" in given) == ("at_least" in given):
        raise BadInputError(f"{where}: give one of `at_most` and `at_least`")
    required = given.get("required", True)
    if not isinstance(required, bool):
        raise BadInputError(f"{where}: `required` is {required!r}; write true or false")
    return Rule(
        name=_text(given.get("name"), f"{where}: `name`"),
        metric=metric,
        statistic=statistic,
        at_most=_number(given["at_most"], f"{where}: `at_most`") if "at_most" in given else None,
        at_least=_number(given["at_least"], f"{where}: `at_least`") if "at_least" in given else None,
        arm=Arm(_choice(given.get("arm", Arm.SPECULATIVE.value), tuple(arm.value for arm in Arm), f"{where}: `arm`")),
        concurrency=_concurrency(given.get("concurrency", "each"), f"{where}: `concurrency`"),
        min_prompt_tokens=_number(given.get("min_prompt_tokens", 0), f"{where}: `min_prompt_tokens`"),
        min_output_tokens=_number(given.get("min_output_tokens", 0), f"{where}: `min_output_tokens`"),
        required=required,
    )


def _mapping(value: object, where: str, allowed: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise BadInputError(f"{where}: expected keys and values, found {type(value).__name__}; allowed keys: {', '.join(allowed)}")
    given = {str(key): item for key, item in cast("dict[object, object]", value).items()}
    unknown = sorted(given.keys() - set(allowed))
    if unknown:
        raise BadInputError(f"{where}: unknown key {unknown[0]!r}; allowed: {', '.join(allowed)}")
    return given


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise BadInputError(f"{where} is {value!r}; write a text")
    return value


def _choice(value: object, allowed: tuple[str, ...], where: str) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise BadInputError(f"{where} is {value!r}; allowed: {', '.join(allowed)}")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise BadInputError(f"{where} is {value!r}; write a number of 0 or more")
    return float(value)


def _concurrency(value: object, where: str) -> str | int:
    if value in ("each", "highest"):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInputError(f"{where} is {value!r}; write each, highest, or a number of at least 1")
    return value
