"""Reads the quantised matrices that `convert.py` kept from a GGUF file. `executor/load.py` opens them beside the float tensors."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from paceline.core.program import Program
from paceline.errors import BadInputError
from paceline.models.folder import BLOCKS_FILE
from paceline.models.spec import tensor_shapes
from paceline.quant.blocks import is_block_kind, row_bytes


class _SafeFile(Protocol):
    def keys(self) -> list[str]: ...
    def metadata(self) -> dict[str, str] | None: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


class BlockTensors:
    """The blocks of a folder by tensor name; empty for a folder without. A context manager; arrays keep their part of the file mapped."""

    kinds: Mapping[str, str]  # tensor name -> ggml's type, such as Q4_K

    def __init__(self, folder: Path) -> None:
        self._path = folder / BLOCKS_FILE
        self._files = ExitStack()
        self._file: _SafeFile | None = None
        self.kinds = {}
        if self._path.is_file():
            try:
                self._file = cast(_SafeFile, self._files.enter_context(safe_open(self._path, framework="pt")))
            except (SafetensorError, OSError) as error:
                raise self._damaged(str(error)) from error
            stored = self._file.metadata() or {}
            self.kinds = {name: stored.get(name, "") for name in self._file.keys()}  # noqa: SIM118 - it is no mapping

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file = None
        self._files.close()

    def rows(self, name: str) -> NDArray[np.uint8]:
        """A matrix `[rows, bytes]`, mapped."""
        assert self._file is not None, f"{name} is not among the blocks"
        packed: NDArray[np.uint8] = self._file.get_tensor(name).numpy()
        return packed

    def check(self, program: Program) -> None:
        """Refuse blocks that are not those of the program's matrices. Errors: BadInputError."""
        shapes = tensor_shapes(program.spec)
        for name, kind in self.kinds.items():
            shape = shapes.get(name)
            if shape is None or len(shape) != 2 or not is_block_kind(kind):
                raise self._damaged(f"{name} of the type {kind or 'unknown'} is no quantised matrix of this model")
            found, expected = self.rows(name), (shape[0], row_bytes(kind, shape[1]))
            if found.shape != expected or found.dtype != np.uint8:
                raise self._damaged(f"{name} has {list(found.shape)} elements of {found.dtype}, {kind} needs {list(expected)} bytes")

    def _damaged(self, detail: str) -> BadInputError:
        return BadInputError(f"{self._path} is damaged ({detail}); remove the model with `paceline models evict` and fetch it again")
