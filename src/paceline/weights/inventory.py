"""What is in the cache: list, verify, evict. Called by `paceline models` and `paceline doctor`."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from paceline.core.progress import Progress, SilentProgress
from paceline.errors import NotFoundError
from paceline.weights.catalog import CATALOG, find_model
from paceline.weights.store import Manifest, ModelStore, hash_files, read_manifest

ModelState: TypeAlias = Literal["ready", "incomplete", "absent"]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of `paceline models list`."""

    name: str
    state: ModelState  # "incomplete": an interrupted pull, a damaged folder, or one of another format
    size_bytes: int  # on disk, all versions
    download_bytes: int  # what a pull fetches; 0 for a converted .gguf file
    licence: str  # "" if unknown
    summary: str
    path: Path | None  # the folder, if ready


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file that is not what was published, and in what way."""

    path: Path
    reason: str


def list_models(store: ModelStore) -> tuple[ModelEntry, ...]:
    """The catalogue's models in its order, then the converted .gguf files of the cache."""
    named = [_entry(store, model.name, model.download_bytes, model.licence, model.summary) for model in CATALOG]
    return (*named, *(_converted_entry(store, name) for name in _converted_names(store)))


def verify(name: str, store: ModelStore, progress: Progress) -> tuple[DamagedFile, ...]:
    """Hash every file of a cached model against its manifest; () if all are as published. Errors: NotFoundError if it is not cached."""
    folders = _version_folders(_cached_path(name, store))
    damaged: list[DamagedFile] = []
    for folder in folders:
        manifest = read_manifest(folder)
        if manifest is None:
            damaged.append(DamagedFile(folder, "has no readable manifest; evict the model and pull it again"))
        else:
            damaged += _damaged_files(folder, manifest, progress)
    if not folders:
        damaged.append(DamagedFile(_cached_path(name, store), "holds only an interrupted pull; pull the model again"))
    return tuple(damaged)


def evict(name: str, store: ModelStore, progress: Progress | None = None) -> int:
    """Delete a model from the cache and return the bytes that were freed. Errors: NotFoundError if it is not cached.

    A server that runs the model goes on: the system keeps mapped files until they are unmapped.
    """
    path = _cached_path(name, store)
    with store.locked(name, progress or SilentProgress()), store.disk_errors():
        freed_bytes = _disk_bytes(path)
        shutil.rmtree(path)
    return freed_bytes


def _entry(store: ModelStore, name: str, download_bytes: int, licence: str, summary: str) -> ModelEntry:
    path = store.models_root() / name
    if not path.is_dir():
        return ModelEntry(name, "absent", 0, download_bytes, licence, summary, None)
    ready = [folder for folder in _version_folders(path) if _is_ready(store, name, folder)]
    state: ModelState = "ready" if ready else "incomplete"
    return ModelEntry(name, state, _disk_bytes(path), download_bytes, licence, summary, ready[0] if ready else None)


def _converted_entry(store: ModelStore, name: str) -> ModelEntry:
    manifests = [read_manifest(folder) for folder in _version_folders(store.models_root() / name)]
    source = next((manifest.source for manifest in manifests if manifest is not None), "an unfinished conversion")
    return _entry(store, name, 0, "", f"converted from {source}")


def _is_ready(store: ModelStore, name: str, folder: Path) -> bool:
    manifest, model = read_manifest(folder), find_model(name)
    if manifest is None or (model is not None and manifest.sha256 != model.sha256):
        return False
    return store.folder(name, manifest.sha256) == folder and store.is_complete(folder, manifest.sha256)


def _converted_names(store: ModelStore) -> list[str]:
    if not store.models_root().is_dir():
        return []
    return sorted(path.name for path in store.models_root().iterdir() if path.is_dir() and path.name.startswith("gguf-"))


def _cached_path(name: str, store: ModelStore) -> Path:
    known = name if find_model(name) is not None or name in _converted_names(store) else None
    path = store.models_root() / known if known else None
    if path is None or not path.is_dir():
        cached = [entry.name for entry in list_models(store) if entry.state != "absent"]
        raise NotFoundError(f"{name!r} is not in the cache {store.root}; it holds {', '.join(cached) or 'no model'}")
    return path


def _version_folders(path: Path) -> list[Path]:
    return sorted(folder for folder in path.glob("v*-*") if folder.is_dir())


def _damaged_files(folder: Path, manifest: Manifest, progress: Progress) -> list[DamagedFile]:
    damaged: list[DamagedFile] = []
    expected: dict[Path, str] = {}
    for record in manifest.files:
        path = folder / record.name
        if not path.is_file():
            damaged.append(DamagedFile(path, "is missing"))
        elif path.stat().st_size != record.size_bytes:
            damaged.append(DamagedFile(path, f"has {path.stat().st_size} bytes instead of {record.size_bytes}"))
        else:
            expected[path] = record.sha256
    digests = hash_files(list(expected), progress, f"verify {manifest.name}")
    for (path, recorded), digest in zip(expected.items(), digests, strict=True):
        if digest != recorded:
            damaged.append(DamagedFile(path, f"has sha256 {digest} instead of {recorded}"))
    return damaged


def _disk_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
