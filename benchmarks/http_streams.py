"""The HTTP path alone: many concurrent streams of an engine that costs nothing. `python benchmarks/http_streams.py`

Three processes: this one loads over raw sockets, the server is Paceline's own up to the engine's sockets, and behind those sits a
stand-in that gives every stream a token 20 times a second. Prints when the last stream had its first byte, what a chunk costs the
server's core, and how long /metrics takes beside the streams (a fourth process, `metrics_scrapes.py`), and appends all three to
benchmarks/results/http.jsonl. (Not called http.py: that would hide Python's own `http` from every script beside it.)
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.core.facts import EngineFacts

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "http.jsonl"
GOAL_FIRST_BYTES_S = 2.0
GOAL_CHUNK_US = 30.0
GOAL_METRICS_MS = 5.0
_MAX_FOREIGN_SHARE = 0.10
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SERVER_CPU = 0  # the server has this core for itself where there are several


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens-per-second", type=float, default=20.0, help="of each stream")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long a stream is")
    parser.add_argument("--profile", type=Path, help="write the server's cProfile here; its figures are then no result")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)  # the server's process: a model folder
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # the stand-in's process: the directory of the sockets
    arguments = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * arguments.streams)), hard))
    if arguments.engine:
        pin(is_server=False)
        run_engine(arguments.engine, arguments.tokens_per_second)
    elif arguments.serve:
        pin(is_server=True)
        run_profiled(arguments)
    else:
        pin(is_server=False)
        run_load(arguments)


def pin(is_server: bool) -> None:
    """The server on a core of its own, all else on the others."""
    cpus = set(range(os.cpu_count() or 1))
    if len(cpus) > 1:
        os.sched_setaffinity(0, {_SERVER_CPU} if is_server else cpus - {_SERVER_CPU})


# The engine's stand-in


def run_engine(directory: str, tokens_per_second: float) -> None:
    """Speaks the engine's side of the wire: every request gets one token per tick, all in one frame, as those of one step are."""
    from paceline.core.outcome import DraftStats, RequestStats, TokenDelta
    from paceline.core.request import FinishReason
    from paceline.engine import wire

    parent = os.getppid()
    port = wire.EnginePort(directory)
    port.receive_launch(lambda: os.getppid() != parent)
    port.send(wire.Ready(facts()))
    num_left: dict[str, int] = {}
    stats = RequestStats(DraftStats(), 0, num_cached_tokens=0, num_preemptions=0, queue_ms=0.0, prefill_ms=0.0, decode_ms=0.0)
    next_tick_s = time.monotonic()
    while os.getppid() == parent:
        for message in port.receive(max(next_tick_s - time.monotonic(), 0.0)):
            match message:
                case wire.Submit(request):
                    num_left[request.request_id] = request.sampling.max_tokens
                case wire.Abort(request_id):
                    num_left.pop(request_id, None)
                case wire.Shutdown():
                    port.close()
                    return
        if time.monotonic() < next_tick_s:
            continue
        next_tick_s += 1 / tokens_per_second
        deltas: list[TokenDelta] = []
        for request_id, number in tuple(num_left.items()):
            token_ids = (260 + number % 50,)
            if number > 1:
                deltas.append(TokenDelta(request_id, token_ids))
                num_left[request_id] = number - 1
            else:
                deltas.append(TokenDelta(request_id, token_ids, FinishReason.LENGTH, stats))
                del num_left[request_id]
        port.send_deltas(deltas)


def facts() -> "EngineFacts":
    sys.path.insert(1, str(ROOT))
    from tests.fakes.fake_engine import FACTS

    return replace(FACTS, max_model_len=1 << 16, max_position_embeddings=1 << 16, drafter="none", max_draft_length=0)


# The server


def run_profiled(arguments: argparse.Namespace) -> None:
    import uvloop

    serving = serve(arguments.serve, arguments.tokens_per_second)
    if arguments.profile is None:
        uvloop.run(serving)
        return
    import cProfile

    profile = cProfile.Profile()
    try:
        profile.runcall(uvloop.run, serving)
    finally:
        profile.dump_stats(arguments.profile)


async def serve(folder: Path, tokens_per_second: float) -> None:
    """`paceline serve` with another engine behind its sockets."""
    from paceline.config import ServerConfig
    from paceline.engine import client
    from paceline.engine.process import EngineProcess
    from paceline.server.run import bind_socket, run_server

    class StandIn(EngineProcess):
        def spawn(self, threads: int | None) -> None:
            command = [sys.executable, __file__, "--engine", str(self.directory), "--tokens-per-second", str(tokens_per_second)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)

    client.EngineProcess = StandIn
    config = ServerConfig(warmup=False)
    engine = await client.EngineClient.start(config.engine, folder)
    try:
        await run_server(engine, config, folder, bind_socket("127.0.0.1", 0))
    finally:
        await engine.close()


# The load


@dataclass
class Load:
    """What the streams have seen so far."""

    began_s: float = 0.0
    num_first_bytes: int = 0
    last_first_byte_s: float = 0.0
    num_chunks: int = 0
    num_ended: int = 0
    num_broken: int = 0


class Stream(asyncio.Protocol):
    """One client: sends its request, counts the events of the answer."""

    def __init__(self, load: Load, request: bytes) -> None:
        self._load, self._request = load, request
        self._tail, self._is_ended = b"", False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        load = self._load
        if not self._tail:
            load.num_first_bytes += 1
            load.last_first_byte_s = time.perf_counter() - load.began_s
            load.num_broken += not data.startswith(b"HTTP/1.1 200")
        data = self._tail + data
        load.num_chunks += data.count(b"data: {")
        self._tail = data[-6:]  # one byte less than what is counted: an event cut in two is seen once
        if data.endswith(b"0\r\n\r\n"):
            self._is_ended = True
            load.num_ended += 1
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._load.num_broken += not self._is_ended


@dataclass(frozen=True)
class Sample:
    """Counters at one moment; CPU seconds of the server and its threads, of all our processes, and of the whole machine."""

    time_s: float
    num_chunks: int
    server_s: tuple[float, float]  # in Python and libraries, in the kernel
    own_s: float
    machine_s: float


def sample(load: Load, server: int) -> Sample:
    server_s = cpu_s(server)
    own_s = sum(sum(cpu_s(pid)) for pid in {os.getpid(), *children(os.getpid()), *children(server)})
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    machine_s = (user + nice + system + irq + softirq + steal) * _TICK_S
    return Sample(time.perf_counter(), load.num_chunks, server_s, own_s, machine_s)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_s(pid: int) -> tuple[float, float]:
    """User and system time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) * _TICK_S, int(fields[12]) * _TICK_S


async def load_streams(
    arguments: argparse.Namespace, port: int, server: int, scraper: subprocess.Popen[str]
) -> tuple[Load, tuple[Sample, Sample, Sample]]:
    """Open all streams at once; samples from before that, from when all have begun to a second before they end.

    Between the latter two the scraper is at work.
    """
    num_tokens = round(arguments.seconds * arguments.tokens_per_second)
    body = {"messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    request = head.encode() + data
    load, start = Load(began_s=time.perf_counter()), sample(Load(), server)
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(loop.create_connection(lambda: Stream(load, request), "127.0.0.1", port) for _ in range(arguments.streams)))
    deadline_s = load.began_s + 60
    while load.num_first_bytes < arguments.streams:
        if time.perf_counter() > deadline_s or load.num_broken:
            raise SystemExit(f"{load.num_first_bytes} of {arguments.streams} streams began, {load.num_broken} broke")
        await asyncio.sleep(0.01)
    if load.last_first_byte_s > arguments.seconds / 2:
        raise SystemExit(f"the last stream began after {load.last_first_byte_s:.1f} s; give a longer --seconds")
    first, window_s = sample(load, server), arguments.seconds - load.last_first_byte_s - 1
    assert scraper.stdin is not None
    scraper.stdin.write(f"{port} {window_s}\n")
    scraper.stdin.flush()
    await asyncio.sleep(window_s)
    last = sample(load, server)
    while load.num_ended < arguments.streams and not load.num_broken:
        if time.perf_counter() > deadline_s + 2 * arguments.seconds:
            raise SystemExit(f"{load.num_ended} of {arguments.streams} streams ended")
        await asyncio.sleep(0.05)
    if load.num_broken:
        raise SystemExit(f"{load.num_broken} streams broke")
    return load, (start, first, last)


def run_load(arguments: argparse.Namespace) -> None:
    sys.path.insert(1, str(ROOT))
    import uvloop

    from tests.fakes.tiny_models import make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder)
        command = [sys.executable, __file__, "--serve", folder, "--streams", str(arguments.streams)]
        command += ["--tokens-per-second", str(arguments.tokens_per_second)]
        command += ["--profile", str(arguments.profile)] if arguments.profile else []
        scraping = [sys.executable, str(Path(__file__).with_name("metrics_scrapes.py"))]
        with (
            subprocess.Popen(scraping, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as scraper,
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        ):
            try:
                assert server.stdout is not None
                url = server.stdout.readline().split()[4]
                load, samples = uvloop.run(load_streams(arguments, int(url.rsplit(":", 1)[1]), server.pid, scraper))
                scrapes_ms = json.loads(scraper.communicate()[0])
            finally:
                server.send_signal(signal.SIGTERM)
                scraper.terminate()
    report(arguments, load, samples, scrapes_ms)


def spread(values_ms: list[float]) -> dict[str, float]:
    """Median, 95th percentile and worst of at least 20 values, and how many there are."""
    if len(values_ms) < 20:
        raise SystemExit(f"only {len(values_ms)} scrapes of /metrics; give a longer --seconds")
    percentiles = statistics.quantiles(values_ms, n=20, method="inclusive")
    return {"p50": round(percentiles[9], 2), "p95": round(percentiles[18], 2), "max": round(max(values_ms), 2), "scrapes": len(values_ms)}


def report(
    arguments: argparse.Namespace, load: Load, samples: tuple[Sample, Sample, Sample], scrapes_ms: list[tuple[float, float]]
) -> None:
    start, first, last = samples
    wall_s = last.time_s - first.time_s
    num_chunks = last.num_chunks - first.num_chunks
    user_s, system_s = (after - before for after, before in zip(last.server_s, first.server_s, strict=True))
    foreign_share = (last.machine_s - first.machine_s - (last.own_s - first.own_s)) / (wall_s * (os.cpu_count() or 1))
    row = {
        "benchmark": "http_streams",
        "streams": arguments.streams,
        "tokens_per_second": arguments.tokens_per_second,
        "last_first_byte_s": round(load.last_first_byte_s, 3),
        "server_cpu_s_until_then": round(sum(first.server_s) - sum(start.server_s), 2),
        "server_us_per_chunk": round((user_s + system_s) / num_chunks * 1e6, 2),
        "of_which_in_the_kernel": round(system_s / num_chunks * 1e6, 2),
        "server_cpu_share": round((user_s + system_s) / wall_s, 3),
        "chunks_per_second": round(num_chunks / wall_s),
        "chunks": load.num_chunks,
        "metrics_ms": spread([read for read, _ in scrapes_ms]),
        "metrics_ms_in_the_server": spread([received for _, received in scrapes_ms]),
        "foreign_cpu_share": round(foreign_share, 3),
    }
    print(json.dumps(row))
    print(f"last first byte after {row['last_first_byte_s']} s (goal {GOAL_FIRST_BYTES_S}), ", end="")
    print(f"{row['server_us_per_chunk']} us of server CPU per chunk (goal {GOAL_CHUNK_US}), ", end="")
    print(f"/metrics in {row['metrics_ms']['p95']} ms at the 95th percentile (goal {GOAL_METRICS_MS})")
    if arguments.profile is not None:
        return
    if foreign_share > _MAX_FOREIGN_SHARE:
        raise SystemExit(f"other processes took {foreign_share:.0%} of the machine: not recorded; try again when it is quiet")
    from paired import append_result, environment

    append_result(RESULTS, environment() | row)


if __name__ == "__main__":
    main()
