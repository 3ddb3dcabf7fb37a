"""What a hostile server may send is bounded, goes nowhere else, and is an answer with an error."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from paceline.errors import MissingError
from paceline.prove.certificate.server import Line, Server, first_model
from paceline.prove.client import MAX_BODY_BYTES

DEEP = b"[" * 200_000
PART = b" " * (1 << 20)


@contextlib.asynccontextmanager
async def hostile(kind: str) -> AsyncIterator[tuple[Server, aiohttp.ClientSession, str, dict[str, int]]]:
    """A server that does `kind` on every route, and counts what it sent and who followed it elsewhere."""
    counts = {"parts": 0, "elsewhere": 0}

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/elsewhere":
            counts["elsewhere"] += 1
            return web.json_response({"choices": [{"text": "followed"}], "data": [{"id": "followed"}]})
        if kind == "redirect":
            return web.Response(status=307, headers={"Location": "/elsewhere"})
        if kind in ("deep", "deep error"):
            return web.Response(body=DEEP, content_type="application/json", status=200 if kind == "deep" else 500)
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while counts["parts"] < 10 * MAX_BODY_BYTES // len(PART):
                await response.write(PART)
                counts["parts"] += 1
        return response

    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession() as session:
            yield Server(Line(session, asyncio.Semaphore(1), lambda _: None), url, "m", {}), session, url, counts
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("kind", "error"),
    [("redirect", "HTTP 307"), ("deep", "is not JSON"), ("deep error", "HTTP 500: [["), ("endless", "longer than 16,777,216 bytes")],
)
async def test_what_it_sends_is_an_error_and_no_more(kind: str, error: str) -> None:
    async with hostile(kind) as (server, session, url, counts):
        assert error in ((await server.complete("hi", {})).error or "")
        assert await server.tokenize("hi") is None
        assert await server.detokenize((1,)) is None
        with pytest.raises(MissingError):
            await first_model(session, url)
    assert counts["elsewhere"] == 0
    assert counts["parts"] < 8 * MAX_BODY_BYTES // len(PART), "five answers of about the limit each"
