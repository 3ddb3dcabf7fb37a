"""Bodies and headers made to hurt: never a 5xx, never silence, and the next request is served."""

import json
from typing import Any

import pytest

from paceline.server.edge import MAX_BODY_BYTES
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
    answer = await site.post(COMPLETIONS, b'{"prompt": "", "max_tokens": "x", "prompt": "the", "max_tokens": 1}')
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


@pytest.mark.parametrize("value", ["x/?", "x/#", "a/docs?", "127.0.0.1:8000/health?", "[::1", "", "a" * 5000, "é"])
async def test_host_headers_change_nothing(site: Site, value: str) -> None:
    assert (await site.get("/v1/models", headers={"host": value})).status == 200
    assert (await site.get("/nope", headers={"host": value})).status == 404


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", "x"])
async def test_other_content_types_say_what_to_send(site: Site, content_type: str) -> None:
    answer = await site.post(COMPLETIONS, {"prompt": "x"}, headers={"content-type": content_type})
    assert answer.status == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


async def test_a_json_content_type_with_parameters(site: Site) -> None:
    assert (await site.post(COMPLETIONS, {"prompt": "x"}, headers={"content-type": "application/json; charset=utf-8"})).status == 200


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
