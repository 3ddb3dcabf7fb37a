"""From a model folder to a program and its tensors: the table of architectures, and safetensors read one tensor at a time.

The executor calls it once per model. Device half: tensors are torch's. Reading shapes and texts of a folder is `spec.py` and `folder.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

import torch
from safetensors import SafetensorError, safe_open

from paceline.core.program import ModelSpec, Op, Program
from paceline.errors import BadInputError, UnsupportedModelError
from paceline.models.folder import read_config, weight_files
from paceline.models.spec import architecture_of, read_spec, tensor_shapes

MODELS: dict[str, str] = {  # architecture -> "module:function", imported when used; the function is ops(spec) -> tuple[Op, ...]
    "llama": "paceline.models.llama:ops",
    "qwen2": "paceline.models.qwen2:ops",
    "qwen3": "paceline.models.qwen3:ops",
}
_FLOAT_DTYPES = ("F32", "F16", "BF16")


def load_program(folder: Path) -> Program:
    """Read config.json and build the list of ops.

    Errors: UnsupportedModelError for an architecture or feature that this build does not run, BadInputError for a broken config.
    """
    config = read_config(folder)
    architecture = architecture_of(config)
    if architecture not in MODELS:
        raise UnsupportedModelError(f"{folder} holds a {architecture!r} model; supported architectures are {', '.join(MODELS)}")
    spec = read_spec(config)
    module_name, _, function_name = MODELS[architecture].partition(":")
    build = cast(Callable[[ModelSpec], tuple[Op, ...]], vars(import_module(module_name))[function_name])
    return Program(spec=spec, ops=build(spec))


def load_weights(folder: Path, program: Program, dtype: torch.dtype) -> "CheckpointTensors":
    """Open the folder's safetensors, check that every tensor of the program is there in the right shape, and give them as `dtype`."""
    tensors = CheckpointTensors(folder, dtype)
    try:
        tensors.check(program)
    except BaseException:
        tensors.close()
        raise
    return tensors


class _SafeSlice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class _SafeFile(Protocol):
    """What is used of safetensors' reader, whose own types are not complete."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _SafeSlice: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


class CheckpointTensors(Mapping[str, torch.Tensor]):
    """The tensors of a folder by name, read from the mapped file each time they are asked for and converted to `dtype` (None: as stored).

    Nothing is kept, so a caller that packs one tensor after the other never holds two copies of the model. A context manager;
    asking for a tensor that the checkpoint lacks is a BadInputError, not a KeyError.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        self._folder = folder
        self._dtype = dtype
        self._files = ExitStack()
        self._file_of: dict[str, _SafeFile] = {}
        try:
            self._open(weight_files(folder))
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files; tensors that were handed out unconverted keep their part alive."""
        self._file_of.clear()
        self._files.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._file(name).get_tensor(name)
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape, without reading the tensor."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def check(self, program: Program) -> None:
        """Refuse a checkpoint in which a tensor of the program is missing, has another shape than config.json says, or is not float."""
        expected = tensor_shapes(program.spec)
        for name in sorted({name for op in program.ops for _, name in op.weights}):
            stored = self._file(name).get_slice(name)
            if stored.get_dtype() not in _FLOAT_DTYPES:
                raise UnsupportedModelError(
                    f"{self._folder}: {name} is stored as {stored.get_dtype()}, not one of {', '.join(_FLOAT_DTYPES)}"
                )
            shape = tuple(stored.get_shape())
            if name in expected and shape != expected[name]:
                raise BadInputError(f"{self._folder}: {name} has shape {list(shape)}, config.json asks for {list(expected[name])}")

    def _file(self, name: str) -> _SafeFile:
        if name not in self._file_of:
            raise BadInputError(f"{self._folder} lacks the tensor {name}; its weights and its config.json do not belong together")
        return self._file_of[name]

    def _open(self, files: dict[str, str] | list[Path]) -> None:
        if isinstance(files, list):
            for path in files:
                file = self._open_file(path)
                self._file_of |= dict.fromkeys(file.keys(), file)
            return
        opened = {name: self._open_file(self._folder / name) for name in sorted(set(files.values()))}
        held = {name: set(file.keys()) for name, file in opened.items()}
        for tensor, name in files.items():
            if tensor not in held[name]:
                raise BadInputError(f"{self._folder}: the index places {tensor} in {name}, which does not hold it; fetch the folder again")
            self._file_of[tensor] = opened[name]

    def _open_file(self, path: Path) -> _SafeFile:
        try:
            return cast(_SafeFile, self._files.enter_context(safe_open(path, framework="pt")))
        except (SafetensorError, OSError) as error:
            raise BadInputError(f"{path} is damaged or truncated ({error}); fetch it again") from error
