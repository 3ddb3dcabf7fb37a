"""Where and how a proof was measured, as the report and the JSON hold it. What a server does not say of itself is None, never a guess."""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from paceline import __version__
from paceline.prove.datasets.prompt import Dataset
from paceline.prove.plan import Measurement, Plan, ServerFacts
from paceline.prove.record import Arm

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_SECRET_FLAGS = ("--api-key",)
# What a server may call these on its routes; the first name found counts.
_NAMES = {
    "torch": ("torch",),
    "device": ("device",),
    "driver": ("driver", "cuda", "driver_version"),
    "model_sha256": ("model_sha256",),
    "draft": ("drafter", "draft", "speculative_draft_model_path"),
    "draft_sha256": ("draft_sha256",),
    "verification": ("verification",),
}
_SHOWN = {"id", "lossless", "dtype", "version", *(key for keys in _NAMES.values() for key in keys)}


def environment(plan: Plan, measurement: Measurement, command: Sequence[str]) -> dict[str, object]:
    """The environment of a finished measurement; the fixed keys are there even where nothing is known."""
    facts = measurement.servers[Arm.SPECULATIVE] if Arm.SPECULATIVE in measurement.servers else next(iter(measurement.servers.values()))
    told: dict[str, object] = {
        name: next((facts.facts[key] for key in keys if facts.facts.get(key) is not None), None) for name, keys in _NAMES.items()
    }
    is_local = is_on_this_machine(facts.base_url)
    return {
        "model": facts.model,
        "server": _server(facts),
        "baseline": _baseline(plan, measurement),
        "paceline": __version__,
        **told,
        "dtype": facts.dtype,
        "lossless": facts.is_lossless,
        "draft_length": _draft_lengths(measurement),
        "cpu": cpu_text() if is_local else None,
        "measured_from": "the server's own machine" if is_local else f"{cpu_text()}, over the network",
        "python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seeds": {"measurement": plan.seed},
        "settings": {
            "concurrency": [*plan.concurrencies, *(f"{rate:g} arrivals/s" for rate in plan.rates_per_s)],
            "max_tokens": plan.max_tokens,
            "temperature": plan.temperature,
            "blocks": plan.num_blocks,
            "replay": plan.replay.value,
        },
        "dataset": dataset_entry(plan.dataset),
        "gpus": {arm.value: facts.num_gpus for arm, facts in measurement.servers.items()},
        "replay": measurement.replay_why or "nothing called for it",
        "lateness_of_measuring_process_p99_ms": measurement.loop_lag_p99_ms,
        "server_says": {key: value for key, value in facts.facts.items() if key not in _SHOWN},
        "command": command_text(command),
        "warnings": list(measurement.warnings),
    }


def dataset_entry(dataset: Dataset) -> dict[str, object]:
    return {
        "label": dataset.label,
        "split": dataset.split,
        "num_prompts": len(dataset.prompts),
        "num_requests": sum(len(prompt.turns) for prompt in dataset.prompts),
        "sha256": dataset.sha256,
    }


def _server(facts: ServerFacts) -> str:
    return f"{facts.kind}{f' {facts.version}' if facts.version else ''} at {facts.base_url}"


def _baseline(plan: Plan, measurement: Measurement) -> str:
    if plan.baseline_url is None:
        return "the same server, each request with max_draft_length 0"
    facts = measurement.servers.get(Arm.BASELINE)
    return _server(facts) if facts else plan.baseline_url


def _draft_lengths(measurement: Measurement) -> dict[str, object]:
    return {
        f"concurrency {concurrency}" if concurrency else "open loop": "the server's choice" if length is None else length
        for concurrency, length in sorted(measurement.draft_lengths.items())
    }


def is_on_this_machine(url: str) -> bool:
    return urlsplit(url).hostname in _LOCAL_HOSTS


def cpu_text(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Model and cores that this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:  # not Linux
        pass
    return f"{name}, {num_cores()} of {os.cpu_count()} logical cores"


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def command_text(arguments: Sequence[str]) -> str:
    """The command line again, without a key that stands in it."""
    words: list[str] = []
    hides_next = False
    for word in arguments:
        flag, equals, _ = word.partition("=")
        is_secret = flag.replace("_", "-") in _SECRET_FLAGS
        words.append("..." if hides_next else f"{flag}=..." if is_secret and equals else word)
        hides_next = is_secret and not equals and not hides_next
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    return shlex.quote(word) if word != "..." and not word.endswith("=...") else word


def own_command() -> list[str]:
    """How this process was called, with the program's name instead of its path."""
    return [Path(sys.argv[0]).name if sys.argv else "paceline", *sys.argv[1:]]
