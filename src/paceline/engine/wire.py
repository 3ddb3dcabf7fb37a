"""The frames between server and engine: msgpack over ZMQ on ipc sockets, never pickle. Narrow enough to be written in another language.

One message a frame; either side may send several frames together, the engine the deltas of one step. Client to engine: Launch (once,
first), Submit, Abort, Shutdown. Engine to client: Progress, Ready or Failed, then Deltas and Stats. For `engine/client.py` and
`engine/loop.py`.
"""

from collections.abc import Callable, Sequence

import msgspec
import zmq

from paceline.config import EngineConfig
from paceline.core.facts import EngineFacts
from paceline.core.outcome import TokenDelta
from paceline.core.request import Request
from paceline.core.stats import EngineStats

_MAX_FRAME_BYTES = 64 * 1024 * 1024  # a 2-million-token prompt is 10 MB; more is a fault, refused before allocation
_MAX_DELTAS_IN_FRAME = 128  # the client decodes a frame at a stretch: of 1,000 deltas for 1.5 ms, in which it does nothing else

_ORPHAN_CHECK_MS = 250


class Launch(msgspec.Struct, frozen=True, tag=True):
    """What to load: the configuration and the folders that its model names were resolved to."""

    config: EngineConfig
    folder: str
    draft_folder: str | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop after the current step."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How far loading is; `total` is 0 when unknown."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    facts: EngineFacts


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine ends. `exit_code` is that of the error in `errors.py` it came from."""

    reason: str
    exit_code: int


class Deltas(msgspec.Struct, frozen=True, tag=True):
    deltas: tuple[TokenDelta, ...]


class Stats(msgspec.Struct, frozen=True, tag=True):
    stats: EngineStats


ToEngine = Launch | Submit | Abort | Shutdown
FromEngine = Progress | Ready | Failed | Deltas | Stats

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_from_engine(frame: bytes) -> FromEngine:
    """Raises msgspec.DecodeError for anything that is not one of the engine's messages."""
    return _from_engine.decode(frame)


def requests_endpoint(directory: str) -> str:
    return f"ipc://{directory}/requests"


def deltas_endpoint(directory: str) -> str:
    return f"ipc://{directory}/deltas"


class EnginePort:
    """The engine's end of the sockets. `directory` holds both and is readable by its owner only."""

    def __init__(self, directory: str) -> None:
        self._context = zmq.Context(1)
        self._in = self._context.socket(zmq.PULL)
        self._out = self._context.socket(zmq.PUSH)
        self._in.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        # No high-water mark: a full queue must never freeze the engine for everyone, and what can queue up is small, the tokens
        # of the running requests and four reports a second.
        for socket in (self._in, self._out):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self._in.connect(requests_endpoint(directory))
        self._out.connect(deltas_endpoint(directory))

    def receive_launch(self, is_orphan: Callable[[], bool]) -> Launch | None:
        """Wait for the first message, which must be a Launch; None once nobody is left who could send it."""
        while not self._in.poll(_ORPHAN_CHECK_MS):
            if is_orphan():
                return None
        message = _to_engine.decode(self._in.recv())
        if not isinstance(message, Launch):
            raise msgspec.ValidationError(f"expected Launch first, got {type(message).__name__}")
        return message

    def receive(self, timeout_s: float) -> list[Submit | Abort | Shutdown]:
        """All messages that are there; waits up to `timeout_s` for the first. A frame that cannot be decoded is dropped."""
        messages: list[Submit | Abort | Shutdown] = []
        if timeout_s > 0 and not self._in.poll(int(timeout_s * 1e3) + 1):
            return messages
        while True:
            try:
                frames = self._in.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            for frame in frames:
                try:
                    message = _to_engine.decode(frame)
                except msgspec.DecodeError:
                    continue
                if not isinstance(message, Launch):
                    messages.append(message)

    def send(self, message: FromEngine) -> None:
        self._out.send(encode(message))

    def send_deltas(self, deltas: Sequence[TokenDelta]) -> None:
        """Send the deltas of one step, as one message of one or more frames."""
        starts = range(0, len(deltas), _MAX_DELTAS_IN_FRAME)
        frames = [encode(Deltas(tuple(deltas[start : start + _MAX_DELTAS_IN_FRAME]))) for start in starts]
        if frames:
            self._out.send_multipart(frames)

    def update(self, stage: str, done: int, total: int) -> None:
        """The port is a `core.progress.Progress`: loading tells the client how far it is."""
        self.send(Progress(stage, done, total))

    def close(self) -> None:
        """Flush what was sent (for at most 2 s, in case the client is gone) and close."""
        self._in.close(linger=0)
        self._out.close(linger=2000)
        self._context.term()
