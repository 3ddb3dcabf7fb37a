"""The file of packed weights: what is mapped is what was written, and whatever is wrong with it costs a new packing and no more."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.forward import packed_cache
from paceline.forward.packed_cache import PackedCache, folder_identity

SIZES = [320 * 3, 544 * 16, 100_000, 64]
IDENTITY = {"folder": "/models/x", "files": [["model.safetensors", 10, 20]]}


def matrices() -> Iterator[NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    for size in SIZES:
        yield rng.integers(0, 256, size, dtype=np.uint8)


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    cache = PackedCache(IDENTITY, "int8", tmp_path)
    assert cache.read(SIZES) is None
    assert cache.write(matrices(), SIZES)
    return cache


def test_what_is_mapped_is_what_was_written(cache: PackedCache, caplog: pytest.LogCaptureFixture) -> None:
    found = cache.read(SIZES)
    assert found is not None
    for mapped, written in zip(found, matrices(), strict=True):
        np.testing.assert_array_equal(mapped, written)
        assert mapped.ctypes.data % 64 == 0
        assert not mapped.flags.writeable
    again = PackedCache(IDENTITY, "int8", cache.path.parent.parent).read(SIZES)
    assert again is not None, "another process finds it too"
    assert not caplog.records
    assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name], "nothing unfinished is left"


def test_another_checkpoint_or_scheme_is_another_file(cache: PackedCache) -> None:
    root = cache.path.parent.parent
    others = [PackedCache(IDENTITY, "int4", root), PackedCache(IDENTITY | {"folder": "/models/y"}, "int8", root)]
    for other in others:
        assert other.path != cache.path
        assert other.read(SIZES) is None


def test_the_identity_of_a_folder_changes_with_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    before = folder_identity(tmp_path, ["a"])
    assert folder_identity(tmp_path, ["a"]) == before
    os.utime(tmp_path / "a", ns=(1, 1))
    moved = folder_identity(tmp_path, ["a"])
    assert moved != before
    (tmp_path / "a").write_bytes(b"12")
    os.utime(tmp_path / "a", ns=(1, 1))
    assert folder_identity(tmp_path, ["a"]) != moved


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 64)


def _lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(64))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _change_key(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"scheme": "int8"', b'"scheme": "int4"'))


def _change_first_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)


def _zero_the_end(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-64:] = bytes(64)
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [_cut, _lengthen, _empty, _change_key, _change_first_byte, _zero_the_end], ids=lambda harm: harm.__name__)
def test_damage_is_noticed_and_said(cache: PackedCache, harm: object, caplog: pytest.LogCaptureFixture) -> None:
    assert callable(harm)
    harm(cache.path)
    with caplog.at_level(logging.WARNING):
        assert cache.read(SIZES) is None
    assert "weights are packed anew" in caplog.text
    assert cache.write(matrices(), SIZES)
    assert cache.read(SIZES) is not None


def test_sizes_of_another_layout_are_noticed(cache: PackedCache) -> None:
    assert cache.read([*SIZES[:-1], 128]) is None
    assert cache.read([SIZES[1], SIZES[0], *SIZES[2:]]) is None


def test_a_failed_packing_leaves_the_old_file(cache: PackedCache) -> None:
    def failing() -> Iterator[NDArray[np.uint8]]:
        yield next(matrices())
        raise RuntimeError("cannot be quantised")

    with pytest.raises(RuntimeError):
        cache.write(failing(), SIZES)
    assert cache.read(SIZES) is not None
    assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name]


def test_a_disk_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "packed").write_text("a file where the folder should be")
    cache = PackedCache(IDENTITY, "int8", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert not cache.write(matrices(), SIZES)
    assert "packed weights are not kept" in caplog.text


def test_a_file_whose_time_cannot_be_set_is_used(
    cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(1, "not the owner", str(path))

    monkeypatch.setattr(os, "utime", refuse)
    found = cache.read(SIZES)
    assert found is not None
    np.testing.assert_array_equal(found[2], list(matrices())[2])
    assert not caplog.records


def test_a_clean_up_that_fails_undoes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(packed_cache, "MAX_FILES", 1)
    caches = [PackedCache(IDENTITY | {"folder": str(i)}, "int8", tmp_path) for i in range(3)]
    assert caches[0].write(matrices(), SIZES)
    (tmp_path / "packed" / "vanished.bin").symlink_to(tmp_path / "nothing")  # as one that another process removed after it was listed
    os.utime(caches[0].path, ns=(1, 1))
    assert caches[1].write(matrices(), SIZES)
    assert [cache.path.exists() for cache in caches] == [False, True, False], "the others are removed all the same"

    def fail(self: PackedCache) -> None:
        raise PermissionError(1, "not the owner")

    monkeypatch.setattr(PackedCache, "_remove_oldest", fail)
    assert caches[2].write(matrices(), SIZES)
    assert caches[2].read(SIZES) is not None
    assert not caplog.records


def test_the_file_is_for_whom_the_folder_is(cache: PackedCache) -> None:
    assert cache.path.stat().st_mode & 0o777 == cache.path.parent.stat().st_mode & 0o666


def test_only_the_newest_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "MAX_FILES", 2)
    caches = [PackedCache(IDENTITY | {"folder": str(i)}, "int8", tmp_path) for i in range(3)]
    for age, cache in enumerate(caches[:2]):
        cache.write(matrices(), SIZES)
        os.utime(cache.path, ns=(10**9 * (2 - age),) * 2)  # the first one is the newer
    held = caches[0].read(SIZES)  # used: now it is newer still
    assert held is not None
    caches[2].write(matrices(), SIZES)
    assert [cache.path.exists() for cache in caches] == [True, False, True]
    abandoned = tmp_path / "packed" / "x.123.tmp"
    abandoned.write_bytes(b"")
    os.utime(abandoned, ns=(1, 1))
    caches[1].write(matrices(), SIZES)
    assert not abandoned.exists()
    assert not caches[0].path.exists(), "the one that was not used for longest"
    np.testing.assert_array_equal(held[2], list(matrices())[2], "a mapping outlives its file")
