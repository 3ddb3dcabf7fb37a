"""The routes with a fake engine: what a good request becomes, and which limits of the model a bad one meets."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from paceline.config import EngineConfig, ServerConfig
from paceline.errors import BadInputError
from paceline.metrics.prometheus import _template
from tests.fakes.fake_engine import FACTS, FakeEngine
from tests.fakes.tiny_models import make_tiny_model
from tests.unit.server.conftest import Site

MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


async def test_completion_of_text(site: Site, tokenizer: Tokenizer) -> None:
    answer = await site.post(COMPLETIONS, {"model": "fake", "prompt": "the fox"})
    assert answer.status == 200
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "the fox", "logprobs": None, "finish_reason": "stop"}]
    assert site.engine.requests[0].prompt_token_ids == tuple(tokenizer.encode("the fox").ids)


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
async def test_completion_of_token_ids(site: Site, prompt: Any) -> None:
    answer = await site.post(COMPLETIONS, {"prompt": prompt})
    assert answer.status == 200
    assert [request.prompt_token_ids for request in site.engine.requests] == [(5, 6, 7)]
    assert answer.json()["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_several_choices(site: Site, tokenizer: Tokenizer, stream: bool) -> None:
    prompts = ["the quick brown fox", "a", "jumps"]
    answer = await site.post(COMPLETIONS, {"prompt": prompts, "stream": stream})
    assert answer.status == 200
    texts = dict.fromkeys(range(3), "")
    reasons = {}
    bodies = answer.events()[:-1] if stream else [answer.json()]
    for choice in (choice for body in bodies for choice in body["choices"]):
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert list(texts.values()) == prompts
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}
    if not stream:
        num_prompt = sum(len(tokenizer.encode(prompt).ids) for prompt in prompts)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_prompt + 3, "total_tokens": 2 * num_prompt + 3}
        assert {name: answer.json()["usage"][name] for name in usage} == usage


async def test_chat_renders_the_template(site: Site, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "three", "name": "ann"},
    ]
    answer = await site.post(CHAT, {"model": "fake", "messages": messages})
    assert answer.status == 200
    text = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(list(site.engine.requests[0].prompt_token_ids), skip_special_tokens=False) == text
    choice = answer.json()["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert answer.json()["object"] == "chat.completion"


async def test_developer_is_system(site: Site, tokenizer: Tokenizer) -> None:
    await site.post(CHAT, {"messages": [{"role": "developer", "content": "x"}, *MESSAGES]})
    text = tokenizer.decode(list(site.engine.requests[0].prompt_token_ids), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nx<|im_end|>")


async def test_options_reach_the_engine(site: Site) -> None:
    options = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 42, "stop_token_ids": [4]}
    await site.post(COMPLETIONS, {"prompt": [5, 6], **options, "ignore_eos": True, "max_draft_length": 2})
    request = site.engine.requests[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (9, 0.5, 0.9, 7, 0.1)
    assert (sampling.seed, sampling.stop_token_ids, sampling.ignore_eos, request.max_draft_length) == (42, (4,), True, 2)


async def test_defaults(site: Site) -> None:
    await site.post(COMPLETIONS, {"prompt": [5, 6]})
    await site.post(CHAT, {"messages": MESSAGES})
    first, second = site.engine.requests
    assert (first.sampling.max_tokens, first.sampling.temperature, first.sampling.top_k, first.sampling.top_p) == (16, 1.0, 0, 1.0)
    assert first.max_draft_length is None
    assert second.sampling.max_tokens == FACTS.max_model_len - len(second.prompt_token_ids)


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 10**9}, "top_k", 0),
        ({"temperature": 1e-9}, "temperature", 0.0),
        ({"temperature": 0}, "temperature", 0.0),
        ({"seed": -1}, "seed", 2**64 - 1),
        ({"seed": 2**64 - 1}, "seed", 2**64 - 1),
    ],
)
async def test_values_are_normalised(site: Site, given: dict[str, Any], field: str, value: float) -> None:
    answer = await site.post(COMPLETIONS, {"prompt": [5], **given})
    assert answer.status == 200
    assert getattr(site.engine.requests[0].sampling, field) == value


async def test_max_draft_length_is_capped_at_the_engines(site: Site) -> None:
    await site.post(COMPLETIONS, {"prompt": [5], "max_draft_length": 99})
    await site.post(COMPLETIONS, {"prompt": [5], "max_draft_length": 0})
    assert [request.max_draft_length for request in site.engine.requests] == [FACTS.max_draft_length, 0]


async def test_seeds_come_from_the_configured_seed(make_site: Callable[..., Site]) -> None:
    async def seeds(config_seed: int | None) -> list[int]:
        site = make_site(config=ServerConfig(engine=EngineConfig(seed=config_seed)))
        for _ in range(2):
            await site.post(COMPLETIONS, {"prompt": [[5], [6]]})
        return [request.sampling.seed for request in site.engine.requests]

    first, again, other, random = await seeds(7), await seeds(7), await seeds(8), await seeds(None)
    assert first == again
    assert len({*first, *other, *random}) == 12
    assert all(0 <= seed < 2**64 for seed in first)


async def test_max_completion_tokens_wins(site: Site) -> None:
    await site.post(CHAT, {"messages": MESSAGES, "max_tokens": 50, "max_completion_tokens": 7})
    assert site.engine.requests[0].sampling.max_tokens == 7


async def test_unknown_model(site: Site) -> None:
    answer = await site.post(COMPLETIONS, {"model": "gpt-5", "prompt": "x"})
    assert answer.status == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "gpt-5" in error["message"]
    assert "fake" in error["message"]


async def test_served_model_name(make_site: Callable[..., Site]) -> None:
    site = make_site(config=ServerConfig(served_model_name="mine"))
    assert (await site.post(COMPLETIONS, {"model": "mine", "prompt": "x"})).json()["model"] == "mine"
    assert (await site.post(COMPLETIONS, {"model": "fake", "prompt": "x"})).status == 404
    assert [model["id"] for model in (await site.get("/v1/models")).json()["data"]] == ["mine"]


async def test_models(site: Site) -> None:
    model = (await site.get("/v1/models")).json()["data"][0]
    assert (model["id"], model["object"], model["max_model_len"], model["lossless"]) == ("fake", "model", 128, True)
    assert (model["dtype"], model["device"], model["drafter"], model["max_draft_length"]) == ("float32", "cpu", "ngram", 7)
    assert (await site.get("/v1/models/fake")).json() == model
    assert (await site.get("/v1/models/a/b")).status == 404


async def test_no_prompt_reaches_the_engine_with_a_token_that_the_model_lacks(make_site: Callable[..., Site], tmp_path: Path) -> None:
    """A tokenizer may have more tokens than the embedding has rows; one such token would end the engine for everyone."""
    folder = make_tiny_model(tmp_path / "model", vocab_size=320)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|extra|>"])
    assert tokenizer.token_to_id("<|extra|>") == 320
    tokenizer.save(str(folder / "tokenizer.json"))
    site = make_site(model_folder=folder)
    asked: list[tuple[str, str, Any]] = [
        (CHAT, "messages", [{"role": "user", "content": "hi <|extra|>"}]),
        (COMPLETIONS, "prompt", "hi <|extra|>"),
        (COMPLETIONS, "prompt", ["hi", "<|extra|>"]),
        (COMPLETIONS, "prompt", [5, 320]),
        (COMPLETIONS, "prompt", [[5], [320]]),
    ]
    for path, param, value in asked:
        answer = await site.post(path, {param: value})
        assert answer.status == 400
        error = answer.json()["error"]
        assert error["param"] == param
        assert "token id 320 is outside the vocabulary, 0 to 319" in error["message"]
    assert not site.engine.requests


async def test_a_larger_context_is_offered_only_where_the_model_has_one(make_site: Callable[..., Site]) -> None:
    site = make_site(FakeEngine(facts=replace(FACTS, max_position_embeddings=FACTS.max_model_len)))
    for body in ({"prompt": [5] * 200}, {"prompt": [5] * 100, "max_tokens": 100}):
        answer = await site.post(COMPLETIONS, body)
        assert answer.status == 400
        assert "shorten" in answer.json()["error"]["message"]
        assert "--max-model-len" not in answer.json()["error"]["message"]


async def test_prompt_too_long_gives_numbers_and_remedy(site: Site) -> None:
    answer = await site.post(COMPLETIONS, {"prompt": [5] * 1130})
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "prompt has 1,130 tokens, limit 128" in error["message"]
    assert "--max-model-len 2048" in error["message"]


@pytest.mark.parametrize(("num_tokens", "status"), [(127, 200), (128, 400)])
async def test_a_prompt_must_leave_room_for_one_token(site: Site, num_tokens: int, status: int) -> None:
    assert (await site.post(COMPLETIONS, {"prompt": [5] * num_tokens})).status == status


@pytest.mark.parametrize(("max_tokens", "status"), [(28, 200), (29, 400)])
async def test_prompt_and_max_tokens_together(site: Site, max_tokens: int, status: int) -> None:
    answer = await site.post(COMPLETIONS, {"prompt": [5] * 100, "max_tokens": max_tokens})
    assert answer.status == status
    if status == 400:
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
        assert "prompt has 100 tokens and max_tokens is 29, limit 128 together; ask for at most 28" in error["message"]
        assert error["message"].endswith("shorten the prompt or start with --max-model-len 256")


async def test_default_max_tokens_is_clipped_to_the_room(site: Site) -> None:
    await site.post(COMPLETIONS, {"prompt": [5] * 120})
    assert site.engine.requests[0].sampling.max_tokens == 8


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "x" * 9000}), (CHAT, {"messages": [{"role": "user", "content": "x" * 9000}]})]
)
async def test_too_many_characters_are_refused_before_tokenising(
    site: Site, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(site.server._preparation, "_encode_texts", never)
    monkeypatch.setattr(site.server._preparation, "_encode_chat", never)
    answer = await site.post(path, body)
    assert answer.status == 400
    assert "9,000 characters" in answer.json()["error"]["message"]


async def test_a_model_without_a_chat_template(make_site: Callable[..., Site], folder_without_template: Path) -> None:
    site = make_site(model_folder=folder_without_template)
    answer = await site.post(CHAT, {"messages": MESSAGES})
    assert answer.status == 400
    assert "no chat template" in answer.json()["error"]["message"]
    assert (await site.post(COMPLETIONS, {"prompt": "x"})).status == 200


async def test_bos_is_the_tokenizers_for_completions_and_the_templates_for_chat(make_site: Callable[..., Site], tmp_path: Path) -> None:
    """A tokenizer that puts a token first does so for plain text only: a template writes its own."""
    folder = make_tiny_model(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [first, text], "pair": [first, text], "special_tokens": {"<|endoftext|>": special},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    site = make_site(model_folder=folder)
    await site.post(COMPLETIONS, {"prompt": "x"})
    await site.post(CHAT, {"messages": MESSAGES})
    assert [request.prompt_token_ids[0] for request in site.engine.requests] == [0, 1]


async def test_a_tokenizer_that_cuts_is_told_not_to(make_site: Callable[..., Site], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    site = make_site(model_folder=folder)
    await site.post(COMPLETIONS, {"prompt": "zxcvbnm"})
    assert len(site.engine.requests[0].prompt_token_ids) == 7


async def test_openapi_lists_the_routes(site: Site) -> None:
    answer = await site.get("/openapi.json")
    assert answer.status == 200
    document = answer.json()
    assert {COMPLETIONS, CHAT, "/v1/models", "/health", "/ready", "/metrics", "/stats"} <= document["paths"].keys()
    bodies = {
        COMPLETIONS: "CompletionRequest",
        CHAT: "ChatCompletionRequest",
        "/tokenize": "TokenizeRequest",
        "/detokenize": "DetokenizeRequest",
        "/infer": "InferRequest",
    }
    for path, name in bodies.items():
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
    named = document["components"]["schemas"]
    top_p = next(kind for kind in named["CompletionRequest"]["properties"]["top_p"]["anyOf"] if kind["type"] == "number")
    assert (top_p["exclusiveMinimum"], top_p["maximum"]) == (0, 1)
    references = set(re.findall(r'"\$ref": ?"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references <= named.keys()


async def test_metrics_route(site: Site) -> None:
    await site.post(COMPLETIONS, {"prompt": "the fox", "temperature": 0})
    await site.post(COMPLETIONS, {"prompt": ""})
    answer = await site.get("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    text = answer.body.decode()
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="fake"} 1.0' in text
    assert 'paceline_errors_total{kind="bad_input"} 1.0' in text
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="fake"} 1.0' in text


async def test_the_first_scrape_finds_its_lines_prepared(site: Site) -> None:
    """They take several times as long as a scrape, while streams may be running already."""
    _template.cache_clear()
    await site.server.start()
    num_misses = _template.cache_info().misses
    assert (await site.get("/metrics")).status == 200
    assert _template.cache_info().misses == num_misses > 0
    await site.server.close()


async def test_unknown_paths_and_methods(site: Site) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", COMPLETIONS, 405), ("POST", "/health", 405)):
        answer = await site.post(path, {}, method=method)
        assert answer.status == status
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_wrong_method_names_all_right_ones(site: Site) -> None:
    answer = await site.post("/v1/responses/resp_1", {}, method="PATCH")
    assert (answer.status, answer.headers["allow"]) == (405, "DELETE, GET")


async def test_draining_refuses_new_work(site: Site) -> None:
    site.in_flight.is_draining = True
    answer = await site.post(COMPLETIONS, {"prompt": "x"})
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    assert (await site.get("/ready")).status == 503


async def test_ready(site: Site) -> None:
    assert (await site.get("/ready")).status == 200
    site.engine.kill()
    assert (await site.get("/ready")).status == 503


async def test_padding_ids_beyond_the_tokenizer_are_in_the_vocabulary(make_site: Callable[..., Site], tokenizer: Tokenizer) -> None:
    """The embedding may have more rows than the tokenizer has tokens: such ids run, and give no text."""
    engine = FakeEngine(facts=replace(FACTS, vocab_size=384), answer=lambda _: [383, 5, 2])
    assert tokenizer.id_to_token(383) is None
    answer = await make_site(engine).post(COMPLETIONS, {"prompt": [383]})
    assert answer.status == 200
    assert answer.json()["choices"][0]["text"] == tokenizer.decode([5])


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_folder_without_a_usable_tokenizer(make_site: Callable[..., Site], tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadInputError, match=r"tokenizer\.json cannot be read"):
        make_site(model_folder=tmp_path)
