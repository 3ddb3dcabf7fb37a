"""Starts the engine as a child process and ends it. Never imports it: the server side stays free of torch."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

_TERMINATE_GRACE_S = 5.0

OPENMP_ENVIRONMENT = {"GOMP_SPINCOUNT": "2000"}
"""How long torch's threads spin at a barrier before they sleep. Spinning for longer gains nothing on an idle machine, but beside one
busy process, such as the HTTP server on the same cores, it loses whole time slices: matrices of a token took up to 30 times as long."""


class EngineProcess:
    """One `python -m paceline.engine.loop` and the private directory of its sockets. As a context manager it ends with the block."""

    def __init__(self) -> None:
        """Makes the directory, where the client binds its sockets; the process may be spawned before, and waits for them."""
        self.directory = Path(tempfile.mkdtemp(prefix="paceline-"))  # mkdtemp makes it 0700: no other user can reach the sockets
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop(grace_s=0.0)

    def spawn(self, threads: int | None) -> None:
        """Starts the process; it waits for a Launch message. `threads` is fixed before torch loads (None: physical cores)."""
        environment = {**OPENMP_ENVIRONMENT, **os.environ}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.engine.loop", str(self.directory), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            env=environment,
            process_group=0,  # Ctrl-C reaches the server, which ends the engine in order
        )

    @property
    def is_spawned(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the engine has not been spawned"
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self, grace_s: float = _TERMINATE_GRACE_S) -> None:
        """Wait `grace_s` for the process to end by itself, then kill it; removes the socket directory. More calls do nothing."""
        if self._process is not None:
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGKILL)
                self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
