"""Step costs on disk, one small file per model, drafter, machine and version. A file that cannot be used is measured anew."""

import json
import logging
import os
import platform
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import cast

from paceline import __version__
from paceline.config import EngineConfig
from paceline.core.cache import cache_root
from paceline.core.facts import EngineFacts
from paceline.executor.step_kinds import Kind, Measured, Measurement

_log = logging.getLogger(__name__)

_FORMAT = 2
MAX_FILES = 64
_MAX_BYTES = 64 * 1024
_MAX_MEASUREMENTS = 256
_MAX_ROUNDS = 1000
_MAX_MS = 1e7


def cost_key(config: EngineConfig, facts: EngineFacts, runtime: str, threads: int) -> dict[str, str | int]:
    """All that step costs depend on; `runtime` is the version of what runs the model."""
    return {
        "format": _FORMAT,
        "paceline": __version__,
        "runtime": runtime,
        "machine": f"{platform.machine()} {_processor()}",
        "num_cpus": os.cpu_count() or 1,
        "threads": threads,
        "device": facts.device,
        "dtype": facts.dtype,
        "runner": next((f"{choice.implementation}: {choice.reason}" for choice in facts.choices if choice.name == "forward"), ""),
        "model": facts.model_name,
        "architecture": facts.architecture,
        "target_weight_bytes": facts.target_weight_bytes,
        "drafter": config.draft if facts.drafter == "draft_model" else facts.drafter,
        "drafter_weight_bytes": facts.drafter_weight_bytes,
        "max_draft_length": facts.max_draft_length,
        "page_size": facts.page_size,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:  # not Linux
        return platform.processor()


class CostCache:
    """The file of one key. Reading and writing never fail: what goes wrong is logged, and the costs are measured."""

    def __init__(self, key: dict[str, str | int], root: Path | None = None) -> None:
        self._key = key
        self._folder = (cache_root() if root is None else root) / "step-costs"
        self.path = self._folder / f"{sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"

    def read(self) -> Measured | None:
        """What was measured before, or None."""
        try:
            with self.path.open("rb") as file:
                text = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("step costs are measured anew: %s cannot be read (%s)", self.path, error.strerror)
            return None
        try:
            if len(text) > _MAX_BYTES:
                raise ValueError(f"more than {_MAX_BYTES:,} bytes")
            return _parsed(json.loads(text), self._key)
        except (ValueError, RecursionError) as error:
            _log.warning("step costs are measured anew: %s is not such a file (%s)", self.path, error)
            return None

    def write(self, measured: Measured) -> None:
        """Puts a file in its place at once, and removes the oldest ones beyond MAX_FILES."""
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(_fields(measured, self._key)) + "\n", encoding="utf-8")
            os.replace(temporary, self.path)
            files = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            for path in files[:-MAX_FILES]:
                path.unlink(missing_ok=True)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            _log.warning("step costs are not kept: %s cannot be written (%s)", self.path, error.strerror)


def _fields(measured: Measured, key: dict[str, str | int]) -> dict[str, object]:
    rows = [
        {
            "num_rows": done.kind.num_rows,
            "num_drafts": done.kind.num_drafts,
            "num_context_tokens": done.kind.num_context_tokens,
            "num_tokens": done.num_tokens,
            "target_ms": done.target_ms,
            "drafter_ms": done.drafter_ms,
        }
        for done in measured.measurements
    ]
    return {"key": key, "num_rounds": measured.num_rounds, "measurements": rows}


def _parsed(value: object, key: dict[str, str | int]) -> Measured:
    """Raises ValueError for anything but a file of this key."""
    if not isinstance(value, dict):
        raise ValueError("not an object")
    fields = cast(dict[str, object], value)
    if fields.get("key") != key:
        raise ValueError("of another model, machine or version")
    measurements = tuple(_measurement(row) for row in _rows(fields))
    return Measured(measurements, _whole(fields, "num_rounds", 1, _MAX_ROUNDS))


def _measurement(row: dict[str, object]) -> Measurement:
    kind = Kind(_whole(row, "num_rows", 1), _whole(row, "num_drafts", 0), _whole(row, "num_context_tokens", 1))
    num_tokens = _whole(row, "num_tokens", kind.num_rows, kind.num_tokens)
    target_ms, drafter_ms = _ms(row, "target_ms"), _ms(row, "drafter_ms")
    if target_ms == 0:
        raise ValueError("target_ms is 0")
    return Measurement(kind, num_tokens, target_ms, drafter_ms)


def _rows(fields: dict[str, object]) -> list[dict[str, object]]:
    rows = fields.get("measurements")
    if not isinstance(rows, list) or len(cast(list[object], rows)) > _MAX_MEASUREMENTS:
        raise ValueError(f"measurements is not a list of at most {_MAX_MEASUREMENTS}")
    for row in cast(list[object], rows):
        if not isinstance(row, dict):
            raise ValueError("measurements holds something else than objects")
    return cast(list[dict[str, object]], rows)


def _whole(row: dict[str, object], name: str, low: int, high: int = (1 << 31) - 1) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}")
    return value


def _ms(row: dict[str, object], name: str) -> float:
    value = row.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _MAX_MS:
        raise ValueError(f"{name} is {value!r}")
    return float(value)
