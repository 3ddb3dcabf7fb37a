"""A worker without a process: the child's module runs in the caller's, its exceptions become the worker's errors."""

import importlib

from paceline.server.worker import WorkerError, WorkerLimits
from paceline.server.worker_child import error_payload


class InlineWorker:
    """In place of `server.worker.Worker` where a test is not about limits. `run` of the module is the handler."""

    def __init__(self, module: str, limits: WorkerLimits | None = None) -> None:
        self._run = importlib.import_module(module).run

    async def call(self, request: bytes, timeout_s: float) -> bytes:
        try:
            return self._run(request)
        except Exception as error:
            kind, _, message = error_payload(error).decode().partition("\n")
            raise WorkerError(kind, message) from None

    async def close(self) -> None:
        pass
