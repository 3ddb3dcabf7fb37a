"""Bodies of Anthropic's routes: bad ones are refused in Anthropic's form, with the field's name and a remedy, and harm nobody."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from paceline.server.edge import MAX_BODY_BYTES
from tests.fakes.asgi import Answer
from tests.unit.server.conftest import Site

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = {"role": "user", "content": "hi"}
TOOL = {"name": "fox", "description": "jumps", "input_schema": {"type": "object"}}


def body(**given: Any) -> dict[str, Any]:
    return {"max_tokens": 5, "messages": [HI], **given}


def message_of(answer: Answer, status: int = 400, kind: str = "invalid_request_error") -> str:
    assert answer.status == status, answer.body
    error = answer.json()
    assert error.keys() == {"type", "error", "request_id"}
    assert (error["type"], error["error"].keys(), error["error"]["type"]) == ("error", {"type", "message"}, kind)
    assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return error["error"]["message"]


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


def fitting(schema: object) -> dict[str, Any]:
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


# what is wrong, and words of the answer
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages: "),
    "messages of the wrong type": ({"messages": "hi"}, "messages: "),
    "no role": ({"messages": [{"content": "hi"}]}, "messages.0.role: the field is missing"),
    "other role": ({"messages": [{"role": "tool", "content": "hi"}]}, "messages.0.role: "),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content: the field is missing"),
    "null content": ({"messages": [{"role": "user", "content": None}]}, "messages.0.content: "),
    "image": (block(type="image", source={"type": "url", "url": "http://x"}), "messages.0.content.0: a block of the type 'image'"),
    "document": (block(type="document", source={}), "put what images and documents say into text"),
    "server tool's result": (block(type="web_search_tool_result"), "run tools in the client"),
    "call of the user": (block(type="tool_use", id="a", name="b", input={}), "messages.0.content.0: "),
    "image in a result": (
        block(type="tool_result", tool_use_id="x", content=[{"type": "image"}]),
        "messages.0.content.0.content.0: a block of the type 'image'",
    ),
    "result without an id": (block(type="tool_result"), "messages.0.content.0.tool_use_id: the field is missing"),
    "image in system": ({"system": [{"type": "image"}]}, "system.0.type: "),
    "max_tokens of 0": ({"max_tokens": 0}, "max_tokens: "),
    "max_tokens of null": ({"max_tokens": None}, "max_tokens: "),
    "max_tokens as text": ({"max_tokens": "5"}, "max_tokens: "),
    "temperature": ({"temperature": -1}, "temperature: "),
    "top_p": ({"top_p": 2}, "top_p: "),
    "top_k": ({"top_k": "5"}, "top_k: "),
    "empty stop sequence": ({"stop_sequences": [""]}, "stop_sequences.0: "),
    "many stop sequences": ({"stop_sequences": ["x"] * 17}, "stop_sequences: "),
    "long stop sequence": ({"stop_sequences": ["x" * 2000]}, "stop_sequences.0: "),
    "min_tokens": ({"min_tokens": 6}, "min_tokens is 6, more than max_tokens, 5"),
    "seed": ({"seed": 1 << 70}, "seed: must have at most 64 bits"),
    "token id": ({"stop_token_ids": [10_000]}, "token id 10,000 is outside the vocabulary"),
    "tool's name": ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name: "),
    "many tools": ({"tools": [TOOL] * 129}, "tools: "),
    "twice the same tool": ({"tools": [TOOL, TOOL]}, "tools.1.name: there are two tools"),
    "schema": ({"tools": [{**TOOL, "input_schema": []}]}, "tools.0.input_schema: must be a JSON object"),
    "long schema": ({"tools": [{**TOOL, "input_schema": {"x": "y" * 70_000}}]}, "tools.0.input_schema: the schema has"),
    "server tool": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type: this server has no tools of its own"),
    "must call nothing": ({"tool_choice": {"type": "any"}}, "tool_choice: "),
    "must call another": ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "dog"}}, "tool_choice: names the function 'dog'"),
    "choice": ({"tool_choice": {"type": "perhaps"}}, "tool_choice.type: "),
    "choice as text": ({"tool_choice": "auto"}, "tool_choice: "),
    "thinking": ({"thinking": {"type": "loud"}}, "thinking.type: "),
    "last message calls": (
        {"messages": [HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "fox", "input": {}}]}]},
        "messages.1: the last turn calls tools",
    ),
    "stop": ({"stop": ["x"]}, "stop: here its name is stop_sequences"),
    "max_completion_tokens": ({"max_completion_tokens": 5}, "max_completion_tokens: here its name is max_tokens"),
    "n": ({"n": 2}, "n is not supported"),
    "logprobs": ({"logprobs": True}, "logprobs is not supported"),
    "prompt_logprobs": ({"prompt_logprobs": 1}, "prompt_logprobs is not supported"),
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format: here its name is output_config.format"),
    "stream_options": ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options is not supported"),
    "parallel_tool_calls": ({"parallel_tool_calls": False}, "parallel_tool_calls is not supported"),
    "continue_final_message": ({"continue_final_message": True}, "continue_final_message is not supported"),
    "effort": ({"output_config": {"effort": "high"}}, "output_config.effort: no model here can be told"),
    "other format": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: "),
    "no schema": ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: the field is missing"),
    "null schema": (fitting(None), "output_config.format.schema: must be a JSON object"),
    "no schema at all": (fitting(5), "output_config.format.schema: must be a JSON object"),
    "block without a type": ({"system": [{"text": "x"}]}, "system.0.type: the field is missing"),
    "format without a type": ({"output_config": {"format": {"schema": {}}}}, "output_config.format.type: the field is missing"),
    "long format": (fitting({"x": "y" * 70_000}), "output_config.format.schema: the schema has"),
    "format of a prefilled answer": (
        {"messages": [HI, {"role": "assistant", "content": "{"}], **fitting({})}, "output_config.format.schema: is the structure of",
    ),
    "two structures": ({**fitting({}), "structured_outputs": {"regex": "x"}}, "structured_outputs.regex: "),
    "container": ({"container": "x"}, "container is not supported"),
    "mcp_servers": ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    "context_management": ({"context_management": {"edits": [{"type": "clear"}]}}, "context_management is not supported"),
    "best_of": ({"best_of": 2}, "best_of is not supported"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "words"), BAD.values(), ids=BAD)
async def test_bad_bodies(speak: Callable[..., Site], given: dict[str, Any], words: str) -> None:
    site = speak("x")
    message = message_of(await site.post(PATH, body(**given)))
    assert message.startswith(words) or words in message
    assert not site.engine.requests
    assert (await site.post(PATH, body())).status == 200


HARMLESS: dict[str, Any] = {
    "metadata": {"user_id": "ann"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "inference_geo": "us", "speed": "fast",
    "stop_sequences": None, "system": None, "tools": [], "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "top_k": None,
    "output_config": {"effort": None, "format": None},
    "context_management": {"edits": []}, "mcp_servers": [], "container": None, "no_such_option": [1], "n": 1,
}  # fmt: skip


async def test_options_that_ask_for_nothing(site: Site) -> None:
    assert (await site.post(PATH, body(**HARMLESS))).status == 200


async def test_max_tokens_is_required(site: Site) -> None:
    assert message_of(await site.post(PATH, {"messages": [HI]})) == "max_tokens: the field is missing"


async def test_options_reach_the_engine(speak: Callable[..., Site]) -> None:
    site = speak("x")
    await site.post(PATH, body(temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=3, stop_token_ids=[7], max_draft_length=2))
    (request,) = site.engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 0.9, 5, 0.1, 3)
    assert (sampling.max_tokens, sampling.stop_token_ids, request.max_draft_length) == (5, (7,), 2)


class GrammarRecorder:
    """Stands for the check of grammars, which has tests of its own; keeps what it is asked."""

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        self.params: list[str] = []
        monkeypatch.setattr(site.server._preparation._grammars, "check", self.check)

    async def check(self, grammar: str, param: str) -> None:
        self.params.append(param)


def grammars(site: Site) -> dict[str, Any]:
    """The parts of the grammar that reached the engine, by name."""
    grammar = site.engine.requests[-1].sampling.grammar
    assert grammar is not None
    return {part.get("name", "top"): part for part in json.loads(grammar)["grammars"]}


async def test_a_schema_binds_the_answer(speak: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    site = speak("x")
    recorder = GrammarRecorder(site, monkeypatch)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    answer = await site.post(PATH, body(**fitting(schema)))
    assert answer.status == 200, answer.body
    asked = grammars(site)["answer"]["json_schema"]
    assert asked.pop("x-guidance")["lenient"] is False
    assert (asked, recorder.params) == (schema, ["response_format.json_schema.schema"])


@pytest.mark.parametrize(
    ("choice", "num_functions", "is_single"),
    [
        ({"type": "any"}, 2, False),
        ({"type": "any", "disable_parallel_tool_use": True}, 2, True),
        ({"type": "tool", "name": "dog"}, 1, True),
    ],
)
async def test_calls_that_must_be_made(
    speak: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, choice: dict[str, Any], num_functions: int, is_single: bool
) -> None:
    site = speak('<tool_call>\n{"name": "dog", "arguments": {}}\n</tool_call>')
    GrammarRecorder(site, monkeypatch)
    answer = await site.post(PATH, body(max_tokens=200, tools=[TOOL, {**TOOL, "name": "dog"}], tool_choice=choice))
    assert (answer.status, answer.json()["stop_reason"]) == (200, "tool_use")
    rules = grammars(site)["calls"]["lark_grammar"]
    assert rules.count("%json") == num_functions
    assert rules.startswith("start: call\n") == is_single


THINKING = [
    {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}, {"type": "adaptive", "display": "summarized"},
    {"type": "adaptive", "display": "omitted"}, {"type": "between_tools"},
]  # fmt: skip


@pytest.mark.parametrize("thinking", THINKING)
async def test_thinking_is_refused_where_it_would_be_ignored(speak: Callable[..., Site], thinking: dict[str, Any]) -> None:
    """A model that does not think stays under every budget; one that does cannot be told how much."""
    for path in (PATH, COUNT):
        assert (await speak("x").post(path, body(thinking=thinking))).status == 200
        answer = await speak("x", thinks=True).post(path, body(thinking=thinking))
        if thinking in ({"type": "adaptive"}, {"type": "adaptive", "display": "summarized"}):
            assert answer.status == 200
        else:
            assert message_of(answer).startswith("thinking: this model thinks as long as it likes")


@pytest.mark.parametrize("last", ["the quick", [{"type": "text", "text": "the quick"}]])
async def test_a_prefilled_answer_goes_on(site: Site, tokenizer: Tokenizer, last: Any) -> None:
    answer = await site.post(PATH, body(messages=[HI, {"role": "assistant", "content": last}]))
    assert answer.status == 200
    prompt = tokenizer.decode(list(site.engine.requests[0].prompt_token_ids), skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nthe quick"


USE = {"type": "tool_use", "id": "t", "name": "fox", "input": {"a": 1}}
CONVERSATION = [
    HI,
    {"role": "assistant", "content": [{"type": "text", "text": "I jump."}, USE]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "42"}, {"type": "text", "text": "so?"}]},
]
COUNTED: dict[str, dict[str, Any]] = {
    "text": {"messages": [HI]},
    "system": {"messages": [HI], "system": [{"type": "text", "text": "be brief"}]},
    "tools": {"messages": CONVERSATION, "tools": [TOOL]},
    "hidden tools": {"messages": [HI], "tools": [TOOL], "tool_choice": {"type": "none"}},
    "prefill": {"messages": [HI, {"role": "assistant", "content": "the quick"}]},
}


@pytest.mark.parametrize("given", COUNTED.values(), ids=COUNTED)
async def test_count_tokens_says_what_the_prompt_has(speak: Callable[..., Site], given: dict[str, Any]) -> None:
    site = speak("x")
    counted = await site.post(COUNT, given)
    assert counted.status == 200, counted.body
    usage = (await site.post(PATH, {**given, "max_tokens": 5})).json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert counted.json()["input_tokens"] == len(site.engine.requests[0].prompt_token_ids)


async def test_counting_names_faults_too(speak: Callable[..., Site]) -> None:
    site = speak("x")
    assert message_of(await site.post(COUNT, {"messages": [HI], "tools": [TOOL, TOOL]})).startswith("tools.1.name: ")
    assert message_of(await site.post(COUNT, {})) == "messages: the field is missing"
    assert message_of(await site.post(COUNT, {"messages": [HI], "model": "x"}), 404, "not_found_error")


async def test_results_go_back_to_the_model(speak: Callable[..., Site], tokenizer: Tokenizer) -> None:
    site = speak("x")
    assert (await site.post(PATH, body(messages=CONVERSATION, tools=[TOOL]))).status == 200
    prompt = tokenizer.decode(list(site.engine.requests[0].prompt_token_ids), skip_special_tokens=False)
    assert '<tool_call>\n{"name": "fox", "arguments": {"a": 1}}\n</tool_call>' in prompt
    assert "<tool_response>\n42\n</tool_response>" in prompt


DEEP = 100_000


def asked(content: bytes, role: bytes = b"user") -> bytes:
    """A body whose first message has this content."""
    last = b'{"role": "user", "content": "x"}'
    return b'{"max_tokens": 5, "messages": [{"role": "' + role + b'", "content": ' + content + b"}, " + last + b"]}"


def called(value: bytes) -> bytes:
    """A body with a call whose input holds this value."""
    return asked(b'[{"type": "tool_use", "id": "a", "name": "b", "input": {"a": ' + value + b"}}]", b"assistant")


RAW: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"max_tokens": 5',
    "list": b"[]",
    "bad utf-8": asked(b'"\xff"'),
    "surrogate": asked(b'"\\ud800"'),
    "deep content": asked(b"[" * DEEP + b"]" * DEEP),
    "deep input": called(b"[" * DEEP + b"]" * DEEP),
    "bad number in an input": called(b"1e999"),
    "surrogate in an input": called(b'"\\ud800"'),
    "bad utf-8 in an input": called(b'"\xff"'),
    "long number": b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("path", [PATH, COUNT])
@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
async def test_hostile_bodies(speak: Callable[..., Site], path: str, raw: bytes) -> None:
    site = speak("x")
    message = message_of(await site.post(path, raw))
    assert 0 < len(message) <= 1000
    assert (await site.post(PATH, body())).status == 200


LARGE = {
    "parts": (b'{"max_tokens":5,"messages":[{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}"),
    "messages": (b'{"max_tokens":5,"messages":[', b'{"role":"user","content":[]}', b"]}"),
    "system": (b'{"max_tokens":5,"messages":[],"system":[', b'{"type":"text","text":""}', b"]}"),
    "examples": (b'{"max_tokens":5,"messages":[{"role":"user","content":""}],"tools":[{"name":"a","input_examples":[', b"[]", b"]}]}"),
}


@pytest.mark.parametrize("parts", LARGE.values(), ids=LARGE)
async def test_a_large_bad_body_holds_nobody_up(site: Site, parts: tuple[bytes, bytes, bytes]) -> None:
    start, element, end = parts
    number = (MAX_BODY_BYTES - len(start) - len(end)) // (len(element) + 1)
    connection = site.open(PATH, start + b",".join([element] * number) + end)
    started_s = time.process_time()
    await connection.task
    used_s = time.process_time() - started_s
    message_of(connection.answer)
    assert used_s < 1.5
