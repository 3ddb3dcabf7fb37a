"""Messages, whole and streamed: however the tokens were cut, both say the same, in the order of events that clients expect."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from paceline.server.anthropic import stream as stream_module
from tests.fakes.fake_engine import Faults
from tests.fakes.message_events import checked, put_together, read_events
from tests.unit.server.conftest import Site

PATH = "/v1/messages"
TEXT = "the quick brown fox jumps 😀 over 日本 the lazy dog"
TOOLS = [{"name": "fox", "description": "jumps", "input_schema": {"type": "object"}}, {"name": "dog", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "fox", "arguments": {"over": "日本", "n": [1, 2.50]}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "dog", "arguments": {}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "fox", "arguments": {"over": "dog", oops'
FOX = {"type": "tool_use", "name": "fox", "input": {"over": "日本", "n": [1, 2.5]}}
DOG = {"type": "tool_use", "name": "dog", "input": {}}


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def thinking_block(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def body(**given: Any) -> dict[str, Any]:
    return {"max_tokens": 500, "messages": [{"role": "user", "content": "hi"}], **given}


async def ask(site: Site, stream: bool, **given: Any) -> dict[str, Any]:
    answer = await site.post(PATH, body(stream=stream, **given))
    assert answer.status == 200, answer.body
    return put_together(answer.body) if stream else checked(answer.json())


def without_ids(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The content, after a look at the ids of calls."""
    ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)
    assert all(call_id.startswith("toolu_") for call_id in ids)
    return [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]


# output, whether the model thinks, what was asked for, the content, the reason
ANSWERS: dict[str, tuple[str, bool, dict[str, Any], list[dict[str, Any]], str]] = {
    "text": (TEXT, False, {}, [text_block(TEXT)], "end_turn"),
    "nothing": ("", False, {}, [], "end_turn"),
    "thoughts": (f"<think>\nlet me see\n</think>\n\n{TEXT}", True, {}, [thinking_block("let me see"), text_block(TEXT)], "end_turn"),
    "thoughts that do not end": ("<think>\nlet me", True, {}, [thinking_block("let me")], "end_turn"),
    "a call": (CALL, False, {"tools": TOOLS}, [FOX], "tool_use"),
    "text and a call": (f"I jump.\n{CALL}", False, {"tools": TOOLS}, [text_block("I jump."), FOX], "tool_use"),
    "two calls": (f"{CALL}\n{SECOND}", False, {"tools": TOOLS}, [FOX, DOG], "tool_use"),
    "text between calls": (f"{CALL}\nand\n{SECOND}", False, {"tools": TOOLS}, [FOX, text_block("and"), DOG], "tool_use"),
    "all": (
        f"<think>\nhm\n</think>\n\nI jump.\n{CALL}\n{SECOND}", True, {"tools": TOOLS},
        [thinking_block("hm"), text_block("I jump."), FOX, DOG], "tool_use",
    ),
    "a broken call": (BROKEN, False, {"tools": TOOLS}, [text_block(BROKEN)], "end_turn"),
    "a call and a broken one": (f"{CALL}\n{BROKEN}", False, {"tools": TOOLS}, [FOX, text_block(BROKEN)], "tool_use"),
    "one call of two": (
        f"I jump.\n{CALL}\n{SECOND}", False, {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        [text_block("I jump."), FOX], "tool_use",
    ),
    "a call without tools": (CALL, False, {}, [text_block(CALL)], "end_turn"),
    "a call that may not be made": (CALL, False, {"tools": TOOLS, "tool_choice": {"type": "none"}}, [text_block(CALL)], "end_turn"),
}  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ANSWERS)
async def test_any_cut_gives_the_same_message(speak: Callable[..., Site], name: str, chunk: int) -> None:
    text, thinks, given, content, reason = ANSWERS[name]
    site = speak(text, chunk=chunk, thinks=thinks)
    for stream in (True, False):
        message = await ask(site, stream, **given)
        assert without_ids(message) == content
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, None)
    assert site.engine.num_active == 0


async def test_the_fields_of_a_message(speak: Callable[..., Site], tokenizer: Tokenizer) -> None:
    whole, streamed = [await ask(speak(TEXT, chunk=3), stream) for stream in (False, True)]
    for message in (whole, streamed):
        assert message.pop("id").startswith("msg_")
        assert message["metrics"].pop("decode_ms") >= 0
        assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
        assert message["usage"]["output_tokens"] == len(tokenizer.encode(TEXT).ids) + 1
        assert message["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert whole == streamed


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8])
async def test_a_stop_sequence_is_named(speak: Callable[..., Site], chunk: int) -> None:
    """The one that was complete first; the engine stops working then."""
    for stream in (True, False):
        site = speak(TEXT, chunk=chunk)
        message = await ask(site, stream, stop_sequences=["never", " dog", " over 日"])
        assert without_ids(message) == [text_block(TEXT[: TEXT.index(" over 日")])]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " over 日")
        assert site.engine.num_active == 0
        assert len(site.engine.aborted) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_sequence_behind_a_call(speak: Callable[..., Site], stream: bool) -> None:
    message = await ask(speak(f"{CALL}\nand more"), stream, tools=TOOLS, stop_sequences=["more"])
    assert without_ids(message) == [FOX, text_block("and")]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "more")


@pytest.mark.parametrize("stream", [True, False])
async def test_max_tokens(speak: Callable[..., Site], stream: bool) -> None:
    """A call that is cut is text; one that is whole does not hide that more may be missing."""
    message = await ask(speak(TEXT), stream, max_tokens=3)
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 3)
    (block,) = (await ask(speak(CALL), stream, tools=TOOLS, max_tokens=20))["content"]
    assert block["type"] == "text"
    assert CALL.startswith(block["text"])
    whole = await ask(speak(CALL + " " + "x" * 500), stream, tools=TOOLS, max_tokens=300)
    assert [block["type"] for block in whole["content"]] == ["tool_use", "text"]
    assert whole["stop_reason"] == "max_tokens"
    one = {"type": "auto", "disable_parallel_tool_use": True}
    alone = await ask(speak(CALL + " " + "x" * 500), stream, tools=TOOLS, max_tokens=300, tool_choice=one)
    assert (without_ids(alone), alone["stop_reason"]) == ([FOX], "tool_use")


@pytest.mark.parametrize("stream", [True, False])
async def test_more_tokens_than_the_context_has_room_for(speak: Callable[..., Site], stream: bool) -> None:
    site = speak("x" * 5000)
    message = await ask(site, stream, max_tokens=100_000)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == 4096
    assert message["stop_reason"] == "model_context_window_exceeded"


async def test_input_tokens_exclude_cached_ones(speak: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    site = speak(TEXT)
    monkeypatch.setattr("paceline.server.generation.Tally.num_cached_tokens", 16)
    counted = (await site.post(f"{PATH}/count_tokens", {"messages": body()["messages"]})).json()["input_tokens"]
    for stream in (True, False):
        usage = (await ask(site, stream))["usage"]
        assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (16, 0)
        assert usage["input_tokens"] == counted - 16
    start = read_events((await site.post(PATH, body(stream=True))).body)[0]
    assert start["message"]["usage"]["cache_read_input_tokens"] == 16


async def test_tokens_of_one_step_are_one_event(speak: Callable[..., Site], tokenizer: Tokenizer) -> None:
    answer = await speak(TEXT, chunk=4).post(PATH, body(stream=True))
    num_tokens = len(tokenizer.encode(TEXT).ids) + 1
    deltas = [event for event in read_events(answer.body) if event["type"] == "content_block_delta"]
    assert len(deltas) <= 1 + -(-(num_tokens - 1) // 4)


async def test_a_long_call_pings(speak: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_PING_S", 0.0)
    answer = await speak(CALL).post(PATH, body(stream=True, tools=TOOLS))
    assert {"type": "ping"} in read_events(answer.body)
    assert without_ids(put_together(answer.body)) == [FOX]


async def test_a_client_that_leaves_ends_its_generation(speak: Callable[..., Site]) -> None:
    site = speak(TEXT, faults=Faults(hang_after=3))
    connection = site.open(PATH, body(stream=True))
    await connection.num_chunks(2)
    await connection.leave()
    assert site.engine.num_active == 0
    assert len(site.engine.aborted) == 1


@pytest.mark.parametrize("fault", [{"die_after": 4}, {"fail_after": 4}])
async def test_a_stream_that_breaks_ends_with_an_error_event(speak: Callable[..., Site], fault: dict[str, int]) -> None:
    answer = await speak(TEXT, faults=Faults(**fault)).post(PATH, body(stream=True))
    *events, last = read_events(answer.body)
    assert events[0]["type"] == "message_start"
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["request_id"] == answer.headers["request-id"]
    assert not {"message_delta", "message_stop"} & {event["type"] for event in events}


async def test_a_late_stream_ends_in_good_order(speak: Callable[..., Site]) -> None:
    site = speak(TEXT, faults=Faults(hang_after=3), request_timeout=0.2)
    message = put_together((await site.post(PATH, body(stream=True))).body)
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 3)
    assert TEXT.startswith(message["content"][0]["text"])
    assert len(site.engine.aborted) == 1


async def test_shut_down_says_so(speak: Callable[..., Site]) -> None:
    site = speak(TEXT, faults=Faults(hang_after=3))
    stream, whole = site.open(PATH, body(stream=True)), site.open(PATH, body())
    await stream.num_chunks(2)
    site.in_flight.interrupt_all()
    await asyncio.gather(stream.task, whole.task)
    assert read_events(stream.answer.body)[-1]["error"]["type"] == "overloaded_error"
    assert whole.answer.status == 503
    assert json.loads(whole.answer.body)["error"]["type"] == "overloaded_error"
