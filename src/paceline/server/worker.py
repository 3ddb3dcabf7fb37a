"""A child process for work that may hang, crash or take all memory: code of a model's or a request's author. Whoever calls can go on.

One child, started when first needed and again after every call that it did not survive. `worker_child.py` is its side.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import MissingError, PacelineError
from paceline.server.worker_child import ANSWER, ANSWERED, FAILED, MAX_ERROR_BYTES, READY, REQUEST

_START_TIMEOUT_S = 30.0  # for Python to load the module on a machine that is busy
_STREAM_BYTES = 1 << 20  # of an answer that wait to be taken
_MAX_REQUEST_BYTES = (1 << 32) - 1  # what a frame's header can say
_CLOSED = "the server is shutting down"
# What a child needs in order to start. Others, keys and passwords above all, are not for code of strangers.
_VARIABLES = ("PATH", "HOME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV")
_VARIABLE_PREFIXES = ("PYTHON", "LD_", "LC_")


class WorkerError(PacelineError):
    """The work failed: `kind` is the class of the exception in the child, or DIED if the child itself ended."""

    DIED = "died"

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class WorkerTimeoutError(WorkerError):
    """The work took too long, and the child has been killed."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__("timeout", f"no answer within {timeout_s:g} s")


class WorkerUnavailableError(MissingError):
    """The work was not tried: too many callers wait, the child cannot be started, or the worker is closed. HTTP 503."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one child may take."""

    memory_bytes: int = 1 << 30  # address space beyond what it has once it is loaded
    cpu_s: int = 60  # CPU time of one call, all threads; the time limit of a call is meant to come first
    max_answer_bytes: int = 64 << 20
    max_callers: int = 4096  # the one that is served and those that wait
    max_wait_s: float = 10.0  # for one's turn: by then several others have hung


class Worker:
    """Runs `python -m module`, which calls `worker_child.serve`. One call at a time; used from one event loop."""

    def __init__(self, module: str, limits: WorkerLimits = WorkerLimits()) -> None:
        self._module = module
        self._limits = limits
        self._lock = asyncio.Lock()
        self._child: Process | None = None
        self._num_callers = 0
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The child's, while there is one."""
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Start the child now, so that the first call does not wait for it. Raises WorkerUnavailableError."""
        async with self._lock:
            await self._running_child()

    async def call(self, request: bytes, timeout_s: float) -> bytes:
        """The child's answer to one request. The time counts from when the request's turn has come and the child runs.

        Raises WorkerTimeoutError, WorkerError if the work failed, WorkerUnavailableError if it was not tried. A caller that is
        cancelled takes the child along, so that no later one gets its answer.
        """
        if len(request) > _MAX_REQUEST_BYTES:
            raise WorkerError("OverflowError", f"the request has {len(request):,} bytes, limit {_MAX_REQUEST_BYTES:,}")
        if self._num_callers >= self._limits.max_callers:
            raise WorkerUnavailableError(
                f"{self._num_callers:,} requests wait for the same worker, its limit; send the request again later"
            )
        self._num_callers += 1
        try:
            await self._take_turn()
            try:
                return await self._exchange(await self._running_child(), request, timeout_s)
            finally:
                self._lock.release()
        finally:
            self._num_callers -= 1

    async def close(self) -> None:
        """End the child, a call that it works on included; afterwards every call raises WorkerUnavailableError."""
        self._is_closed = True
        child = self._child
        if child is not None and child.returncode is None:
            child.kill()
        async with self._lock:  # whoever was served has seen the end
            await self._end_child()

    async def _take_turn(self) -> None:
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                await self._lock.acquire()
        except TimeoutError:
            raise WorkerUnavailableError(
                f"requests before this one kept their worker busy for {self._limits.max_wait_s:g} s; send the request again later"
            ) from None

    async def _running_child(self) -> Process:
        if self._is_closed:
            raise WorkerUnavailableError(_CLOSED)
        if self._child is not None and (self._child.returncode is not None or _output(self._child).at_eof()):
            await self._end_child()  # it died between two calls
        if self._child is None:
            self._child = await self._spawn()
            await self._await_ready(self._child)
        if self._is_closed:  # meanwhile
            await self._end_child()
            raise WorkerUnavailableError(_CLOSED)
        return self._child

    async def _spawn(self) -> Process:
        limits = self._limits
        arguments = (limits.memory_bytes, limits.cpu_s, limits.max_answer_bytes, os.getpid())
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # nothing from the working directory
                "-m",
                self._module,
                *map(str, arguments),
                stdin=PIPE,
                stdout=PIPE,
                limit=_STREAM_BYTES,
                env=_environment(os.environ),
                start_new_session=True,  # Ctrl-C in the terminal is for the parent
            )
        except OSError as error:
            raise WorkerUnavailableError(f"a worker process cannot be started: {error.strerror}") from error

    async def _await_ready(self, child: Process) -> None:
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                kind, _ = await self._read(child)
        except (TimeoutError, WorkerError):
            kind = None
        except BaseException:
            await self._end_child()
            raise
        if kind != READY:
            await self._end_child()
            raise WorkerUnavailableError(f"the worker process {self._module} did not start; the server's log says why")

    async def _exchange(self, child: Process, request: bytes, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                await _write(child, request)
                kind, payload = await self._read(child)
        except BaseException as error:  # a cancelled caller's as well: what the child still says is nobody's
            await self._end_child()
            if isinstance(error, TimeoutError):
                raise WorkerTimeoutError(timeout_s) from None
            raise
        if kind == ANSWERED:
            return payload
        name, _, message = payload.decode(errors="replace").partition("\n")
        raise WorkerError(name, message)

    async def _read(self, child: Process) -> tuple[int, bytes]:
        """The next frame. Raises WorkerError if the child ended, or breaks the rules of frames."""
        output = _output(child)
        try:
            kind, num_bytes = ANSWER.unpack(await output.readexactly(ANSWER.size))
            limit = {ANSWERED: self._limits.max_answer_bytes, FAILED: MAX_ERROR_BYTES, READY: 0}.get(kind, -1)
            if num_bytes > limit:
                raise WorkerError(WorkerError.DIED, f"the worker process announced {num_bytes:,} bytes, limit {max(limit, 0):,}")
            return kind, await output.readexactly(num_bytes)
        except asyncio.IncompleteReadError:
            raise WorkerError(WorkerError.DIED, "the worker process ended before it answered") from None

    async def _end_child(self) -> None:
        """Kill the child, if there is one, and wait until it is gone."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.returncode is None:
            child.kill()
        output = _output(child)
        while await output.read(_STREAM_BYTES):  # a pipe that nobody reads would keep the transport open
            pass
        await child.wait()


def _output(child: Process) -> asyncio.StreamReader:
    assert child.stdout is not None
    return child.stdout


async def _write(child: Process, request: bytes) -> None:
    assert child.stdin is not None
    child.stdin.write(REQUEST.pack(len(request)))
    child.stdin.write(request)
    try:
        await child.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the read that follows sees the end, too


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES)}
