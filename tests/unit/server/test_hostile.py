"""Bodies and headers made to hurt: never a 5xx, never silence, and the next request is served."""

import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import ServerConfig
from paceline.server.edge import MAX_BODY_BYTES
from tests.fakes.fake_engine import FACTS, FakeEngine
from tests.unit.server.conftest import Site

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEEP = 100_000

RAW_BODIES = {
    "empty": b"",
    "no json": b"hello",
    "cut json": b'{"prompt": "x"',
    "json after json": b'{"prompt": "x"} {}',
    "comment": b'{"prompt": "x"} // y',
    "single quotes": b"{'prompt': 'x'}",
    "latin-1": '{"prompt": "é"}'.encode("latin-1"),
    "bad utf-8": b'{"prompt": "\xff\xfe\x80"}',
    "overlong utf-8": b'{"prompt": "\xc0\xaf"}',
    "nul byte": b'{"prompt": "a\x00b"}',
    "deep list": b"[" * DEEP + b"]" * DEEP,
    "deep object": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep prompt": b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep content": b'{"messages": [{"role": "user", "content": ' + b"[" * DEEP + b"]" * DEEP + b"}]}",
    "null": b"null",
    "list": b"[]",
    "string": b'"x"',
    "number": b"5",
    "long integer": b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    "long seed": b'{"prompt": "x", "seed": ' + b"9" * 4000 + b"}",
    "long temperature": b'{"prompt": "x", "temperature": ' + b"9" * 4000 + b"}",
    "huge exponent": b'{"prompt": "x", "temperature": 1e999999}',
    "nan": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "top_p": Infinity}',
    "surrogate in prompt": b'{"prompt": "a\\ud800b"}',
    "surrogate in stop": b'{"prompt": "x", "stop": "\\udfff"}',
    "surrogate in model": b'{"prompt": "x", "model": "\\ud83d"}',
    "surrogate in content": b'{"messages": [{"role": "user", "content": "\\ude00\\ud83d"}], "prompt": "\\ud800"}',
    "huge token id": b'{"prompt": [' + b"9" * 4000 + b"]}",
    "number out of range where none is read": b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "n": 1e999}',
    "surrogate where none is read": b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "suffix": "\\ud800"}',
    "long tools": b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "tools": [0' + b" " * 1000 + b"]}",
    "all null": json.dumps(dict.fromkeys(["prompt", "messages", "model", "max_tokens", "temperature", "stop", "stream", "n"])).encode(),
    "wrong everywhere": json.dumps({"prompt": {}, "messages": 1, "model": [], "stop": [[]], "stream_options": "x"}).encode(),
}


async def is_alive(site: Site) -> bool:
    return (await site.post(COMPLETIONS, {"prompt": "the fox"})).status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("body", RAW_BODIES.values(), ids=RAW_BODIES.keys())
async def test_bodies(site: Site, path: str, body: bytes) -> None:
    answer = await site.post(path, body)
    assert answer.status in (400, 404), answer.body
    error = answer.json()["error"]
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert "site-packages" not in error["message"]
    assert len(error["message"]) <= 1000
    assert await is_alive(site)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "extra": {"a": [[[[{}]]]]}, "__class__": "y", "model_config": {}, "__proto__": {"admin": True}},
        {"prompt": "\u0000\u001b[31m\u202e\ufeff\uffff"},
        {"prompt": "<|im_start|><|im_end|><|endoftext|>"},
        {"prompt": "x", "user": "\u0000" * 1000},
        {"prompt": "x", "stop": ["\u0000", "\U0010ffff"]},
    ],
)
async def test_odd_but_valid_bodies(site: Site, body: dict[str, Any]) -> None:
    assert (await site.post(COMPLETIONS, body)).status == 200


async def test_the_last_of_duplicate_keys_counts(site: Site) -> None:
    answer = await site.post(COMPLETIONS, b'{"prompt": "", "max_tokens": 9, "prompt": "the", "max_tokens": 1}')
    assert answer.status == 200
    assert answer.json()["usage"]["completion_tokens"] == 1


async def test_special_tokens_alone_are_a_prompt(site: Site) -> None:
    await site.post(COMPLETIONS, {"prompt": "<|im_start|>"})
    assert site.engine.requests[0].prompt_token_ids == (1,)


async def test_a_declared_body_over_the_limit_is_not_read(site: Site) -> None:
    answer = await site.post(COMPLETIONS, b"{}", headers={"content-length": str(MAX_BODY_BYTES + 1)})
    assert answer.status == 413
    assert answer.json()["error"]["message"].startswith("the body is larger than 10 MB")


async def test_an_undeclared_body_over_the_limit_is_cut(site: Site) -> None:
    parts = [b'{"prompt": "', *[b"x" * 1024**2] * 11, b'"}']
    connection = site.open(COMPLETIONS, parts=parts)
    await connection.task
    assert connection.answer.status == 413
    assert connection.answer.json()["error"]["type"] == "invalid_request_error"
    assert len(connection._parts) >= 1, "reading went on past the limit"
    assert await is_alive(site)


PART = b'{"type":"text","text":""}'
MESSAGE = b'{"role":"user","content":[]}'
LARGE_BODIES = {
    "bad token ids": (b'{"prompt":[', b'"a"', b"]}"),
    "mixed token ids": (b'{"prompt":[1,', b'"a"', b"]}"),
    "many token ids": (b'{"prompt":[', b"5", b"]}"),
    "many prompts": (b'{"prompt":[', b"[]", b"]}"),
    "many texts": (b'{"prompt":[', b'""', b"]}"),
    "many stops": (b'{"prompt":"x","stop":[', b'""', b"]}"),
    "bad stops": (b'{"prompt":"x","stop":[', b"5", b"]}"),
    "many stop ids": (b'{"prompt":"x","stop_token_ids":[', b"5", b"]}"),
    "bad messages": (b'{"messages":[', b"[]", b"]}"),
    "many messages": (b'{"messages":[', MESSAGE, b"]}"),
    "many parts": (b'{"messages":[{"role":"user","content":[', PART, b"]}]}"),
    "bad parts": (b'{"messages":[{"role":"user","content":[', b"{}", b"]}]}"),
    "many tools": (b'{"prompt":"x","messages":[' + MESSAGE + b'],"tools":[', b"[]", b"]}"),
    "many tool calls": (b'{"messages":[{"role":"assistant","content":"x","tool_calls":[', b"{}", b"]}]}"),
    "many lists that nobody reads": (b'{"prompt":"","other":[', b"[]", b"]}"),
}


def filled(start: bytes, element: bytes, end: bytes) -> bytes:
    """As many elements as a body may hold."""
    num_elements = (MAX_BODY_BYTES - len(start) - len(end)) // (len(element) + 1)
    return start + b",".join([element] * num_elements) + end


@pytest.mark.parametrize("parts", LARGE_BODIES.values(), ids=LARGE_BODIES.keys())
async def test_a_large_bad_body_holds_nobody_up(site: Site, parts: tuple[bytes, bytes, bytes]) -> None:
    """The first fault ends it, and counts are bounded before anything is built or while that is cheap."""
    path = CHAT if parts[0].startswith(b'{"messages"') else COMPLETIONS
    connection = site.open(path, filled(*parts))
    gc.collect()
    gc.freeze()  # what other tests have left in this process is not looked through on this body's account
    started_s = time.process_time()
    await connection.task
    used_s = time.process_time() - started_s
    gc.unfreeze()
    assert connection.answer.status == 400, connection.answer.body
    assert used_s < 1.5
    assert await is_alive(site)


@pytest.mark.parametrize(
    "name", ["mixed token ids", "many token ids", "many prompts", "bad messages", "many tools", "many lists that nobody reads"]
)
async def test_a_large_bad_body_is_not_built(site: Site, name: str) -> None:
    """Beside the body itself and a copy of it. Parsed into objects it would take hundreds of megabytes."""
    path = CHAT if name == "bad messages" else COMPLETIONS
    body = filled(*LARGE_BODIES[name])
    tracemalloc.start()
    try:
        answer = await site.post(path, body)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.status == 400
    assert peak_bytes < 5 * MAX_BODY_BYTES


async def test_a_large_good_body_holds_nobody_up(make_site: Callable[..., Site]) -> None:
    site = make_site(FakeEngine(facts=replace(FACTS, max_model_len=1 << 21, max_position_embeddings=1 << 21), answer=lambda _: [2]))
    body = b'{"prompt":[' + b",".join([b"319"] * (1 << 20)) + b"]}"
    connection = site.open(COMPLETIONS, body)
    started_s = time.process_time()
    await connection.task
    used_s = time.process_time() - started_s
    assert connection.answer.status == 200
    assert len(site.engine.requests[0].prompt_token_ids) == 1 << 20
    assert used_s < 1.5


HARMLESS_HOSTS = ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.8.9.1:9", "[::1]", "[::1]:8000"]
FOREIGN_HOSTS = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]", "0.0.0.0"]
ODD_HOSTS = ["x/?", "x/#", "a/docs?", "127.0.0.1:8000/health?", "me@127.0.0.1", "[::1", "::1", "", "a" * 5000, "é"]


@pytest.mark.parametrize("host", HARMLESS_HOSTS)
async def test_this_machines_names_may_ask(site: Site, host: str) -> None:
    for scheme in ("http://", "https://"):
        answer = await site.post(COMPLETIONS, {"prompt": "x"}, headers={"host": host, "origin": scheme + host})
        assert answer.status == 200


@pytest.mark.parametrize("host", [*FOREIGN_HOSTS, *ODD_HOSTS])
async def test_other_names_may_not_ask_a_server_of_this_machine(site: Site, host: str) -> None:
    """A page whose name was made to resolve to this machine is a page from elsewhere."""
    for path, method in (("/v1/models", "GET"), ("/nope", "GET"), (COMPLETIONS, "POST")):
        answer = await site.post(path, {"prompt": "x"}, method=method, headers={"host": host})
        assert answer.status == 403
        assert "the header Host" in answer.json()["error"]["message"]
    assert not site.engine.requests


@pytest.mark.parametrize("origin", ["null", "file://", "chrome-extension://abc", "", *(f"http://{host}" for host in FOREIGN_HOSTS)])
async def test_pages_from_elsewhere_may_not_ask_a_server_of_this_machine(site: Site, origin: str) -> None:
    answer = await site.post(COMPLETIONS, {"prompt": "x"}, headers={"origin": origin})
    assert answer.status == 403
    assert "the header Origin" in answer.json()["error"]["message"]
    assert not site.engine.requests


@pytest.mark.parametrize("host", [*HARMLESS_HOSTS, *FOREIGN_HOSTS, *ODD_HOSTS])
async def test_an_open_servers_names_are_its_operators(make_site: Callable[..., Site], host: str) -> None:
    site = make_site(config=ServerConfig(host="0.0.0.0", insecure=True))
    for headers in ({"host": host}, {"origin": f"https://{host}"}):
        assert (await site.get("/v1/models", headers=headers)).status == 200
        assert (await site.get("/nope", headers=headers)).status == 404


async def test_names_that_the_operator_allows_may_ask(make_site: Callable[..., Site]) -> None:
    site = make_site(config=ServerConfig(allowed_hosts="host.docker.internal, Chat.Example"))
    for host in ("host.docker.internal:8000", "chat.example", "CHAT.example:443", "localhost"):
        for headers in ({"host": host}, {"origin": f"https://{host}"}):
            assert (await site.get("/v1/models", headers=headers)).status == 200
    for host in ("chat.example.evil", "docker.internal", ""):
        answer = await site.get("/v1/models", headers={"host": host})
        assert answer.status == 403
        assert "--allowed-hosts" in answer.json()["error"]["message"]


CONTENT_TYPES = [
    "application/x-www-form-urlencoded",
    "text/plain",
    "multipart/form-data; boundary=x",
    "x",
    "",
    "text/json",
    "application/jsonp",
]


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_other_content_types_say_what_to_send(site: Site, path: str, content_type: str) -> None:
    """The first is what `curl -d` sends by itself; any web page may send the first three."""
    answer = await site.post(path, {"prompt": "x"}, headers={"content-type": content_type})
    assert answer.status == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
async def test_content_types_that_are_json(site: Site, content_type: str) -> None:
    assert (await site.post(COMPLETIONS, {"prompt": "x"}, headers={"content-type": content_type})).status == 200


async def test_a_client_that_leaves_in_mid_body(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    connection = site.open(COMPLETIONS, b'{"prompt": "x"}', headers={"content-length": "99"})
    connection._parts = []
    await connection.leave()
    assert not site.engine.requests
    assert not caplog.records


@pytest.mark.parametrize("path", ["/v1/models/../../etc/passwd", "/v1/models/" + "a" * 5000, "/v1/models/\udcff", "//v1/models", "/%00"])
async def test_odd_paths(site: Site, path: str) -> None:
    answer = await site.get(path) if path.isascii() else await site.get("/v1/models/\xff")
    assert answer.status in (404, 405)
    assert answer.json()["error"]["message"]


async def test_a_failed_request_does_not_tell_its_inside(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("/home/secret/path and a password")

    monkeypatch.setattr(site.server._preparation, "_encode_texts", broken)
    answer = await site.post(COMPLETIONS, {"prompt": "x"})
    assert answer.status == 500
    assert "secret" not in answer.body.decode()
    assert answer.headers["x-request-id"]
    assert site.server.metrics.errors["internal"] == 1
