"""From what the user wrote to a folder: names, folders, files, and what each mistake is told."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config import EngineConfig
from paceline.errors import BadInputError, NotFoundError, UnsupportedModelError
from paceline.models.folder import check_folder
from paceline.weights import resolve as resolve_module
from paceline.weights.catalog import CatalogModel
from paceline.weights.resolve import ModelFolder, resolve, resolve_models
from paceline.weights.store import ModelStore, default_store
from tests.fakes.recorded_progress import RecordedProgress
from tests.fakes.tiny_models import make_tiny_model


@pytest.fixture
def own_gguf(gguf: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(gguf, tmp_path / "My.Model.gguf"))


@pytest.mark.usefixtures("copying_pip")
def test_a_catalogue_name_is_pulled(
    model: CatalogModel, store: ModelStore, progress: RecordedProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.weights.catalog.CATALOG", (model,))
    found = resolve(model.name, progress, store)
    assert found.name == model.name
    check_folder(found.path)
    assert progress.stages == ["convert", "checksum"]


def test_a_folder_is_used_where_it_is(
    tmp_path: Path, store: ModelStore, progress: RecordedProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path / "some-model")
    monkeypatch.chdir(tmp_path)
    for written in (str(folder), "some-model", "./some-model/"):
        found = resolve(written, progress, store)
        assert (found.name, found.path) == ("some-model", folder)
    assert not store.root.exists()


def test_a_gguf_file_is_read_and_converted_once(own_gguf: Path, store: ModelStore, progress: RecordedProgress) -> None:
    found = resolve(str(own_gguf), progress, store)
    assert found.name == "My.Model"
    check_folder(found.path)
    assert progress.stages[:2] == ["hash My.Model.gguf", "convert"]
    again = RecordedProgress()
    assert resolve(str(own_gguf), again, store) == found
    assert again.stages == []  # neither hashed nor converted
    moved = own_gguf.rename(own_gguf.with_name("other.gguf"))
    assert resolve(str(moved), again, store).path == found.path
    assert again.stages == ["hash other.gguf"]  # the content decides


def test_a_changed_file_is_read_again(own_gguf: Path, store: ModelStore, progress: RecordedProgress) -> None:
    first = resolve(str(own_gguf), progress, store)
    content = bytearray(own_gguf.read_bytes())
    content[-100] ^= 1  # in the last tensor
    own_gguf.write_bytes(content)
    os.utime(own_gguf, ns=(1, 1))
    again = RecordedProgress()
    second = resolve(str(own_gguf), again, store)
    assert second.path != first.path
    assert again.stages[0] == "hash My.Model.gguf"


def test_a_broken_memory_of_hashes_is_ignored(own_gguf: Path, store: ModelStore, progress: RecordedProgress) -> None:
    found = resolve(str(own_gguf), progress, store)
    (record,) = (store.root / "hashes").iterdir()
    record.write_text("{")
    assert resolve(str(own_gguf), progress, store) == found
    assert record.read_text() != "{"


def test_a_broken_gguf_leaves_no_model(own_gguf: Path, store: ModelStore, progress: RecordedProgress) -> None:
    own_gguf.write_bytes(own_gguf.read_bytes()[:-5000])
    with pytest.raises(BadInputError, match="not a sound GGUF file"):
        resolve(str(own_gguf), progress, store)
    assert not list((store.root / "models").rglob("*"))


@pytest.mark.parametrize(
    ("written", "error", "words"),
    [
        ("smolm2-135m-instruct", NotFoundError, "did you mean smollm2-135m-instruct"),
        ("/no/such/folder", NotFoundError, "give a folder, a .gguf file, or one of smollm2-135m-instruct, qwen"),
        ("hf:org/name", BadInputError, "not in this build"),
        (__file__, UnsupportedModelError, "neither a folder nor a .gguf file"),
        ("", BadInputError, "has no config.json"),  # the current folder
    ],
)
def test_mistakes(
    written: str,
    error: type[Exception],
    words: str,
    store: ModelStore,
    progress: RecordedProgress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        resolve(written, progress, store)


def test_target_and_draft_model(tmp_path: Path, progress: RecordedProgress, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = make_tiny_model(tmp_path / "target"), make_tiny_model(tmp_path / "draft", seed=1)
    config = EngineConfig(model="no-such-model", model_dir=str(target), draft=str(draft))
    found = ModelFolder("target", target)
    assert resolve_models(config, progress) == (found, ModelFolder("draft", draft))
    assert resolve_models(replace(config, speculation="off"), progress) == (found, None)
    assert resolve_models(replace(config, max_draft_length=0), progress) == (found, None)
    for name in ("none", "ngram"):
        assert resolve_models(replace(config, draft=name), progress) == (found, None)
    with pytest.raises(BadInputError, match="--draft ngrm: it is none of none, ngram, and there is no model 'ngrm'"):
        resolve_models(replace(config, draft="ngrm"), progress)


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    assert default_store().root == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("PACELINE_CACHE", "~/models")
    assert default_store().root == tmp_path / "models"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_CACHE", "relative")
    assert default_store().root == tmp_path / "relative"
    assert resolve_module.default_store is default_store
