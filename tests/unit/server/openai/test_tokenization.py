"""`/tokenize` and `/detokenize`: the tokens that a completion or a chat would get, the way back, and the same errors."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from paceline.server import chat
from paceline.server.edge import MAX_BODY_BYTES
from tests.fakes.fake_engine import FACTS
from tests.fakes.tiny_models import make_tiny_model
from tests.unit.server.conftest import Site

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox"}]
TEXT = "the quick brown fox 😀 <|im_end|> jumps"


async def test_a_text(site: Site, tokenizer: Tokenizer) -> None:
    answer = await site.post(TOKENIZE, {"model": "fake", "prompt": TEXT})
    assert answer.status == 200
    token_ids = tokenizer.encode(TEXT).ids
    assert answer.json() == {"count": len(token_ids), "max_model_len": FACTS.max_model_len, "tokens": token_ids, "token_strs": None}


async def test_the_strings_of_the_tokens(site: Site, tokenizer: Tokenizer) -> None:
    answer = await site.post(TOKENIZE, {"prompt": TEXT, "return_token_strs": True})
    assert answer.json()["token_strs"] == tokenizer.encode(TEXT).tokens


async def test_a_chat_has_the_tokens_of_the_prompt_that_it_becomes(site: Site) -> None:
    answer = await site.post(TOKENIZE, {"messages": MESSAGES, "return_token_strs": True})
    await site.post("/v1/chat/completions", {"messages": MESSAGES})
    assert answer.status == 200
    assert answer.json()["tokens"] == list(site.engine.requests[0].prompt_token_ids)
    assert answer.json()["count"] == len(answer.json()["tokens"]) == len(answer.json()["token_strs"])


async def test_special_tokens_are_added_to_a_text_unless_told_otherwise(make_site: Callable[..., Site], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    file = json.loads((folder / "tokenizer.json").read_text())
    first, text = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    file["post_processor"] = {"type": "TemplateProcessing", "single": [first, text], "pair": [first, text], "special_tokens": special}
    (folder / "tokenizer.json").write_text(json.dumps(file))
    site = make_site(model_folder=folder)
    usual, plain, null = [
        (await site.post(TOKENIZE, {"prompt": "fox", **options})).json()["tokens"]
        for options in ({}, {"add_special_tokens": False}, {"add_special_tokens": None})
    ]
    assert usual == [0, *plain] == null
    assert 0 not in plain


async def test_a_prompt_that_is_too_long_to_run_is_counted(site: Site) -> None:
    answer = await site.post(TOKENIZE, {"prompt": " fox" * 400})
    assert answer.status == 200
    assert answer.json()["count"] > FACTS.max_model_len


async def test_nothing_is_no_tokens(site: Site) -> None:
    assert (await site.post(TOKENIZE, {"prompt": ""})).json()["tokens"] == []
    assert (await site.post(DETOKENIZE, {"tokens": []})).json() == {"prompt": ""}


async def test_the_way_back(site: Site) -> None:
    token_ids = (await site.post(TOKENIZE, {"prompt": TEXT})).json()["tokens"]
    answer = await site.post(DETOKENIZE, {"model": "fake", "tokens": token_ids})
    assert answer.status == 200
    assert answer.json() == {"prompt": TEXT}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        (TOKENIZE, {}, 400, "prompt", "either prompt, a text, or messages"),
        (TOKENIZE, {"prompt": "x", "messages": MESSAGES}, 400, "prompt", "either prompt, a text, or messages"),
        (TOKENIZE, {"prompt": ["x"]}, 400, "prompt", "Expected `str"),
        (TOKENIZE, {"messages": []}, 400, "messages", "length >= 1"),
        (TOKENIZE, {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role", "robot"),
        (TOKENIZE, {"messages": MESSAGES, "chat_template": "x"}, 400, "chat_template", "not supported"),
        (TOKENIZE, {"model": "gpt-5", "prompt": "x"}, 404, "model", "this server has 'fake'"),
        (TOKENIZE, {"model": "gpt-5", "messages": MESSAGES}, 404, "model", "this server has 'fake'"),
        (TOKENIZE, {"prompt": "x" * 9000}, 400, "prompt", "9,000 characters"),
        (TOKENIZE, {"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "messages", "9,000 characters"),
        (TOKENIZE, {"prompt": "x", "return_token_strs": 1}, 400, "return_token_strs", "Expected `bool"),
        (DETOKENIZE, {}, 400, "tokens", "missing"),
        (DETOKENIZE, {"tokens": "x"}, 400, "tokens", "Expected `array`"),
        (DETOKENIZE, {"tokens": [5, "x"]}, 400, "tokens.1", "Expected `int`"),
        (DETOKENIZE, {"tokens": [-1]}, 400, "tokens.0", ">= 0"),
        (DETOKENIZE, {"tokens": [5, 320]}, 400, "tokens", "token id 320 is outside the vocabulary, 0 to 319"),
        (DETOKENIZE, {"tokens": [5], "model": "gpt-5"}, 404, "model", "this server has 'fake'"),
        (DETOKENIZE, b"nonsense", 400, None, "not valid JSON"),
    ],
)
async def test_errors(site: Site, path: str, body: Any, status: int, param: str | None, words: str) -> None:
    answer = await site.post(path, body)
    assert answer.status == status, answer.body
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


async def test_a_model_without_a_chat_template(make_site: Callable[..., Site], folder_without_template: Path) -> None:
    site = make_site(model_folder=folder_without_template)
    answer = await site.post(TOKENIZE, {"messages": MESSAGES})
    assert answer.status == 400
    assert "no chat template" in answer.json()["error"]["message"]
    assert (await site.post(TOKENIZE, {"prompt": "x"})).status == 200


async def test_a_large_bad_list_is_not_built(site: Site) -> None:
    body = b'{"tokens":[' + b",".join([b"5"] * (MAX_BODY_BYTES // 2 - 20)) + b"]}"
    began_s = time.process_time()
    answer = await site.post(DETOKENIZE, body)
    assert time.process_time() - began_s < 1.0
    assert answer.status == 400
    assert "limit 1,048,576" in answer.json()["error"]["message"]


async def test_the_work_is_done_outside_the_event_loop(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    monkeypatch.setattr(chat, "_MANY_CHARS", 0)  # below which it is not worth the way

    class Recorder:
        """The tokenizer, but notes which thread uses it."""

        def __init__(self, tokenizer: Tokenizer) -> None:
            self._tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            threads.append(threading.current_thread().name)
            return getattr(self._tokenizer, name)

    monkeypatch.setattr(site.server._preparation, "_tokenizer", Recorder(site.server._preparation._tokenizer))
    for path, body in (
        (TOKENIZE, {"prompt": "x", "return_token_strs": True}),
        (TOKENIZE, {"messages": MESSAGES}),
        (DETOKENIZE, {"tokens": [5]}),
    ):
        assert (await site.post(path, body)).status == 200
    assert len(threads) >= 4
    assert all(name.startswith("tokenize") for name in threads)


@pytest.mark.parametrize("path", [TOKENIZE, DETOKENIZE])
async def test_bodies_are_declared_as_json(site: Site, path: str) -> None:
    answer = await site.post(path, {"prompt": "x", "tokens": [5]}, headers={"content-type": "text/plain"})
    assert answer.status == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]
