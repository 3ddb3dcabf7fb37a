"""What happens to pages, memory and streams when clients leave and when the engine dies. A tiny model, real processes and sockets."""

import asyncio
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.conftest import RunningServer, serve

NUM_REQUESTS = 300


@pytest.mark.system
@pytest.mark.parametrize("caching", ["--enable-prefix-caching", "--no-enable-prefix-caching"])
def test_cancelled_requests_give_their_pages_back(tiny_folder: Path, caching: str) -> None:
    """300 requests, a third cancelled in mid-stream: free pages return to the start value and memory stays flat."""
    arguments = ["--served-model-name", "tiny", "--kv-cache-memory-bytes", str(8 << 20), caching]
    with serve([str(tiny_folder), *arguments]) as server:
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        # Before memory is compared every page was written once and every shape was compiled.
        asyncio.run(_flood(server, NUM_REQUESTS))
        before = _resident_bytes(server)
        asyncio.run(_flood(server, NUM_REQUESTS))
        deadline_s = time.monotonic() + 10
        while server.metric("vllm:kv_cache_usage_perc") > 0 or server.metric("vllm:num_requests_running") > 0:
            assert time.monotonic() < deadline_s, "pages or requests were left behind"
            time.sleep(0.1)
        assert server.metric("vllm:num_requests_waiting") == 0
        growth = [after - start for after, start in zip(_resident_bytes(server), before, strict=True)]
        assert max(growth) < 4 << 20, f"server and engine grew by {growth} bytes over {NUM_REQUESTS} requests"


def test_engine_death_ends_streams_with_an_error_event(tiny_folder: Path) -> None:
    with serve([str(tiny_folder), "--served-model-name", "tiny"]) as server:
        body = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.engine().kill()
            rest = [line for line in lines if line]
        assert any('"error"' in line for line in rest), rest[-3:]
        assert server.get("/health")[0] == 503


async def _flood(server: RunningServer, count: int) -> None:
    limit = asyncio.Semaphore(24)
    pool = httpx.Limits(max_connections=32)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=pool) as client, asyncio.TaskGroup() as group:
        for index in range(count):
            group.create_task(_one(client, limit, index))


async def _one(client: httpx.AsyncClient, limit: asyncio.Semaphore, index: int) -> None:
    body = {
        "model": "tiny",
        "prompt": f"request {index} says the quick brown fox jumps",
        "max_tokens": 48,
        "ignore_eos": True,
        "seed": index,
        "stream": True,
    }
    async with limit, client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        num_lines = 0
        async for line in response.aiter_lines():
            num_lines += line.startswith("data: ")
            if index % 3 == 0 and num_lines == 3:
                return  # closes the connection in mid-stream
        assert num_lines > 3


def _resident_bytes(server: RunningServer) -> list[int]:
    return [process.memory_info().rss for process in (server.process, psutil.Process(server.engine().pid))]
