"""The GGUF reader: everything llama.cpp's writer writes is read as written, and no damaged file does worse than a clear error."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import BadInputError, NotFoundError, PacelineError, UnsupportedModelError
from paceline.models import gguf as gguf_module
from paceline.models.gguf import GgufFile

STRINGS = ["", "a", "caf\u00e9 \U0001f916", "x" * 300]
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def write(path: Path, with_tensors: bool = True) -> dict[str, np.ndarray]:
    """A small file with every kind of metadata; the matrices that went in, by tensor name."""
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -5)
    writer.add_uint16("t.u16", 65_000)
    writer.add_int16("t.i16", -30_000)
    writer.add_uint32("t.u32", 4_000_000_000)
    writer.add_int32("t.i32", -2_000_000_000)
    writer.add_uint64("t.u64", 2**63)
    writer.add_int64("t.i64", -(2**60))
    writer.add_float32("t.f32", 0.5)
    writer.add_float64("t.f64", 1e-300)
    writer.add_bool("t.bool", True)
    writer.add_string("t.text", "line\nline")
    writer.add_array("t.texts", STRINGS)
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [0.25, -1.5])
    matrices: dict[str, np.ndarray] = {}
    if with_tensors:
        rng = np.random.default_rng(0)
        for kind in KINDS:
            matrix = rng.standard_normal((24, 64)).astype(np.float32)
            matrices[kind] = quantize(matrix, GGMLQuantizationType[kind])
            writer.add_tensor(kind, matrices[kind], raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return matrices


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_metadata_of_every_type(path: Path) -> None:
    write(path)
    with GgufFile(path) as file:
        metadata = file.metadata
    assert [metadata.int(f"t.{kind}") for kind in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")] == [
        *(200, -5, 65_000, -30_000, 4_000_000_000, -2_000_000_000),
        *(2**63, -(2**60)),
    ]
    assert (metadata.find_float("t.f32"), metadata.find_float("t.f64"), metadata.find_flag("t.bool")) == (0.5, 1e-300, True)
    assert metadata.text("t.text") == "line\nline"
    assert metadata.strings("t.texts") == STRINGS
    ints, floats = metadata.find_array("t.ints"), metadata.find_array("t.floats")
    assert ints is not None and ints.tolist() == [1, -2, 3]
    assert floats is not None and floats.tolist() == [0.25, -1.5]
    assert metadata.find_int("absent") is None
    with pytest.raises(BadInputError, match="lacks the metadata key absent"):
        metadata.int("absent")
    with pytest.raises(BadInputError, match=r"t\.text is str, not a whole number"):
        metadata.find_int("t.text")
    with pytest.raises(BadInputError, match=r"t\.bool is bool"):
        metadata.int("t.bool")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_gguf_package(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = write(path)
    monkeypatch.setattr(gguf_module, "_ROWS_PER_CHUNK_ELEMENTS", 5 * 64)
    expected = dequantize(matrices[kind], GGMLQuantizationType[kind])
    order = np.random.default_rng(1).permutation(24)
    with GgufFile(path) as file:
        chunks = list(file.rows(kind))
        shuffled = np.concatenate(list(file.rows(kind, order)))
        assert file.tensors[kind].shape == (24, 64)
    assert [len(chunk) for chunk in chunks] == [5, 5, 5, 5, 4]
    assert np.array_equal(np.concatenate(chunks), expected)
    assert np.array_equal(shuffled, expected[order])


def test_agrees_with_the_packages_reader_on_places(path: Path) -> None:
    write(path)
    with GgufFile(path) as file:
        places = {tensor.name: (tensor.offset, tensor.num_bytes) for tensor in file.tensors.values()}
    assert places == {tensor.name: (tensor.data_offset, tensor.n_bytes) for tensor in GGUFReader(path).tensors}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(entries: list[bytes] = [], tensors: list[bytes] = [], version: int = 3, data: int = 0, **counts: int) -> bytes:  # noqa: B006
    num_tensors, num_entries = counts.get("num_tensors", len(tensors)), counts.get("num_entries", len(entries))
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join(entries) + b"".join(tensors) + b"\0" * (data + 64)


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = 2**63
DAMAGED = {
    "empty": (b"", "0 bytes"),
    "other file": (b"PK\x03\x04" + b"\0" * 60, "starts with b'PK"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (header(version=1), "versions 2 and 3"),
    "huge tensor count": (header(num_tensors=HUGE), f"claims {HUGE} tensors"),
    "huge entry count": (header(num_entries=HUGE), f"claims {HUGE} metadata entries"),
    "huge key": (header([struct.pack("<Q", HUGE) + b"\0" * 40]), "limit is 65535"),
    "huge string": (header([entry("k", 8, struct.pack("<Q", HUGE))]), f"k claims {HUGE} bytes"),
    "huge array": (header([entry("k", 9, struct.pack("<IQ", 4, HUGE))]), f"claims {HUGE} elements in k"),
    "huge string array": (header([entry("k", 9, struct.pack("<IQ", 8, HUGE))]), f"claims {HUGE} strings in k"),
    "array of arrays": (header([entry("k", 9, struct.pack("<IQ", 9, 1))]), "array of type 9"),
    "unknown type": (header([entry("k", 77, b"")]), "unknown value type 77"),
    "key twice": (header([entry("k", 0, b"\1"), entry("k", 0, b"\1")]), "occurs twice"),
    "not UTF-8": (header([entry("k", 8, struct.pack("<Q", 2) + b"\xff\xfe")]), "not UTF-8"),
    "odd alignment": (header([entry("general.alignment", 4, struct.pack("<I", 7))]), "alignment is 7"),
    "zero alignment": (header([entry("general.alignment", 4, struct.pack("<I", 0))]), "alignment is 0"),
    "no dimensions": (header(tensors=[tensor("t", [])], data=64), "0 dimensions"),
    "nine dimensions": (header(tensors=[tensor("t", [1] * 9)], data=64), "9 dimensions"),
    "empty dimension": (header(tensors=[tensor("t", [4, 0])], data=64), "cannot hold"),
    "huge tensor": (header(tensors=[tensor("t", [HUGE, HUGE])], data=64), "the file has"),
    "half a block": (header(tensors=[tensor("t", [33], kind=8)], data=64), "blocks of 32 cannot hold"),
    "unknown block format": (header(tensors=[tensor("t", [4], kind=999)], data=64), "block format 999"),
    "offset out of the file": (header(tensors=[tensor("t", [4], offset=1 << 40)], data=64), "the file has"),
    "offset off the grid": (header(tensors=[tensor("t", [4], offset=4)], data=64), "not a multiple of 32"),
    "tensor twice": (header(tensors=[tensor("t", [4]), tensor("t", [4])], data=64), "occurs twice"),
    "overlap": (header(tensors=[tensor("a", [16]), tensor("b", [4], offset=32)], data=128), "overlap"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(path: Path, name: str) -> None:
    content, words = DAMAGED[name]
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises((BadInputError, UnsupportedModelError), match=words.replace("(", r"\(")) as caught:
        GgufFile(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert str(path) in str(caught.value)


def test_no_file(path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no file"):
        GgufFile(path)
    with pytest.raises(BadInputError, match="Is a directory"):
        GgufFile(path.parent)


def test_every_truncation_is_noticed(path: Path) -> None:
    write(path)
    content = path.read_bytes()
    for size in [*range(0, 1200, 7), *range(1200, len(content) - 32, 997)]:  # the writer pads the last tensor to 32 bytes
        path.write_bytes(content[:size])
        with pytest.raises(PacelineError):
            GgufFile(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    write(path)
    return path.read_bytes()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_header_bytes_never_crash(path: Path, sound: bytes, data: st.DataObject) -> None:
    content = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 1500))] = data.draw(st.sampled_from([0, 1, 8, 9, 0x7F, 0x80, 0xFF]))
    path.write_bytes(content)
    try:
        with GgufFile(path) as file:
            for name in file.tensors:
                for _ in file.rows(name):
                    pass
    except PacelineError:
        pass
