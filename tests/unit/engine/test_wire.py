"""The frames: everything that crosses survives the round trip, and junk is dropped without harm."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from paceline.config import EngineConfig
from paceline.core.outcome import DraftStats, RequestStats, TokenDelta
from paceline.core.request import FinishReason, Request, SamplingParams
from paceline.core.stats import EngineStats, Speedup
from paceline.engine import wire

REQUEST = Request("r1", (1, 2, 3), SamplingParams(5, temperature=0.5, seed=2**64 - 1, stop_token_ids=(7,)), 12.5, 4, "salt")
STATS = RequestStats(DraftStats(3, 1, 9, 4, [1, 1, 1], 1), 2, 16, 0, 0.5, 10.0, 100.0)


@pytest.mark.parametrize(
    "message",
    [
        wire.Progress("load", 3, 7),
        wire.Failed("no memory", 3),
        wire.Deltas((TokenDelta("r1", (4, 5)), TokenDelta("r2", (), FinishReason.STOP, STATS))),
        wire.Deltas((TokenDelta("r1", (4,), is_control=True),)),
        wire.Stats(EngineStats(num_running=2, num_accepted_tokens_per_pos=[3, 1])),
        wire.Stats(EngineStats(speedups=(Speedup("rows=1,context=0-1k", 1.5, 1.25, 1.75, 30),), decode_read_rate=1e9)),
    ],
)
def test_messages_of_the_engine_survive(message: wire.FromEngine) -> None:
    assert wire.decode_from_engine(wire.encode(message)) == message


@pytest.mark.parametrize("frame", [b"", b"\x80", b"junk", wire.encode(wire.Shutdown()), b"\x81\xa4type\xa6Deltas"])
def test_anything_else_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_from_engine(frame)


def test_an_engine_may_connect_before_the_client_binds(tmp_path: Path) -> None:
    port, context = wire.EnginePort(str(tmp_path)), zmq.Context[zmq.SyncSocket](1)
    out = context.socket(zmq.PUSH)
    out.bind(wire.requests_endpoint(str(tmp_path)))
    launch = wire.Launch(EngineConfig(), "folder")
    out.send(wire.encode(launch))
    assert port.receive_launch(lambda: False) == launch
    port.close()
    out.close(linger=0)
    context.term()


@pytest.fixture
def wired(tmp_path: Path) -> Iterator[tuple[wire.EnginePort, zmq.SyncSocket, zmq.SyncSocket]]:
    """The engine's port, and the client's sockets: to it, from it."""
    context = zmq.Context()
    out, back = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    out.bind(wire.requests_endpoint(str(tmp_path)))
    back.bind(wire.deltas_endpoint(str(tmp_path)))
    port = wire.EnginePort(str(tmp_path))
    yield port, out, back
    port.close()
    context.destroy(linger=0)


def test_the_port_drops_junk_and_keeps_what_is_valid(wired: tuple[wire.EnginePort, zmq.SyncSocket, zmq.SyncSocket]) -> None:
    port, out, back = wired
    launch = wire.Launch(EngineConfig(draft="none"), "/models/x")
    out.send(wire.encode(launch))
    out.send(b"\xc1junk")
    out.send_multipart([wire.encode(wire.Submit(REQUEST)), b"", wire.encode(wire.Abort("r1"))])
    out.send(wire.encode(wire.Abort("r2")))
    assert port.receive_launch(lambda: False) == launch
    received: list[object] = []
    while len(received) < 3:
        received += port.receive(1.0)
    assert received == [wire.Submit(REQUEST), wire.Abort("r1"), wire.Abort("r2")]
    port.send_deltas([])  # nothing to say sends nothing
    port.send_deltas([TokenDelta("r1", (9,))])
    assert wire.decode_from_engine(back.recv()) == wire.Deltas((TokenDelta("r1", (9,)),))


def test_the_deltas_of_a_large_step_are_one_message_of_small_frames(
    wired: tuple[wire.EnginePort, zmq.SyncSocket, zmq.SyncSocket],
) -> None:
    port, _, back = wired
    step = [TokenDelta(f"r{number}", (number,)) for number in range(300)]
    port.send_deltas(step)
    messages = [wire.decode_from_engine(frame) for frame in back.recv_multipart()]
    parts = [message.deltas for message in messages if isinstance(message, wire.Deltas)]
    assert [len(part) for part in parts] == [128, 128, 44]
    assert [delta for part in parts for delta in part] == step


def test_an_engine_without_a_parent_stops_waiting_for_its_launch(tmp_path: Path) -> None:
    port = wire.EnginePort(str(tmp_path))
    assert port.receive_launch(lambda: True) is None
    port.close()
