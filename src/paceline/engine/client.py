"""The server's side of the engine: starts it, sends requests, hands each one its deltas. Imports neither torch nor the engine.

One asyncio task reads the engine's frames and another watches the process; per-request queues are the only other state.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from paceline.config import EngineConfig
from paceline.core.facts import EngineFacts
from paceline.core.outcome import TokenDelta
from paceline.core.progress import Progress
from paceline.core.request import Request
from paceline.core.stats import EngineStats
from paceline.engine import wire
from paceline.engine.process import EngineProcess
from paceline.errors import BadInputError, EngineDeadError, MissingError

_WATCH_INTERVAL_S = 0.2
_CONNECT_INTERVAL_S = 0.02
_MAX_LAST_LOOKS = 100  # at a reader that still hands out what an engine sent before it ended
_MAX_MESSAGES_AT_ONCE = 8
# Of reading and handing out one step's deltas: those of a thousand streams take 25 ms, which new requests and /metrics would wait at a
# stretch. What is handed out is written to the connections after the slice, which takes as long again. Shorter slices cost more than they
# save: each wakes the clients anew.
_SLICE_S = 0.001


DeltaSink = Callable[[TokenDelta, Sequence[TokenDelta]], bool]
"""Takes a delta, and those behind it, in place of the reader (True), or leaves all of them to the reader (False). Must not block.

There are some behind it only where the event loop is behind, and none of several has a finish reason.
"""


class _Inbox:
    """The deltas of one request on their way to its one reader. An asyncio.Queue costs three times as much, at every token.

    What `sink` takes while the reader waits needs no way through a task, which costs as much again.
    """

    __slots__ = ("_sink", "_waiter", "deltas", "is_new")

    def __init__(self, sink: DeltaSink | None) -> None:
        self.deltas: deque[TokenDelta | Exception | None] = deque()  # an error of the sink; None: the engine is gone
        self._sink = sink
        self._waiter: asyncio.Future[None] | None = None
        self.is_new = True  # nothing has come yet

    def put(self, delta: TokenDelta, more: Sequence[TokenDelta] = ()) -> None:
        self.is_new = False
        waiter = self._waiter
        if self._sink is not None and waiter is not None and not waiter.done():
            try:
                if self._sink(delta, more):
                    return
                self.deltas += (delta, *more)
            except Exception as error:  # it is this reader's alone
                self.deltas.append(error)
        else:
            self.deltas += (delta, *more)
        self._wake()

    def end(self) -> None:
        """The engine is gone."""
        self.deltas.append(None)
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def arrival(self) -> asyncio.Future[None]:
        """Done once a delta is there; for use while there is none."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


class EngineClient:
    """A running engine. Made by `start`; `close` ends it."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._out_context, self._in_context = zmq.Context(1), zmq.asyncio.Context(1)
        # Sending never waits: with no high-water mark it fails at once if, and only if, the engine is not there.
        self._out = self._out_context.socket(zmq.PUSH)
        self._in = self._in_context.socket(zmq.PULL)
        for socket in (self._out, self._in):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
        self._in_now: zmq.SyncSocket = zmq.Socket(shadow=self._in)  # the same one, for what is there already
        self._outbox: list[wire.Submit | wire.Abort] = []
        self._is_handing_out = False  # what was read last
        self._slice_end_s = 0.0  # time.monotonic() when the reader next lets other work in
        self._queues: dict[str, _Inbox] = {}
        self._stats = EngineStats()
        self._death: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._facts: EngineFacts | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        folder: Path,
        draft_folder: Path | None = None,
        progress: Progress | None = None,
        process: EngineProcess | None = None,
    ) -> "EngineClient":
        """Start an engine on a model folder and wait until it can serve.

        `process`: one that may have been spawned already, with `config.threads`; `close` ends it as it ends an own one.

        Raises what the engine raised while loading (BadInputError, MissingError), or EngineDeadError if it ended without a word.
        """
        client = cls(process or EngineProcess())
        try:
            client._bind()
            if not client._process.is_spawned:
                client._process.spawn(config.threads)
            await client._launch(wire.Launch(config, str(folder), str(draft_folder) if draft_folder else None), progress)
        except BaseException:
            await client.close(grace_s=0.0)
            raise
        client._tasks = [asyncio.create_task(client._read()), asyncio.create_task(client._watch())]
        return client

    @property
    def facts(self) -> EngineFacts:
        assert self._facts is not None, "facts are known once start() has returned"
        return self._facts

    @property
    def is_alive(self) -> bool:
        return self._death is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def stats(self) -> EngineStats:
        """The engine's latest report, at most a step or 250 ms old."""
        return self._stats

    async def submit(self, request: Request, sink: DeltaSink | None = None) -> AsyncIterator[TokenDelta]:
        """Run a request and yield its deltas; the last one has a finish reason. `sink` is offered those that come while the reader waits.

        Closing the iterator early aborts the request. Raises EngineDeadError when the engine is or goes away.
        """
        if self._death is not None:
            raise EngineDeadError(self._death)
        assert request.request_id not in self._queues, f"request id {request.request_id} is in use"
        inbox = self._queues[request.request_id] = _Inbox(sink)
        finished = False
        try:
            self._post_soon(wire.Submit(request))
            while not finished:
                if not inbox.deltas:
                    await inbox.arrival()
                delta = inbox.deltas.popleft()
                if delta is None:
                    finished = True
                    raise EngineDeadError(self._death or "the engine ended")
                if isinstance(delta, Exception):
                    raise delta
                finished = delta.finish_reason is not None
                yield delta
        finally:
            del self._queues[request.request_id]
            if not finished and self._death is None:
                self._post_soon(wire.Abort(request.request_id))

    async def close(self, grace_s: float = 5.0) -> None:
        """End the engine: asks, waits `grace_s`, then kills. Requests still running end with EngineDeadError."""
        for task in self._tasks:
            task.cancel()
        self._flush()
        self._post(wire.Shutdown())
        await asyncio.to_thread(self._process.stop, grace_s)
        self._die("the engine was stopped")
        self._out.close()
        self._in.close()
        self._out_context.term()
        self._in_context.term()

    async def _launch(self, launch: wire.Launch, progress: Progress | None) -> None:
        while not self._post(launch):  # until it has connected
            self._check_loading()
            await asyncio.sleep(_CONNECT_INTERVAL_S)
        while self._facts is None:
            if not await self._in.poll(int(_WATCH_INTERVAL_S * 1e3)):
                if not await self._in.poll(0):
                    self._check_loading()
                continue
            match wire.decode_from_engine(await self._in.recv()):
                case wire.Progress(stage, done, total):
                    if progress is not None:
                        progress.update(stage, done, total)
                case wire.Ready(facts):
                    self._facts = facts
                case wire.Failed(reason, exit_code):
                    raise {2: BadInputError, 3: MissingError}.get(exit_code, EngineDeadError)(reason)
                case _:
                    pass

    def _check_loading(self) -> None:
        code = self._process.exit_code()
        if code is not None:
            raise EngineDeadError(f"the engine ended with status {code} while loading; its output above says why")

    def _bind(self) -> None:
        directory = str(self._process.directory)
        try:
            self._out.bind(wire.requests_endpoint(directory))
            self._in.bind(wire.deltas_endpoint(directory))
        except zmq.ZMQError as error:
            raise MissingError(
                f"cannot make the engine's sockets in {directory}: {error}; set TMPDIR to a short path of a disk with room"
            ) from error

    def _post(self, *messages: wire.ToEngine) -> bool:
        """Hand messages to the engine; False if there is none to take them."""
        try:
            self._out.send_multipart([wire.encode(message) for message in messages], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _post_soon(self, message: wire.Submit | wire.Abort) -> None:
        """Send it with all others of this round of the event loop: waking ZMQ's own thread costs more than the sending."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if not messages or self._out.closed or self._post(*messages):
            return
        for message in messages:  # the engine is gone
            if isinstance(message, wire.Submit) and message.request.request_id in self._queues:
                self._queues[message.request.request_id].end()

    async def _read(self) -> None:
        while True:
            steps: list[Sequence[TokenDelta]] = []
            reason: str | None = None
            self._is_handing_out = False
            messages = (await self._in.recv_multipart(), *self._waiting_messages())
            self._is_handing_out = True
            self._slice_end_s = time.monotonic() + _SLICE_S
            for frames in messages:
                step: list[TokenDelta] = []
                for frame in frames:
                    try:
                        message = wire.decode_from_engine(frame)
                    except msgspec.DecodeError:
                        continue  # not from our engine: only its owner can reach the socket, so nothing is lost
                    match message:
                        case wire.Deltas(deltas):
                            step += deltas
                        case wire.Stats(stats):
                            self._stats = stats
                        case wire.Failed(reason, _):
                            self._death = self._death or reason  # before the process is seen to have ended, which tells less
                        case _:
                            pass
                    if time.monotonic() > self._slice_end_s:
                        await self._let_others_in()
                if step:
                    steps.append(step)
            await self._hand_out(steps)
            if reason is not None:
                self._die(reason)

    def _waiting_messages(self) -> Iterator[list[bytes]]:
        """What came while the last step was handed out: the event loop is behind, and catches up by handing out several steps as one."""
        for _ in range(_MAX_MESSAGES_AT_ONCE - 1):
            try:
                yield self._in_now.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    async def _let_others_in(self) -> None:
        """End the reader's slice.

        Two rounds of the event loop: in the first it finds what has come to the sockets, and the tasks which that wakes or starts are
        behind this one in its order. They would wait for the next slice.
        """
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self._slice_end_s = time.monotonic() + _SLICE_S

    async def _hand_out(self, steps: Sequence[Sequence[TokenDelta]]) -> None:
        for delta, more in await self._by_request(steps):
            inbox = self._queues.get(delta.request_id)
            if inbox is not None:
                if more and more[-1].finish_reason is not None:
                    inbox.put(delta, more[:-1])
                    inbox.put(more[-1])
                else:
                    inbox.put(delta, more)
            if time.monotonic() > self._slice_end_s:
                await self._let_others_in()

    async def _by_request(self, steps: Sequence[Sequence[TokenDelta]]) -> Iterable[tuple[TokenDelta, Sequence[TokenDelta]]]:
        """Each request's first delta and those behind it, in their order.

        Of several steps first those of requests that have had none yet: they wait longest.
        """
        if len(steps) == 1:
            return zip(steps[0], repeat(()), strict=False)
        deltas_of: dict[str, list[TokenDelta]] = {}
        for deltas in steps:
            for delta in deltas:
                deltas_of.setdefault(delta.request_id, []).append(delta)
            if time.monotonic() > self._slice_end_s:
                await self._let_others_in()

        def has_begun(deltas: Sequence[TokenDelta]) -> bool:
            inbox = self._queues.get(deltas[0].request_id)
            return inbox is not None and not inbox.is_new

        return [(deltas[0], deltas[1:]) for deltas in sorted(deltas_of.values(), key=has_begun)]

    async def _watch(self) -> None:
        while self._process.exit_code() is None:  # noqa: ASYNC110 - a process gives no event without a thread of its own
            await asyncio.sleep(_WATCH_INTERVAL_S)
        for _ in range(_MAX_LAST_LOOKS):
            await asyncio.sleep(_CONNECT_INTERVAL_S)  # what it sent last is read meanwhile
            if not self._is_handing_out:
                break
        self._die(f"the engine process ended with status {self._process.exit_code()}")

    def _die(self, reason: str) -> None:
        if self._death is None:
            self._death = reason
        for inbox in self._queues.values():
            inbox.end()
