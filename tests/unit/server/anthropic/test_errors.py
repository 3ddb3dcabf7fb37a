"""Errors of Anthropic's routes in its form, also those that come before the route; and no other route's."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from paceline.server.anthropic.errors import error_type, is_anthropic
from paceline.server.edge import MAX_BODY_BYTES
from tests.fakes.asgi import Answer
from tests.fakes.fake_engine import Faults
from tests.unit.server.conftest import Site

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
BODY = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


def error_of(answer: Answer) -> tuple[int, str]:
    error = answer.json()
    assert (error["type"], error.keys()) == ("error", {"type", "error", "request_id"})
    assert error["request_id"] == answer.headers["request-id"]
    assert error["error"]["message"]
    return answer.status, error["error"]["type"]


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_before_the_route(site: Site, path: str) -> None:
    assert error_of(await site.post(path, BODY, headers={"content-type": "text/plain"})) == (400, "invalid_request_error")
    assert error_of(await site.post(path, BODY, headers={"host": "evil.example"})) == (403, "permission_error")
    assert error_of(await site.post(path, b"{}", headers={"content-length": str(MAX_BODY_BYTES + 1)})) == (413, "request_too_large")
    undeclared = site.open(path, parts=[b'{"messages": "', *[b"x" * 1024**2] * 11, b'"}'])
    await undeclared.task
    assert error_of(undeclared.answer) == (413, "request_too_large")
    assert error_of(await site.get(path)) == (405, "invalid_request_error")
    assert error_of(await site.post(f"{PATH}/batches", {})) == (404, "not_found_error")
    assert error_of(await site.post(path, {**BODY, "model": "claude"})) == (404, "not_found_error")
    assert not site.engine.requests


async def test_over_the_limit(speak: Callable[..., Site]) -> None:
    site = speak("x", faults=Faults(hang_after=1), max_concurrent_requests=1)
    running = site.open(PATH, {**BODY, "stream": True})
    await running.num_chunks(1)
    for path in (PATH, COUNT):
        refused = await site.post(path, BODY)
        assert error_of(refused) == (503, "overloaded_error")
        assert refused.headers["retry-after"] == "1"
    assert site.server.metrics.errors["busy"] == 2
    await running.leave()


async def test_out_of_time(speak: Callable[..., Site]) -> None:
    site = speak("x", faults=Faults(hang_after=0), request_timeout=0.1)
    for stream in (False, True):
        assert error_of(await site.post(PATH, {**BODY, "stream": stream})) == (504, "timeout_error")
    half = site.open(PATH, b"{}", headers={"content-length": "99"})
    half._parts = []
    await asyncio.wait_for(half.task, 5)
    assert error_of(half.answer) == (408, "timeout_error")


async def test_an_engine_that_is_gone(speak: Callable[..., Site]) -> None:
    for fault, status in ((Faults(die_after=0), 500), (Faults(fail_after=0), 500)):
        for stream in (False, True):
            assert error_of(await speak("x", faults=fault).post(PATH, {**BODY, "stream": stream})) == (status, "api_error")
    site = speak("x")
    site.engine.kill()
    answer = await site.post(PATH, BODY)
    assert error_of(answer) == (503, "overloaded_error")
    assert int(answer.headers["retry-after"]) >= 1
    assert site.server.metrics.errors["engine_dead"] == 1


async def test_shutting_down(speak: Callable[..., Site]) -> None:
    site = speak("x")
    site.in_flight.is_draining = True
    assert error_of(await site.post(PATH, BODY)) == (503, "overloaded_error")
    assert (await site.post(COUNT, BODY)).status == 200


async def test_a_fault_of_our_own_tells_nothing(speak: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("/home/secret/path")

    site = speak("x")
    monkeypatch.setattr(site.server._preparation, "_encode_chat", broken)
    answer = await site.post(PATH, BODY)
    assert error_of(answer) == (500, "api_error")
    assert b"secret" not in answer.body


async def test_a_prompt_over_the_context(speak: Callable[..., Site]) -> None:
    message = {"role": "user", "content": "zqx " * 5000}
    answer = await speak("x").post(PATH, {**BODY, "messages": [message]})
    assert error_of(answer) == (400, "invalid_request_error")
    assert "4,096" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messagesx", "/v1/chat/completions", "/v1", "/nope"])
async def test_other_paths_keep_openais_form(site: Site, path: str) -> None:
    assert not is_anthropic({"path": path})
    answer = await site.post(path, {})
    assert "type" not in answer.json()
    assert "request-id" not in answer.headers


@pytest.mark.parametrize(
    ("status", "kind"), [(401, "authentication_error"), (409, "invalid_request_error"), (429, "rate_limit_error"), (502, "api_error")]
)
def test_statuses_to_come(status: int, kind: Any) -> None:
    assert error_type(status) == kind
