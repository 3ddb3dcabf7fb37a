"""The seam between a model and those who run it: the executor for the target, the draft-model drafter for its own.

A runner (walk.py, script.py, native.py) implements it; `load.py` makes one.
"""

from typing import Protocol

import torch

from paceline.core.batch import Batch, ForwardResult
from paceline.core.facts import Choice
from paceline.core.kv import KvPages
from paceline.core.program import ModelSpec


class Forward(Protocol):
    """A loaded model."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The runner and the implementation of every op, for the start-up table."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """The number format of the KV memory that `run` takes."""
        ...

    def run(self, batch: Batch, kv: KvPages) -> ForwardResult:
        """Run every token of `batch`, write its KV into `kv`, and return the logits that it asks for.

        The result is valid until the next run.
        """
        ...
