"""`POST /draft` on a draft server: what the engine is asked, what comes back, where drafting ends, and what else is there."""

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig, ServerConfig
from paceline.core.request import Request, SamplingParams
from paceline.server.draft import DraftServer
from paceline.server.openai.requests import MAX_PROMPT_TOKEN_IDS
from paceline.server.ready import ready_line
from paceline.server.run import bind_socket
from tests.fakes.fake_engine import FACTS, FakeEngine, Faults
from tests.unit.server.conftest import Site


def counting(request: Request) -> list[int]:
    """The ids that follow the last one."""
    last = request.prompt_token_ids[-1]
    return list(range(last + 1, last + 1 + request.sampling.max_tokens))


@pytest.fixture
def make_draft_site(folder: Path) -> Callable[..., Site]:
    def make(engine: FakeEngine | None = None, config: ServerConfig | None = None) -> Site:
        given = engine or FakeEngine(replace(FACTS, drafter="none"), answer=counting)
        return Site(given, folder, config or ServerConfig(engine=EngineConfig(seed=7)), DraftServer)

    return make


@pytest.fixture
def draft_site(make_draft_site: Callable[..., Site]) -> Site:
    return make_draft_site()


async def test_a_draft_continues_the_context(draft_site: Site) -> None:
    answer = await draft_site.post("/draft", {"token_ids": [5, 6, 7], "max_draft_length": 4})
    assert (answer.status, answer.json()) == (200, {"token_ids": [8, 9, 10, 11]})
    (request,) = draft_site.engine.requests
    assert request.prompt_token_ids == (5, 6, 7)
    assert request.max_draft_length == 0, "a drafter does not speculate itself"
    assert request.sampling == SamplingParams(4, temperature=0.0, seed=0, num_logprobs=0)


@pytest.mark.parametrize("chunk", [1, 3])
async def test_probs_are_those_of_the_tokens(make_draft_site: Callable[..., Site], chunk: int) -> None:
    site = make_draft_site(FakeEngine(answer=counting, chunk=chunk))
    answer = (await site.post("/draft", {"token_ids": [5], "max_draft_length": 5, "return_probs": True})).json()
    assert answer == {"token_ids": [6, 7, 8, 9, 10], "probs": [pytest.approx(math.exp(-0.5))] * 5}


async def test_temperature_and_seed_reach_the_engine(draft_site: Site) -> None:
    for given in ({"temperature": 0.7, "seed": 9}, {"temperature": 0.7}, {"temperature": 1e-9}, {"temperature": None, "seed": None}):
        assert (await draft_site.post("/draft", {"token_ids": [5], "max_draft_length": 1, **given})).status == 200
    sent = [(request.sampling.temperature, request.sampling.seed) for request in draft_site.engine.requests]
    assert sent == [(0.7, 9), (0.7, 0), (0.0, 0), (0.0, 0)]


async def test_a_draft_ends_with_the_text(make_draft_site: Callable[..., Site]) -> None:
    """The end-of-text token is part of it: the target may well say it next."""
    site = make_draft_site(FakeEngine(answer=lambda _: [9, 2, 9]))
    answer = await site.post("/draft", {"token_ids": [5], "max_draft_length": 8, "return_probs": True})
    assert answer.json()["token_ids"] == [9, 2]
    assert len(answer.json()["probs"]) == 2


@pytest.mark.parametrize(("num_tokens", "num_drafted"), [(120, 8), (125, 3), (127, 1), (128, 0), (129, 0), (100_000, 0)])
async def test_drafting_stops_at_the_context(draft_site: Site, num_tokens: int, num_drafted: int) -> None:
    """It does not fail: the target may have a longer one."""
    body = {"token_ids": [5] * num_tokens, "max_draft_length": 8, "return_probs": True}
    answer = await draft_site.post("/draft", body)
    assert answer.status == 200
    assert [len(answer.json()[name]) for name in ("token_ids", "probs")] == [num_drafted] * 2
    assert len(draft_site.engine.requests) == (num_drafted > 0)


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"token_ids": []}, "token_ids", "is empty; give at least one"),
        ({"token_ids": [320]}, "token_ids", "token id 320 is outside the vocabulary, 0 to 319"),
        ({"token_ids": [5] * 200 + [320]}, "token_ids", "token id 320 is outside"),
        ({"token_ids": [-1]}, "token_ids.0", ">= 0"),
        ({"token_ids": [5, 1.5]}, "token_ids.1", "Expected `int`"),
        ({"token_ids": "the fox"}, "token_ids", "Expected `array`"),
        ({"token_ids": [[5]]}, "token_ids.0", "Expected `int`"),
        ({"token_ids": None}, "token_ids", "Expected `array`"),
        ({"token_ids": [5] * (MAX_PROMPT_TOKEN_IDS + 1)}, "token_ids", "limit 1,048,576; send fewer"),
        ({"max_draft_length": 0}, "max_draft_length", ">= 1"),
        ({"max_draft_length": 65}, "max_draft_length", "<= 64"),
        ({"max_draft_length": None}, "max_draft_length", "Expected `int`"),
        ({"max_draft_length": 2.5}, "max_draft_length", "Expected `int`"),
        ({"temperature": -0.1}, "temperature", ">= 0"),
        ({"seed": -1}, "seed", ">= 0"),
        ({"seed": 2**63}, "seed", "<= 9223372036854775807"),
        ({"return_probs": 1}, "return_probs", "Expected `bool"),
        ({"top_p": 0.5}, "top_p", "there is no such field here; leave it out"),
        ({"stream": False}, "stream", "there is no such field here; leave it out"),
    ],
)
async def test_bad_bodies(draft_site: Site, given: dict[str, Any], param: str, words: str) -> None:
    answer = await draft_site.post("/draft", {"token_ids": [5], "max_draft_length": 4, **given})
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert not draft_site.engine.requests
    assert (await draft_site.post("/draft", {"token_ids": [5], "max_draft_length": 4})).status == 200


@pytest.mark.parametrize("name", ["token_ids", "max_draft_length"])
async def test_missing_fields(draft_site: Site, name: str) -> None:
    body = {"token_ids": [5], "max_draft_length": 4}
    del body[name]
    answer = await draft_site.post("/draft", body)
    assert answer.status == 400
    assert answer.json()["error"]["message"] == f"{name}: the field is missing"


async def test_the_model_is_checked_if_it_is_named(draft_site: Site) -> None:
    for model, status in (("fake", 200), ("gpt-5", 404)):
        assert (await draft_site.post("/draft", {"model": model, "token_ids": [5], "max_draft_length": 4})).status == status


async def test_a_client_that_leaves_ends_its_draft(make_draft_site: Callable[..., Site]) -> None:
    site = make_draft_site(FakeEngine(faults=Faults(hang_after=0)))
    connection = site.open("/draft", {"token_ids": [5], "max_draft_length": 4})
    await site.engine.started.wait()
    await connection.leave()
    assert (site.engine.num_active, len(site.engine.aborted)) == (0, 1)


async def test_an_engine_that_fails_or_is_gone(make_draft_site: Callable[..., Site]) -> None:
    site = make_draft_site(FakeEngine(faults=Faults(fail_after=2)))
    body = {"token_ids": [5, 6, 7, 8], "max_draft_length": 4}
    assert (await site.post("/draft", body)).status == 500
    site.engine.kill()
    for given in (body, body | {"token_ids": [5] * 500}):
        answer = await site.post("/draft", given)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_dead")
    site.in_flight.is_draining = True
    assert (await site.post("/draft", body)).json()["error"]["code"] == "shutting_down"


async def test_only_drafting_is_offered(draft_site: Site, site: Site) -> None:
    """And the description says so, of every route and nothing else."""
    document = (await draft_site.get("/openapi.json")).json()
    offered = {"/draft", "/v1/models", "/v1/models/{name}", "/health", "/ready", "/metrics", "/stats", "/tokenize", "/detokenize"}
    assert document["paths"].keys() == offered
    schemas = document["components"]["schemas"]
    assert {"DraftRequest", "TokenizeRequest", "DetokenizeRequest"} <= schemas.keys()
    assert not {name for name in schemas if name.startswith(("Completion", "Chat", "Infer"))}
    assert schemas["DraftRequest"]["properties"]["max_draft_length"] == {"type": "integer", "minimum": 1, "maximum": 64}
    for path in (await site.get("/openapi.json")).json()["paths"].keys() - offered:
        assert (await draft_site.post(path, {"prompt": "x"})).status == 404
    for path in ("/v1/models", "/v1/models/fake", "/health", "/ready", "/metrics", "/stats"):
        assert (await draft_site.get(path)).status == 200
    token_ids = (await draft_site.post("/tokenize", {"prompt": "the fox"})).json()["tokens"]
    assert (await draft_site.post("/detokenize", {"tokens": token_ids})).json()["prompt"] == "the fox"


async def test_an_ordinary_server_does_not_draft(site: Site) -> None:
    answer = await site.post("/draft", {"token_ids": [5], "max_draft_length": 4})
    assert answer.status == 404
    assert "/draft" not in (await site.get("/openapi.json")).json()["paths"]


async def test_drafts_are_counted(draft_site: Site) -> None:
    await draft_site.post("/draft", {"token_ids": [5], "max_draft_length": 4})
    text = (await draft_site.get("/metrics")).body.decode()
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="fake"} 1.0' in text


async def test_the_example_works(draft_site: Site) -> None:
    with bind_socket("127.0.0.1", 0) as listener:
        command = shlex.split(ready_line(listener, "127.0.0.1", *draft_site.server.example()).split("try: ")[1])
    assert command[1].endswith("/draft")
    answer = await draft_site.post("/draft", json.loads(command[-1]))
    assert len(answer.json()["token_ids"]) == 5
