"""`GET /stats`: what `/metrics` counts, as one JSON object for people and pages, or as a stream of one each second."""

import asyncio
import time
from dataclasses import asdict, dataclass

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.metrics.requests import RequestMetrics
from paceline.server.engine_port import Engine
from paceline.server.inflight import InFlight
from paceline.server.limits import RequestLimits
from paceline.server.stream import send_body, send_stream_start

MAX_STREAMS = 64
_INTERVAL_S = 1.0


@dataclass(slots=True)
class Stats:
    """The owners of the numbers, and how many streams of them are open."""

    model_name: str
    engine: Engine
    metrics: RequestMetrics
    limits: RequestLimits
    in_flight: InFlight
    num_streams: int = 0

    def body(self) -> bytes:
        """Counters since the start, gauges of now; ages in seconds, None before the first step."""
        stats, now_s = self.engine.stats(), time.monotonic()
        counts = asdict(stats)
        counts |= {
            "age_s": now_s - counts.pop("time_s"),
            "last_step_age_s": now_s - last_step_s if (last_step_s := counts.pop("last_step_s")) else None,
            "kv_cache_usage": 1 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0,
            "draft_acceptance_rate": stats.num_accepted_tokens / stats.num_draft_tokens if stats.num_draft_tokens else 0.0,
            "mean_acceptance_length": 1 + stats.num_accepted_tokens / stats.num_drafts if stats.num_drafts else 1.0,
        }
        requests = {
            "num_running": len(self.in_flight),
            "max_concurrent_requests": self.limits.max_concurrent_requests,
            "finished": {reason.value: count for reason, count in self.metrics.finished_by_reason.items()},
            "errors": {kind.value: count for kind, count in self.metrics.errors.items()},
            "finished_per_second": self.metrics.throughput(),
            "times": {name: {"count": times.count, "sum": times.sum} for name, times in self.metrics.histograms.items()},
        }
        return msgspec.json.encode(
            {"time_s": time.time(), "model": self.model_name, "is_alive": self.engine.is_alive, "engine": counts, "requests": requests}
        )


class StatsStream(Response):
    """Server-sent events until the client leaves or the server stops."""

    def __init__(self, stats: Stats) -> None:
        super().__init__()
        self._stats = stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.create_task(_left(receive))
        self._stats.num_streams += 1
        try:
            await send_stream_start(send)
            while not left.done() and not self._stats.in_flight.is_draining:
                await send_body(send, b"data: " + self._stats.body() + b"\n\n", more=True)
                await asyncio.wait([left], timeout=_INTERVAL_S)
            await send_body(send, b"", more=False)
        finally:
            self._stats.num_streams -= 1
            left.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
