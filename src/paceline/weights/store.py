"""The model cache on disk: its layout, manifests, locks, and how a finished folder appears in it at once or not at all.

Layout: models/<name>/v<format>-<first 12 digits of the GGUF file's sha256>/ with a manifest paceline.json beside the model's files.
A folder counts only if its manifest is there and every file has the recorded size; `inventory.verify` also hashes. Used by the other
files of this package only.
"""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import cast

from filelock import FileLock, Timeout

from paceline.core.cache import cache_root
from paceline.core.progress import Progress
from paceline.errors import BadInputError, MissingError
from paceline.models.convert import CONVERSION_FORMAT, convert_gguf
from paceline.models.folder import read_json

MANIFEST_FILE = "paceline.json"
_WORK_PREFIX = ".work-"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a published folder as it was written."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a published folder was made from and what it must hold."""

    format: int
    name: str
    source: str  # the packages or the file that the GGUF bytes came from
    sha256: str  # of the GGUF file
    files: tuple[FileRecord, ...]


class ModelStore:
    """The cache under one root folder, made when first written to."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def models_root(self) -> Path:
        return self.root / "models"

    def folder(self, name: str, gguf_sha256: str) -> Path:
        """Where the model converted from that GGUF file belongs."""
        return self.models_root() / name / f"v{CONVERSION_FORMAT}-{gguf_sha256[:12]}"

    def is_complete(self, folder: Path, gguf_sha256: str) -> bool:
        """Whether `folder` was published whole from that GGUF file and no file has since been lost or cut."""
        manifest = read_manifest(folder)
        if manifest is None or manifest.sha256 != gguf_sha256 or manifest.format != CONVERSION_FORMAT:
            return False
        return all(_size(folder / record.name) == record.size_bytes for record in manifest.files)

    @contextmanager
    def locked(self, name: str, progress: Progress) -> Generator[None]:
        """Hold the model's lock against other processes and threads; the system drops it when a holder dies."""
        with self.disk_errors():
            (self.root / "locks").mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.root / "locks" / f"{name}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                progress.update(f"wait for another process that prepares {name}", 0, 0)
                lock.acquire(poll_interval=0.1)
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def workspace(self, name: str, needed_bytes: int) -> Generator[Path]:
        """A temporary folder on the cache's disk, gone afterwards. Call it under the model's lock: it clears what a killed run left."""
        with self.disk_errors():
            parent = self.models_root() / name
            parent.mkdir(parents=True, exist_ok=True)
            _clear_work(parent)
            try:
                _check_space(parent, needed_bytes, name)
                yield Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=parent))
            finally:
                _clear_work(parent)
                if not any(parent.iterdir()):
                    parent.rmdir()  # a failed first pull leaves no trace

    def convert(self, work: Path, gguf: Path, manifest: Manifest, progress: Progress) -> Path:
        """Convert inside `work`, then move the folder to its place in one step. Call it under the model's lock.

        `manifest.files` is filled in here. Returns the published folder.
        """
        built = work / "folder"
        built.mkdir()
        convert_gguf(gguf, built, progress)
        paths = sorted(built.iterdir())
        digests = hash_files(paths, progress, "checksum")
        records = [FileRecord(path.name, path.stat().st_size, digest) for path, digest in zip(paths, digests, strict=True)]
        recorded = Manifest(manifest.format, manifest.name, manifest.source, manifest.sha256, tuple(records))
        (built / MANIFEST_FILE).write_text(json.dumps(asdict(recorded), indent=2) + "\n", encoding="utf-8")
        for path in (*built.iterdir(), built):
            _sync(path)  # a power cut after the rename must not leave a folder of empty files
        target = self.folder(manifest.name, manifest.sha256)
        if target.exists():  # damaged, or its callers would not be here; a reader that has it mapped keeps its files
            os.replace(target, work / "damaged")
        os.replace(built, target)
        _sync(target.parent)
        return target

    @contextmanager
    def disk_errors(self) -> Generator[None]:
        """Turn a full disk and forbidden folders into errors with a remedy."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise MissingError(f"the disk of {self.root} is full; free some space or point PACELINE_CACHE to another disk") from error
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
                where = error.filename or self.root
                raise MissingError(f"{where} cannot be written ({error.strerror}); point PACELINE_CACHE to a folder of yours") from error
            raise


def default_store() -> ModelStore:
    """The cache under PACELINE_CACHE, or ~/.cache/paceline."""
    return ModelStore(cache_root())


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest, or None if there is none or it cannot be understood."""
    try:
        values = read_json(folder / MANIFEST_FILE)
    except BadInputError:
        return None
    if values is None:
        return None
    files = values.get("files")
    records = [_read_record(entry) for entry in cast(list[object], files)] if isinstance(files, list) else []
    known = tuple(record for record in records if record is not None)
    if not known or len(known) != len(records):
        return None
    match values:
        case {"format": int(version), "name": str(name), "source": str(source), "sha256": str(digest)}:
            return Manifest(version, name, source, digest, known)
        case _:
            return None


def new_manifest(name: str, source: str, gguf_sha256: str) -> Manifest:
    """A manifest of the current format whose files are yet to be written."""
    return Manifest(CONVERSION_FORMAT, name, source, gguf_sha256, ())


def hash_file(path: Path, progress: Progress, stage: str) -> str:
    """sha256 of a file, in hexadecimal, read in pieces."""
    return hash_files([path], progress, stage)[0]


def hash_files(paths: Sequence[Path], progress: Progress, stage: str) -> list[str]:
    """The same for several files, as one stage."""
    total, done = sum(path.stat().st_size for path in paths), 0
    digests: list[str] = []
    for path in paths:
        digest = sha256()
        with path.open("rb") as file:
            while piece := file.read(_CHUNK_BYTES):
                digest.update(piece)
                done += len(piece)
                progress.update(stage, done, total)
        digests.append(digest.hexdigest())
    return digests


def _read_record(entry: object) -> FileRecord | None:
    match entry:
        case {"name": str(name), "size_bytes": int(size_bytes), "sha256": str(digest)} if name and Path(name).name == name:
            return FileRecord(name, size_bytes, digest)
        case _:
            return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _check_space(folder: Path, needed_bytes: int, name: str) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise MissingError(
            f"{name} needs {needed_bytes / 1e9:.2f} GB of disk space under {folder}, {free_bytes / 1e9:.2f} GB are free; "
            "free some space or point PACELINE_CACHE to another disk"
        )


def _clear_work(parent: Path) -> None:
    for work in parent.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(work, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
