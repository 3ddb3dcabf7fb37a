"""Writes a safetensors file piece by piece, so that no tensor is ever whole in memory. Torch-free; `convert.py` is the only user.

The `safetensors` package writes only what is in memory all at once. Reading is the package's: see `checkpoint.py`.
Format: https://github.com/huggingface/safetensors#format
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

_DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Name, element type ("BF16", "F16", "F32" or "U8") and shape of a tensor in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _DTYPE_BYTES[self.dtype]


class SafetensorsWriter:
    """A new file that takes the announced tensors in order. A context manager."""

    def __init__(self, path: Path, tensors: Iterable[StoredTensor], metadata: Mapping[str, str] | None = None) -> None:
        self._pending = list(tensors)
        header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        end = 0
        for tensor in self._pending:
            start, end = end, end + tensor.num_bytes
            header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # readers map the data, which must start aligned
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        assert error is not None or not self._pending, "tensors were announced and not written"

    def write(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Write the next tensor: its elements in row order, little-endian, in any number of pieces."""
        tensor = self._pending.pop(0)
        assert tensor.name == name, f"{tensor.name} comes before {name}"
        written = sum(self._file.write(piece) for piece in pieces)
        assert written == tensor.num_bytes, f"{name}: {written} bytes instead of {tensor.num_bytes}"
