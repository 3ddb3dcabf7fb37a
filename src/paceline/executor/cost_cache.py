"""Step costs on disk, one small file per model, drafter, machine and version. A file that cannot be used is measured anew."""

import json
import logging
import os
import platform
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import cast

from paceline import __version__
from paceline.config import EngineConfig
from paceline.core.cache import cache_root
from paceline.core.facts import DrafterCost, EngineFacts, StepCosts, TargetCost

_log = logging.getLogger(__name__)

_FORMAT = 1
MAX_FILES = 64
_MAX_BYTES = 64 * 1024
_MAX_COSTS = 256
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

    def read(self) -> StepCosts | None:
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

    def write(self, costs: StepCosts) -> None:
        """Puts a file in its place at once, and removes the oldest ones beyond MAX_FILES."""
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"key": self._key, **asdict(costs)}) + "\n", encoding="utf-8")
            os.replace(temporary, self.path)
            files = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            for path in files[:-MAX_FILES]:
                path.unlink(missing_ok=True)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            _log.warning("step costs are not kept: %s cannot be written (%s)", self.path, error.strerror)


def _parsed(value: object, key: dict[str, str | int]) -> StepCosts:
    """Raises ValueError for anything but a file of this key."""
    if not isinstance(value, dict):
        raise ValueError("not an object")
    fields = cast(dict[str, object], value)
    if fields.get("key") != key:
        raise ValueError("of another model, machine or version")
    target = tuple(
        TargetCost(_whole(row, "num_rows"), _whole(row, "num_tokens"), _whole(row, "num_context_tokens"), _ms(row))
        for row in _rows(fields, "target")
    )
    drafter = tuple(DrafterCost(_whole(row, "num_rows"), _whole(row, "num_drafts"), _ms(row)) for row in _rows(fields, "drafter"))
    return StepCosts(target, drafter)


def _rows(fields: dict[str, object], name: str) -> list[dict[str, object]]:
    rows = fields.get(name)
    if not isinstance(rows, list) or len(cast(list[object], rows)) > _MAX_COSTS:
        raise ValueError(f"{name} is not a list of at most {_MAX_COSTS}")
    for row in cast(list[object], rows):
        if not isinstance(row, dict):
            raise ValueError(f"{name} holds something else than objects")
    return cast(list[dict[str, object]], rows)


def _whole(row: dict[str, object], name: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise ValueError(f"{name} is {value!r}")
    return value


def _ms(row: dict[str, object]) -> float:
    value = row.get("ms")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _MAX_MS:
        raise ValueError(f"ms is {value!r}")
    return float(value)
