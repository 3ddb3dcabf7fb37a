"""How long work on disk tells its progress. The CLI implements it with a progress bar; library code prints nothing. Torch-free."""

from typing import Protocol


class Progress(Protocol):
    """Receives `update` calls of one job; stages come one after the other."""

    def update(self, stage: str, done: int, total: int) -> None:
        """Say that `done` of `total` units (bytes, unless the stage's name says otherwise) of `stage` are done; total 0 is unknown."""
        ...


class SilentProgress:
    """Ignores every update."""

    def update(self, stage: str, done: int, total: int) -> None:
        pass
