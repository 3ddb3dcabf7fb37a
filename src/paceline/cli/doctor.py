"""`paceline doctor`: what this machine can do with a model. It downloads nothing."""

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.cli.facts import choice_lines, facts_lines
from paceline.cli.progress import ConsoleProgress
from paceline.cli.sizes import shown, size_text
from paceline.config import EngineConfig, check_engine

if TYPE_CHECKING:  # torch takes seconds to load, and most of what is shown needs none
    from paceline.forward.op_times import OpTime

_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "gguf", "msgspec", "pyzmq", "fastapi", "uvicorn", "uvloop")
# Instruction sets that decide which kernels run and how fast: in /proc/cpuinfo's words.
_CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "avx_vnni", "avx_ne_convert")


def doctor(
    *,
    profile: Annotated[bool, Parameter(help="Run some steps and show the time of each kind of op.", negative="")] = False,
    config: EngineConfig = EngineConfig(),  # noqa: B008 - frozen
) -> None:
    """Show versions, CPU, cache, and for a model in the cache the memory plan, the kernels and why they are chosen.

    Takes the engine's flags, so that a configuration can be tried without a server. Exit 0 if the model loads.
    """
    check_engine(config)
    for title, lines in (("versions", version_lines()), ("cpu", cpu_lines()), ("cache", cache_lines())):
        for line in lines:
            print(f"{title:<9} {line}")
            title = ""
    print("\n".join(model_lines(config, profile)))


def version_lines() -> Iterator[str]:
    yield f"paceline {version('paceline')}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "MISSING"


def cpu_lines(cpuinfo: Path = Path("/proc/cpuinfo")) -> Iterator[str]:
    """Model, cores, and the instruction sets that matter here."""
    fields = _cpu_fields(cpuinfo)
    usable = len(os.sched_getaffinity(0))
    yield f"{fields.get('model name', platform.processor() or 'unknown CPU')}, {usable} of {os.cpu_count()} logical cores usable"
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    present = [name for name in _CPU_FEATURES if name in flags]
    yield f"has {', '.join(present) or 'none of the instruction sets we look for'}"
    yield f"lacks {', '.join(name for name in _CPU_FEATURES if name not in flags)}"


def _cpu_fields(cpuinfo: Path) -> dict[str, str]:
    """The first processor's entries."""
    try:
        block = cpuinfo.read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:  # not Linux
        return {}
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cache_lines() -> Iterator[str]:
    """Where models are kept, the room that is left, and what is there."""
    from paceline.weights.inventory import list_models
    from paceline.weights.store import default_store

    store = default_store()
    existing = next(folder for folder in (store.root, *store.root.parents) if folder.exists())
    writable = "" if os.access(existing, os.W_OK) else ", NOT WRITABLE: set PACELINE_CACHE to a folder of yours"
    yield f"{shown(store.root)}, {size_text(shutil.disk_usage(existing).free)} free{writable}"
    for entry in list_models(store):
        yield f"{entry.name} {entry.state}" + (f", {size_text(entry.size_bytes)}" if entry.size_bytes else "")


def model_lines(config: EngineConfig, profile: bool = False) -> list[str]:
    """Load the configured model as `serve` would and say what came of it. Raises what loading raises."""
    from paceline.executor.load import load_executor
    from paceline.weights.resolve import needs_draft_model

    name = config.model_dir or config.model
    folder, draft_folder = local_folder(name), None
    has_draft_model = needs_draft_model(config)
    if has_draft_model:
        draft_folder = local_folder(config.draft)
    missing = name if folder is None else config.draft if has_draft_model and draft_folder is None else None
    if folder is None or missing is not None:
        return [f"model     {missing} is not here yet; `paceline models pull {missing}` fetches it, then this shows kernels and memory"]
    with ConsoleProgress() as progress:
        executor, facts = load_executor(config, str(folder), str(draft_folder) if draft_folder else None, progress)
    lines = [*facts_lines(name, facts, config), *choice_lines(facts.choices)]
    return [*lines, *profile_lines(executor.op_times())] if profile else lines


def profile_lines(times: Sequence["OpTime"]) -> list[str]:
    """Milliseconds of a step of one token and what it reads per second, by kind of op and together."""
    if not times:
        return ["profile   only the native step measures its ops; see `quantization` above"]
    total_ms, num_bytes = sum(time.ms for time in times), sum(time.num_bytes for time in times)
    rows = [(time.name, time.ms, time.num_bytes, time.bytes_per_s) for time in times]
    rows.append(("all, one token", total_ms, num_bytes, num_bytes / (total_ms * 1e-3)))
    return [f"profile   {name:<24} {ms:8.3f} ms  {size_text(size):>9}  {rate / 1e9:6.1f} GB/s" for name, ms, size, rate in rows]


def local_folder(model: str) -> Path | None:
    """The folder of a model that needs neither download nor conversion, or None."""
    from paceline.weights.inventory import list_models
    from paceline.weights.store import default_store

    for entry in list_models(default_store()):
        if entry.name == model:
            return entry.path
    path = Path(model).expanduser()
    return path if path.is_dir() else None
