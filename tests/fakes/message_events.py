"""Reads streams of Anthropic's Messages API: the order of events is checked strictly, then they are put together to a message."""

import json
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
_FIELD = {"text_delta": "text", "thinking_delta": "thinking"}


def read_events(body: bytes) -> list[dict[str, Any]]:
    """Every event; each is named twice, by its line and in its data."""
    events: list[dict[str, Any]] = []
    for part in body.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def put_together(body: bytes) -> dict[str, Any]:
    """The message that a whole stream tells."""
    start, *events, stop = [event for event in read_events(body) if event["type"] != "ping"]
    for event in (start, *events, stop):
        _EVENT.validate_python(event)
    assert (start["type"], stop["type"], events[-1]["type"]) == ("message_start", "message_stop", "message_delta")
    message: dict[str, Any] = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    open_index = None
    inputs: dict[int, str] = {}
    for event in events[:-1]:
        if event["type"] == "content_block_start":
            assert open_index is None
            open_index = event["index"]
            assert open_index == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
        else:
            assert (event["type"], event["index"]) == ("content_block_delta", open_index)
            delta, block = event["delta"], message["content"][-1]
            if delta["type"] == "input_json_delta":
                inputs[open_index] = inputs.get(open_index, "") + delta["partial_json"]
            else:
                assert block["type"] == delta["type"].removesuffix("_delta")
                assert delta[_FIELD[delta["type"]]], "an event that says nothing"
                block[_FIELD[delta["type"]]] += delta[_FIELD[delta["type"]]]
    assert open_index is None
    for index, text in inputs.items():
        assert message["content"][index]["input"] == {}
        message["content"][index]["input"] = json.loads(text)
    message |= events[-1]["delta"] | {"usage": events[-1]["usage"], "metrics": events[-1]["metrics"]}
    return checked(message)


def checked(message: dict[str, Any]) -> dict[str, Any]:
    """A whole message, if the client's types take it."""
    Message.model_validate(message)
    return message
