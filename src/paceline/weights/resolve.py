"""From what the user wrote to a model folder: a catalogue name, a folder, or a .gguf file. Called by `serve`, `generate` and `llm.py`."""

import json
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from paceline.config import EngineConfig
from paceline.core.progress import Progress
from paceline.errors import BadInputError, NotFoundError, UnsupportedModelError
from paceline.models.convert import converted_size_bytes
from paceline.models.folder import check_folder, read_json
from paceline.weights.catalog import find_model, unknown_model
from paceline.weights.pull import pull
from paceline.weights.store import ModelStore, default_store, hash_file, new_manifest

_DRAFTERS_WITHOUT_MODEL = ("none", "ngram")
_WORKING_SPACE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A complete model folder on this disk."""

    name: str  # what the API calls the model unless it is told otherwise
    path: Path


def resolve(model: str, progress: Progress, store: ModelStore | None = None) -> ModelFolder:
    """The folder of `model`; a catalogue model is pulled and a .gguf file converted first, once.

    Errors: NotFoundError, BadInputError or UnsupportedModelError for what cannot be served, MissingError as in `pull`.
    """
    cache = store or default_store()
    if find_model(model) is not None:
        return ModelFolder(model, pull(model, cache, progress))
    if model.startswith("hf:"):
        raise BadInputError(f"{model}: fetching from the Hugging Face hub is not in this build; download the folder and give its path")
    path = Path(model).expanduser()
    if path.is_dir():
        check_folder(path)
        return ModelFolder(path.resolve().name, path.resolve())
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnsupportedModelError(f"{path} is neither a folder nor a .gguf file")
        return ModelFolder(path.stem, _converted(path.resolve(), cache, progress))
    raise unknown_model(model)


def needs_draft_model(config: EngineConfig) -> bool:
    """Whether `draft` names a model and something may be drafted."""
    return config.speculation != "off" and config.max_draft_length > 0 and config.draft not in _DRAFTERS_WITHOUT_MODEL


def resolve_models(config: EngineConfig, progress: Progress) -> tuple[ModelFolder, ModelFolder | None]:
    """The target and the draft model, if one is needed."""
    target = resolve(config.model_dir or config.model, progress)
    if not needs_draft_model(config):
        return target, None
    try:
        return target, resolve(config.draft, progress)
    except NotFoundError as error:
        raise BadInputError(f"--draft {config.draft}: it is none of {', '.join(_DRAFTERS_WITHOUT_MODEL)}, and {error}") from error


def _converted(path: Path, cache: ModelStore, progress: Progress) -> Path:
    """The cached conversion of a GGUF file, keyed by its content, so that copies and renamed files share one."""
    digest = _hash_of(path, cache, progress)
    name = f"gguf-{digest[:12]}"
    target = cache.folder(name, digest)
    if cache.is_complete(target, digest):
        return target
    needed_bytes = converted_size_bytes(path) + _WORKING_SPACE_BYTES
    with cache.locked(name, progress):
        if cache.is_complete(target, digest):
            return target
        with cache.workspace(name, needed_bytes) as work:
            return cache.convert(work, path, new_manifest(name, str(path), digest), progress)


def _hash_of(path: Path, cache: ModelStore, progress: Progress) -> str:
    """The file's sha256, remembered by path, size and modification time: a large file is read once, not at every start."""
    status = path.stat()
    key = {"path": str(path), "size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    record_path = cache.root / "hashes" / f"{sha256(str(path).encode()).hexdigest()[:24]}.json"
    try:
        record = read_json(record_path) or {}
    except BadInputError:
        record = {}
    known = record.pop("sha256", None)
    if record == key and isinstance(known, str):
        return known
    try:
        digest = hash_file(path, progress, f"hash {path.name}")
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from error
    with cache.disk_errors():
        record_path.parent.mkdir(parents=True, exist_ok=True)
        temporary = record_path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(key | {"sha256": digest}) + "\n", encoding="utf-8")
        os.replace(temporary, record_path)
    return digest
