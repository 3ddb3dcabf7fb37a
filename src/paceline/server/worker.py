"""A child process for work that may hang, crash or take all memory: code of a model's or a request's author. Whoever calls can go on.

One child, one call at a time, started when first needed and again after every call that it did not survive. `worker_child.py` is its side.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.errors import MissingError, PacelineError
from paceline.server.worker_child import ANSWER, ANSWERED, FAILED, MAX_ERROR_BYTES, READY, REQUEST

_START_TIMEOUT_S = 30.0  # for Python to load the module on a machine that is busy
_STREAM_BYTES = 1 << 20  # of an answer that wait to be taken
_MAX_REQUEST_BYTES = (1 << 32) - 1  # what a frame's header can say
_MAX_AHEAD = 16  # requests with the child: those behind the first are there before it asks, which spares both sides a wait per call
_MAX_AHEAD_BYTES = 1 << 14  # of one that is sent ahead, or that others are sent behind
_UNASKED = "the worker process said what nobody asked"
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


@dataclass(slots=True, eq=False)
class _Call:
    """A request and its caller, who no longer waits once `answer` is done."""

    request: bytes
    timeout_s: float
    answer: asyncio.Future[bytes]
    patience: asyncio.TimerHandle | None = None  # ends the wait for its turn

    @property
    def is_small(self) -> bool:
        return len(self.request) <= _MAX_AHEAD_BYTES

    def take_turn(self) -> None:
        if self.patience is not None:
            self.patience.cancel()

    def fail(self, error: PacelineError) -> None:
        self.take_turn()
        if not self.answer.done():
            self.answer.set_exception(error)


class Worker:
    """Runs `python -m module`, which calls `worker_child.serve`. One call at a time; used from one event loop.

    Calls are served in their order, so whatever befalls the child befell the first one; those sent ahead are sent again to the next child.
    """

    def __init__(self, module: str, limits: WorkerLimits = WorkerLimits()) -> None:
        self._module = module
        self._limits = limits
        self._start_lock = asyncio.Lock()
        self._child: Process | None = None
        self._calls = deque[_Call]()  # the first of them has its turn
        self._num_sent = 0  # of the calls, from the first on
        self._will_send = False  # at the end of this round of the event loop
        self._serving: asyncio.Task[None] | None = None  # while there are calls
        self._num_callers = 0
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The child's, while there is one."""
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Start the child now, so that the first call does not wait for it. Raises WorkerUnavailableError."""
        async with self._start_lock:
            await self._running_child()

    async def call(self, request: bytes, timeout_s: float) -> bytes:
        """The child's answer to one request. The time counts from when the request's turn has come and the child runs.

        Raises WorkerTimeoutError, WorkerError if the work failed, WorkerUnavailableError if it was not tried. A caller that is
        cancelled while it has its turn takes the child along, so that no later one waits for what nobody wants.
        """
        if len(request) > _MAX_REQUEST_BYTES:
            raise WorkerError("OverflowError", f"the request has {len(request):,} bytes, limit {_MAX_REQUEST_BYTES:,}")
        if self._num_callers >= self._limits.max_callers:
            raise WorkerUnavailableError(
                f"{self._num_callers:,} requests wait for the same worker, its limit; send the request again later"
            )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        call = _Call(request, timeout_s, answer)
        call.patience = loop.call_later(self._limits.max_wait_s, self._lose_patience, call)
        self._num_callers += 1
        self._calls.append(call)
        if self._serving is None:
            call.take_turn()
            self._serving = loop.create_task(self._serve())
        elif self._num_sent:
            self._send_soon()
        try:
            return await answer
        except asyncio.CancelledError:
            if self._calls and self._calls[0] is call and self._child is not None and self._child.returncode is None:
                self._child.kill()
            self._withdraw(call)
            raise
        finally:
            self._num_callers -= 1

    async def close(self) -> None:
        """End the child, a call that it works on included; afterwards every call raises WorkerUnavailableError."""
        self._is_closed = True
        child = self._child
        if child is not None and child.returncode is None:
            child.kill()
        if self._serving is not None:
            await asyncio.wait([self._serving])
        async with self._start_lock:
            await self._end_child()

    def _lose_patience(self, call: _Call) -> None:
        waited = f"requests before this one kept their worker busy for {self._limits.max_wait_s:g} s"
        call.fail(WorkerUnavailableError(f"{waited}; send the request again later"))
        self._withdraw(call)

    def _withdraw(self, call: _Call) -> None:
        """Forget a call that nobody waits for. The answer to one that was sent still comes, and is nobody's."""
        call.take_turn()
        if all(self._calls[index] is not call for index in range(self._num_sent)) and call in self._calls:
            self._calls.remove(call)

    async def _serve(self) -> None:
        """Answer calls until there are none."""
        try:
            while self._calls:
                try:
                    async with self._start_lock:
                        child = await self._running_child()
                except WorkerUnavailableError as error:
                    while self._calls:
                        self._calls.popleft().fail(error)
                    return
                failure = await self._exchange(child)
                if failure is not None:
                    first = self._calls.popleft() if self._num_sent else None
                    self._num_sent = 0
                    await self._end_child()
                    if first is not None:
                        first.fail(failure)
                self._calls = deque[_Call](call for call in self._calls if not call.answer.done())  # the next child need not bother
        finally:
            self._serving = None

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
                kind, _ = ANSWER.unpack(await _output(child).readexactly(ANSWER.size))
        except (TimeoutError, asyncio.IncompleteReadError):
            kind = None
        except BaseException:
            await self._end_child()
            raise
        if kind != READY:
            await self._end_child()
            raise WorkerUnavailableError(f"the worker process {self._module} did not start; the server's log says why")

    async def _exchange(self, child: Process) -> WorkerError | None:
        """Send calls and take answers until none is left; returns why the first of the calls failed, and the child with it."""
        output, received = _output(child), bytearray()
        loop = asyncio.get_running_loop()
        self._send_ahead()
        turn_s = loop.time()
        while self._num_sent:
            first = self._calls[0]
            first.take_turn()
            try:
                async with asyncio.timeout_at(turn_s + first.timeout_s):
                    data = await output.read(_STREAM_BYTES)
                if not data:
                    return WorkerError(WorkerError.DIED, "the worker process ended before it answered")
                received += data
                for kind, payload in self._frames(received):
                    self._settle(kind, payload)
                    turn_s = loop.time()
            except TimeoutError:
                return WorkerTimeoutError(first.timeout_s)
            except WorkerError as error:
                return error
            self._send_ahead()
        return WorkerError(WorkerError.DIED, _UNASKED) if received else None

    def _send_soon(self) -> None:
        """Send what this round of the event loop brings together: each write wakes the child."""
        if not self._will_send:
            self._will_send = True
            asyncio.get_running_loop().call_soon(self._send_if_busy)

    def _send_if_busy(self) -> None:
        self._will_send = False
        if self._num_sent:  # else `_exchange` begins with it
            self._send_ahead()

    def _send_ahead(self) -> None:
        """Send the first call, and small ones behind a small one. Without waiting: what the child does not take is in the call's time."""
        assert self._child is not None
        assert self._child.stdin is not None
        if self._num_sent > _MAX_AHEAD // 2:
            return  # it has enough for now, and a write wakes it
        parts: list[bytes] = []
        while self._num_sent < len(self._calls):
            call = self._calls[self._num_sent]
            may_follow = self._num_sent < _MAX_AHEAD and call.is_small and self._calls[self._num_sent - 1].is_small
            if self._num_sent and not may_follow:
                break
            parts += (REQUEST.pack(len(call.request)), call.request)
            self._num_sent += 1
        if parts:
            self._child.stdin.write(b"".join(parts))

    def _settle(self, kind: int, payload: bytes) -> None:
        """Give the first call its answer."""
        if not self._num_sent or kind not in (ANSWERED, FAILED):
            raise WorkerError(WorkerError.DIED, _UNASKED)
        call = self._calls.popleft()
        self._num_sent -= 1
        call.take_turn()
        if kind == ANSWERED:
            if not call.answer.done():
                call.answer.set_result(payload)
            return
        name, _, message = payload.decode(errors="replace").partition("\n")
        call.fail(WorkerError(name, message))

    def _frames(self, received: bytearray) -> Iterator[tuple[int, bytes]]:
        """The whole frames in `received`, taken out of it. Raises WorkerError for one that breaks the rules of frames."""
        while len(received) >= ANSWER.size:
            kind, num_bytes = ANSWER.unpack_from(received)
            limit = {ANSWERED: self._limits.max_answer_bytes, FAILED: MAX_ERROR_BYTES, READY: 0}.get(kind, -1)
            if num_bytes > limit:
                raise WorkerError(WorkerError.DIED, f"the worker process announced {num_bytes:,} bytes, limit {max(limit, 0):,}")
            end = ANSWER.size + num_bytes
            if len(received) < end:
                return
            payload = bytes(received[ANSWER.size : end])
            del received[:end]
            yield kind, payload

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


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES)}
