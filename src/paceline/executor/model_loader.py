"""Loads one model from its folder: quantised for the native step, or as floats for torch. Called by `load.py`, for target and drafter."""

from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.config import EngineConfig
from paceline.core.facts import Choice
from paceline.core.progress import Progress
from paceline.errors import BadInputError
from paceline.executor.bandwidth import read_bandwidth
from paceline.executor.quantisation import Remembered, decide
from paceline.forward.forward import Forward
from paceline.forward.load import load_forward, load_native
from paceline.forward.native import Pool
from paceline.forward.packed import Weights
from paceline.forward.packed_cache import PackedCache, folder_identity
from paceline.models.blocks import BlockTensors
from paceline.models.folder import stored_weight_files
from paceline.models.loader import load_program, load_weights
from paceline.native.library import Library, load

_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_DEVICES = ("auto", "cpu")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, the name of its weights' number format, and its lines of the start-up table."""

    forward: Forward
    dtype: str
    choices: tuple[Choice, ...]


class ModelLoader:
    """For the models of one engine, which share the threads of the native step."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        if config.device not in _DEVICES:
            raise BadInputError(f"device {config.device!r} is not in this build, which has {', '.join(_DEVICES)}", param="device")
        if config.dtype not in _DTYPES:
            raise BadInputError(f"dtype {config.dtype!r} is not in this build, which has {', '.join(_DTYPES)}", param="dtype")
        self._config = config
        self._progress = progress
        self._num_threads = torch.get_num_threads()
        self._pool: Pool | None = None  # started for the first model that needs it

    def load(self, folder: Path, stage: str) -> Loaded:
        """Errors: UnsupportedModelError or BadInputError for what this build cannot run; `stage` names the work for progress."""
        program = load_program(folder)
        library = load()
        with BlockTensors(folder) as blocks, load_weights(folder, program, torch.float32) as tensors:
            blocks.check(program)
            identity = folder_identity(folder, stored_weight_files(folder))
            decision = decide(self._config, program, blocks, library, lambda: read_bandwidth(self._num_threads), Remembered(identity))
            note = Choice("quantization", decision.scheme or "none", decision.reason)
            if decision.scheme is None:
                dtype = _DTYPES[self._config.dtype]
                forward = load_forward(program, tensors, dtype, stage, self._progress)
                return Loaded(forward, str(dtype).removeprefix("torch."), (note, *forward.choices))
            assert isinstance(library, Library), "without it nothing is quantised"
            cache = PackedCache(identity, decision.scheme)
            forward = load_native(program, Weights(tensors, blocks), decision.scheme, self._pool_of(library), cache, stage, self._progress)
            return Loaded(forward, decision.scheme, (note, *forward.choices))

    def _pool_of(self, library: Library) -> Pool:
        if self._pool is None:
            self._pool = Pool(library, self._num_threads)
        return self._pool
