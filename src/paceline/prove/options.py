"""What `paceline prove` can be asked, with its defaults: the command line's flags are made from these fields.

Kept apart from the server's settings, for the referee also ships alone. `plan_of` and the like turn them into what the parts take.
"""

# ruff: noqa: RUF009 - `_option` is a dataclass field

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from paceline.errors import BadInputError
from paceline.prove.certificate.options import CertifyOptions
from paceline.prove.datasets.prompt import Dataset
from paceline.prove.judgement import Objectives
from paceline.prove.plan import MIN_BLOCKS, Plan, ReplayMode
from paceline.prove.record import RecordedConversation

T = TypeVar("T")

QUICK_PROMPTS = 4  # requests per category
QUICK_TOKENS = 96
FULL_TOKENS = 256
QUICK_COMPARED = 6  # prompts whose answers the quick certificate compares
QUICK_COMPARED_TOKENS = 32
QUICK_SAMPLES = 60  # of each law test: the fewest with which every option still has tables to test
_QUICK_CONCURRENCY = (1, 4)
_FULL_CONCURRENCY = (1, 4, 16)
_MAX_POINTS = 64
_REPLAY_MODES = tuple(mode.value for mode in ReplayMode)
_OBJECTIVES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms", "e2el": "e2e_ms"}  # the last as in `vllm bench serve`
_MAX_OBJECTIVE_MS = 1e9


def _option(default: T, help: str) -> T:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class ProveConfig:
    """One proof. None where a default depends on other fields."""

    url: str | None = _option(None, "The server to measure, such as http://127.0.0.1:8000; one is started if not given.")
    baseline_url: str | None = _option(None, "A second server, without speculation, as the baseline; unset: the same server with K = 0.")
    model: str | None = _option(None, "The model to serve; with --url, which of the server's models to ask.")
    draft: str | None = _option(None, "The drafter of the server that is started.")
    api_key: str | None = _option(None, "The servers' API key.")
    data: str = _option("speed-bench-like", "The prompts: speed-bench-like, or a file or folder of SPEED-Bench, Spec-Bench or JSON lines.")
    split: str = _option("qualitative", "SPEED-Bench's split: qualitative, throughput_1k, _2k, _8k, _16k or _32k.")
    category: str | None = _option(None, "Only these categories, separated by commas.")
    num_prompts: int | None = _option(None, "Requests per category; unset: all, with --quick 4.")
    concurrency: str | None = _option(None, "Conversations in flight, separated by commas; unset: 1,4,16, with --quick 1,4.")
    rate: str | None = _option(None, "Also an open loop with so many arrivals per second; several, as in 1,2.5,4, one after the other.")
    draft_lengths: str = _option("auto", "K of the accelerated arm: auto is the server's own choice; of several, as in 1,3,5, the fastest.")
    max_tokens: int | None = _option(None, "Most tokens of an answer; unset: 256, with --quick 96.")
    temperature: float = _option(0.0, "Of every request; above 0 each has a seed, the same in both arms.")
    ignore_eos: bool = _option(False, "Answers of full length, where the server can do that.")
    replay: str = _option("auto", "Record once and replay in both arms: auto (where their answers differ), on, off, or raw records.")
    gpus: int | None = _option(None, "GPUs of a server that does not say so itself, for throughput per GPU.")
    num_blocks: int = _option(MIN_BLOCKS, "Blocks of prompts at each concurrency; the arms alternate by block.")
    seed: int = _option(0, "Of everything random in the measurement.")
    timeout: float = _option(600.0, "Seconds for one request.")
    quick: bool = _option(False, "The short proof on short prompts, with a small certificate: minutes on two cores.")
    certify: bool = _option(False, "Also check, at full size, that both arms give the same tokens, and the law of sampled ones.")
    criteria: str | None = _option(None, "Thresholds: cpu, source, or a YAML file; unset: cpu for a server that is started here.")
    goodput: str | None = _option(None, "What counts as goodput, in ms, such as ttft:500,tpot:50,e2e:5000; unset: ttft:500,tpot:200.")
    soak: str | None = _option(None, "Instead of a proof: traffic for so long (72h, 3m), watching for leaks.")
    json: Path | None = _option(None, "Write the proof as JSON.")
    html: Path | None = _option(None, "Write the proof as one HTML page.")
    save_result: Path | None = _option(None, "Write files as vllm bench serve and SPEED-Bench's harness do, into this folder.")
    records: Path | None = _option(None, "Where the raw records go; unset: beside --json, or into the current folder.")
    from_records: Path | None = _option(None, "Measure nothing: judge the raw records of an earlier measurement again.")


def check(config: ProveConfig) -> None:
    """Raise BadInputError for options that contradict each other."""
    measured_apart = ("url", "baseline_url", "model", "draft", "soak", "certify", "quick", "records")
    values = asdict(config)
    given = ["--" + name.replace("_", "-") for name in measured_apart if values[name]]
    if config.from_records is not None and given:
        raise BadInputError(f"--from-records measures nothing, so {', '.join(given)} has no effect; leave it out")
    if config.url is not None and config.draft is not None:
        raise BadInputError("--draft is for a server that is started here; with --url, start that server with the drafter")
    if config.baseline_url is not None and config.url is None:
        raise BadInputError("--baseline-url compares two servers that run; give --url as well")
    if config.soak is not None and (config.json or config.html or config.save_result or config.certify or config.quick):
        raise BadInputError("--soak is a run of its own: leave out --quick, --certify, --json, --html and --save-result")
    if config.replay not in _REPLAY_MODES and not Path(config.replay).is_file():
        raise BadInputError(
            f"--replay {config.replay[:200]} is none of {', '.join(_REPLAY_MODES)}, and no file of raw records (*.records.jsonl) either"
        )
    if config.rate is not None:
        rates("rate", config.rate)
    objectives_of(config)
    for name, path in (("json", config.json), ("html", config.html), ("records", config.records)):
        if path is not None and path.is_dir():
            raise BadInputError(f"--{name} {path} is a folder; name a file")
        if path is not None and not path.absolute().parent.is_dir():
            raise BadInputError(f"--{name} {path}: there is no folder {path.absolute().parent}; create it first")


def plan_of(config: ProveConfig, url: str, dataset: Dataset) -> Plan:
    """The measurement that is asked for. Raises BadInputError for values out of range."""
    concurrencies = _QUICK_CONCURRENCY if config.quick else _FULL_CONCURRENCY
    if config.concurrency is not None:
        concurrencies = whole_numbers("concurrency", config.concurrency)
    return Plan(
        base_url=url,
        dataset=dataset,
        baseline_url=config.baseline_url,
        model=config.model if config.url is not None else None,
        api_key=config.api_key,
        concurrencies=concurrencies,
        rates_per_s=() if config.rate is None else rates("rate", config.rate),
        num_blocks=config.num_blocks,
        max_tokens=config.max_tokens or (QUICK_TOKENS if config.quick else FULL_TOKENS),
        temperature=config.temperature,
        seed=config.seed,
        draft_lengths=() if config.draft_lengths == "auto" else whole_numbers("draft-lengths", config.draft_lengths),
        timeout_s=config.timeout,
        ignore_eos=config.ignore_eos,
        replay=ReplayMode(config.replay) if config.replay in _REPLAY_MODES else ReplayMode.ON,
        recording=_recording(config, dataset),
        num_gpus=config.gpus,
    )


def objectives_of(config: ProveConfig) -> Objectives | None:
    """What `--goodput` asks for: those that it names and no others; None if it is not given. Raises BadInputError."""
    if config.goodput is None:
        return None
    limits_ms: dict[str, float] = {}
    for part in config.goodput.replace(",", " ").split():
        name, _, text = part.partition(":")
        try:
            limit_ms = float(text)
        except ValueError:
            limit_ms = math.nan
        name = _OBJECTIVES.get(name, "")
        if not name or name in limits_ms or not 0 < limit_ms <= _MAX_OBJECTIVE_MS:
            raise BadInputError(
                f"--goodput {config.goodput[:80]}: {part[:40]!r} is no objective; give each of ttft, tpot and e2e at most once, with its "
                "milliseconds, such as ttft:500,tpot:50,e2e:5000"
            )
        limits_ms[name] = limit_ms
    if not limits_ms:
        raise BadInputError("--goodput names no objective; give some, such as ttft:500,tpot:50,e2e:5000")
    return Objectives(limits_ms.get("ttft_ms"), limits_ms.get("tpot_ms"), limits_ms.get("e2e_ms"))


def certify_options_of(config: ProveConfig) -> CertifyOptions:
    """Of full size if it was asked for by name."""
    options = CertifyOptions(
        baseline_url=config.baseline_url,
        model=config.model if config.url is not None else None,
        api_key=config.api_key,
        seed=config.seed,
        timeout_s=config.timeout,
    )
    if not config.quick or config.certify:
        return options
    return replace(options, num_prompts=QUICK_COMPARED, max_tokens=QUICK_COMPARED_TOKENS, num_samples=QUICK_SAMPLES)


def num_prompts_of(config: ProveConfig) -> int | None:
    """Requests per category; None for all."""
    return config.num_prompts if config.num_prompts is not None else QUICK_PROMPTS if config.quick else None


def _recording(config: ProveConfig, dataset: Dataset) -> tuple[RecordedConversation, ...]:
    if config.replay in _REPLAY_MODES:
        return ()
    from paceline.prove.replay import read_recording  # brings msgspec, which `--help` can do without

    return read_recording(Path(config.replay), dataset)


def rates(name: str, text: str) -> tuple[float, ...]:
    """`1,2.5,4` as numbers above 0, each once. Raises BadInputError."""
    parts = text.split(",")
    if len(parts) > _MAX_POINTS:
        raise BadInputError(f"--{name} has {len(parts)} values, limit {_MAX_POINTS}")
    try:
        found = tuple(dict.fromkeys(float(part) for part in parts))
    except ValueError:
        raise BadInputError(f"--{name} {text[:80]} is not a list of numbers such as 1,2.5,4") from None
    if not all(math.isfinite(value) and value > 0 for value in found):
        raise BadInputError(f"--{name} {text[:80]}: each must be above 0")
    return found


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """`1,4,16` as numbers, each once. Raises BadInputError."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > _MAX_POINTS:
        raise BadInputError(f"--{name} has {len(parts)} values, limit {_MAX_POINTS}")
    if not all(part.isdecimal() and part.isascii() and len(part) < 10 for part in parts):
        raise BadInputError(f"--{name} {text[:80]} is not a list of whole numbers such as 1,4,16")
    return tuple(dict.fromkeys(int(part) for part in parts))
