"""A strict reader of GGUF files, versions 2 and 3: metadata, and tensors as float32 rows. Torch-free.

`convert.py` is the only user. A file is untrusted input: every count and length is checked against the file's size before anything is
allocated. Block formats are the `gguf` package's; its own reader is not used, because it makes a Python object per array element.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from paceline.errors import BadInputError, NotFoundError, UnsupportedModelError

GgufScalar: TypeAlias = int | float | bool | str
GgufValue: TypeAlias = GgufScalar | list[str] | NDArray[np.generic]

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MIN_ENTRY_BYTES = 13  # the shortest possible metadata entry: an empty key, a type, one byte
_MIN_TENSOR_BYTES = 32  # the shortest possible tensor entry: an empty name and one dimension
_MAX_NAME_BYTES = 65_535
_MAX_DIMS = 4
_MAX_STRINGS = 1 << 22  # in one array; sixteen times the largest vocabulary seen
_ROWS_PER_CHUNK_ELEMENTS = 1 << 22  # 16 MB of float32: what one dequantised chunk may hold


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. `shape` has the slowest dimension first, as numpy and torch have it."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int

    @property
    def num_rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """Metadata by key, with typed look-ups: `find_*` give None for an absent key; all raise BadInputError for a value of another type."""

    path: Path
    values: dict[str, GgufValue]

    def find_int(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self._mistyped(key, value, "a whole number")

    def int(self, key: str) -> int:
        value = self.find_int(key)
        if value is None:
            raise self._missing(key)
        return value

    def find_float(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise self._mistyped(key, value, "a number")

    def find_flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._mistyped(key, value, "true or false")

    def find_text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self._mistyped(key, value, "a text")

    def text(self, key: str) -> str:
        value = self.find_text(key)
        if value is None:
            raise self._missing(key)
        return value

    def strings(self, key: str) -> list[str]:
        value = self.values.get(key)
        if value is None:
            raise self._missing(key)
        if isinstance(value, list):
            return value
        raise self._mistyped(key, value, "a list of texts")

    def find_array(self, key: str) -> NDArray[np.generic] | None:
        value = self.values.get(key)
        if value is None or isinstance(value, np.ndarray):
            return value
        raise self._mistyped(key, value, "an array of numbers")

    def _missing(self, key: str) -> BadInputError:
        return BadInputError(f"{self.path} lacks the metadata key {key}; it is not a complete model: convert it again")

    def _mistyped(self, key: str, value: GgufValue, wanted: str) -> BadInputError:
        return BadInputError(f"{self.path}: metadata key {key} is {type(value).__name__}, not {wanted}")


class GgufFile:
    """An open GGUF file: `metadata`, and `tensors` by name. A context manager; arrays handed out are copies.

    Errors: NotFoundError, BadInputError for a damaged file, UnsupportedModelError for a version or block format that is not read.
    """

    metadata: GgufMetadata
    tensors: dict[str, GgufTensor]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if size < 24:
                    raise BadInputError(f"{path} is not a GGUF file: it has {size} bytes, the header alone has 24")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise NotFoundError(f"there is no file {path}") from error
        except OSError as error:
            raise BadInputError(f"cannot read {path}: {error.strerror}") from error
        try:
            header = _HeaderReader(self._map, path)
            values, self.tensors = header.read()
        except BaseException:
            self._map.close()
            raise
        self.metadata = GgufMetadata(path, values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._map.close()

    def rows(self, name: str, order: NDArray[np.intp] | None = None) -> Iterator[NDArray[np.float32]]:
        """Yield a tensor's rows as float32 in chunks of at most 16 MB (or one row); `order` [num_rows] permutes them first.

        Errors: UnsupportedModelError for a block format without a decoder, BadInputError for values that are not finite.
        """
        tensor = self.tensors[name]
        for packed in self.packed_rows(name, order):
            yield self._dequantise(packed, tensor)

    def packed_rows(self, name: str, order: NDArray[np.intp] | None = None) -> Iterator[NDArray[np.uint8]]:
        """The same rows as the file holds them, `[rows, bytes]` in chunks."""
        tensor = self.tensors[name]
        row_bytes = tensor.num_bytes // tensor.num_rows
        num_rows = max(1, _ROWS_PER_CHUNK_ELEMENTS // tensor.shape[-1])
        for start in range(0, tensor.num_rows, num_rows):
            end = min(start + num_rows, tensor.num_rows)
            if order is None:
                yield self._packed_rows(tensor, row_bytes, start, end)
            else:
                yield np.concatenate([self._packed_rows(tensor, row_bytes, int(row), int(row) + 1) for row in order[start:end]])

    def _packed_rows(self, tensor: GgufTensor, row_bytes: int, start: int, end: int) -> NDArray[np.uint8]:
        data = self._map[tensor.offset + start * row_bytes : tensor.offset + end * row_bytes]
        return np.frombuffer(data, dtype=np.uint8).reshape(end - start, row_bytes)

    def _dequantise(self, packed: NDArray[np.uint8], tensor: GgufTensor) -> NDArray[np.float32]:
        try:
            with np.errstate(all="ignore"):  # damaged blocks decode to NaN, which is checked below
                values: NDArray[np.float32] = dequantize(packed, tensor.kind)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.path}: tensor {tensor.name} is stored as {tensor.kind.name}, which cannot be decoded; "
                "use a file quantised as Q4_K_M, Q5_K_M, Q6_K, Q8_0, F16 or BF16"
            ) from error
        if not bool(np.isfinite(values).all()):
            raise BadInputError(f"{self.path} is damaged: tensor {tensor.name} holds values that are not finite; fetch the file again")
        return values


class _HeaderReader:
    """Reads metadata and tensor entries front to back; `_position` never passes the file's end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._size = len(data)
        self._path = path
        self._position = 0

    def read(self) -> tuple[dict[str, GgufValue], dict[str, GgufTensor]]:
        num_tensors, num_entries = self._read_counts()
        metadata: dict[str, GgufValue] = {}
        for _ in range(num_entries):
            key = self._string(f"metadata key {len(metadata)}", _MAX_NAME_BYTES)
            if key in metadata:
                raise self._damaged(f"metadata key {key!r} occurs twice")
            metadata[key] = self._value(key)
        alignment = self._alignment(metadata)
        entries = [self._tensor_entry(index) for index in range(num_tensors)]
        data_start = (self._position + alignment - 1) // alignment * alignment
        return metadata, self._place(entries, data_start, alignment)

    def _read_counts(self) -> tuple[int, int]:
        magic = bytes(self._data[:4])
        if magic != _MAGIC:
            raise BadInputError(f"{self._path} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
        self._position = 4
        version = self._scalar(4, "the version")
        if version not in (2, 3):
            hint = "it is big-endian" if version and not int(version) & 0xFFFF else "this build reads versions 2 and 3"
            raise UnsupportedModelError(f"{self._path}: GGUF version {version} cannot be read: {hint}")
        num_tensors, num_entries = int(self._scalar(10, "the tensor count")), int(self._scalar(10, "the metadata count"))
        self._check_count(num_tensors, _MIN_TENSOR_BYTES, "tensors")
        self._check_count(num_entries, _MIN_ENTRY_BYTES, "metadata entries")
        return num_tensors, num_entries

    def _value(self, key: str) -> GgufValue:
        kind = int(self._scalar(4, f"the type of {key}"))
        if kind == _STRING:
            return self._string(key, self._size)
        if kind == _ARRAY:
            return self._array(key)
        return self._scalar(kind, key)

    def _array(self, key: str) -> GgufValue:
        kind, length = int(self._scalar(4, f"the element type of {key}")), int(self._scalar(10, f"the length of {key}"))
        if kind == _STRING:
            self._check_count(length, 8, f"strings in {key}")
            if length > _MAX_STRINGS:
                raise UnsupportedModelError(f"{self._path}: {key} has {length} strings, the limit is {_MAX_STRINGS}")
            return [self._string(key, self._size) for _ in range(length)]
        if kind not in _SCALARS:
            raise self._damaged(f"{key} is an array of type {kind}, which is not a scalar or a string")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        self._check_count(length, dtype.itemsize, f"elements in {key}")
        values = np.frombuffer(self._take(length * dtype.itemsize, key), dtype=dtype)
        return values.astype(dtype.newbyteorder("="))

    def _tensor_entry(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(f"the name of tensor {index}", _MAX_NAME_BYTES)
        num_dims = int(self._scalar(4, f"the dimensions of {name}"))
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._damaged(f"tensor {name} has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
        dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims, name))
        kind = int(self._scalar(4, f"the type of {name}"))
        return name, tuple(reversed(dims)), kind, int(self._scalar(10, f"the offset of {name}"))

    def _place(self, entries: list[tuple[str, tuple[int, ...], int, int]], data_start: int, alignment: int) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind_id, offset in entries:
            try:
                kind = GGMLQuantizationType(kind_id)
                block_size, block_bytes = GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError) as error:
                raise UnsupportedModelError(f"{self._path}: tensor {name} has the unknown block format {kind_id}") from error
            num_elements = prod(shape)
            if num_elements == 0 or shape[-1] % block_size:
                raise self._damaged(f"tensor {name} has shape {list(shape)}, which {kind.name} blocks of {block_size} cannot hold")
            num_bytes = num_elements // block_size * block_bytes
            start = data_start + offset
            if start + num_bytes > self._size:
                raise self._damaged(f"tensor {name} ends at byte {start + num_bytes}, the file has {self._size}")
            if offset % alignment:
                raise self._damaged(f"tensor {name} starts at byte {offset} of the data, which is not a multiple of {alignment}")
            if name in tensors:
                raise self._damaged(f"tensor {name} occurs twice")
            tensors[name] = GgufTensor(name, shape, kind, start, num_bytes)
        self._check_overlap(tensors)
        return tensors

    def _check_overlap(self, tensors: dict[str, GgufTensor]) -> None:
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for first, second in pairwise(in_order):
            if first.offset + first.num_bytes > second.offset:
                raise self._damaged(f"tensors {first.name} and {second.name} overlap")

    def _alignment(self, metadata: dict[str, GgufValue]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise self._damaged(f"general.alignment is {alignment!r}, not a multiple of 8 up to {1 << 20}")
        return alignment

    def _check_count(self, count: int, min_bytes: int, what: str) -> None:
        available = self._size - self._position
        if count * min_bytes > available:
            raise self._damaged(f"it claims {count} {what}, and has only {available} bytes left")

    def _scalar(self, kind: int, what: str) -> int | float | bool:
        code = _SCALARS.get(kind)
        if code is None:
            raise self._damaged(f"{what} has the unknown value type {kind}")
        layout = struct.Struct("<" + code)
        value: int | float | bool = layout.unpack(self._take(layout.size, what))[0]
        return value

    def _string(self, what: str, max_bytes: int) -> str:
        length = int(self._scalar(10, f"the length of {what}"))
        if length > max_bytes:
            raise self._damaged(f"{what} claims {length} bytes, the limit is {max_bytes}")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} is not UTF-8") from error

    def _take(self, num_bytes: int, what: str) -> bytes:
        end = self._position + num_bytes
        if end > self._size:
            raise self._damaged(f"{what} needs {num_bytes} bytes at {self._position}, the file has {self._size}")
        taken = bytes(self._data[self._position : end])
        self._position = end
        return taken

    def _damaged(self, detail: str) -> BadInputError:
        return BadInputError(f"{self._path} is not a sound GGUF file: {detail}; it may be truncated: fetch it again")
