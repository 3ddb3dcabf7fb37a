"""Checks what the server says of a response against the types of the openai package, and reads a stream back as its client would."""

import json
from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList

_EVENTS = {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])}


def check_response(body: dict[str, Any]) -> Response:
    """The body as the client's type; raises for one that lacks a field or has a wrong one."""
    return Response.model_validate(body)


def check_items(body: dict[str, Any]) -> ResponseItemList:
    return ResponseItemList.model_validate(body)


def read_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each checked: its line, its type's fields, its number."""
    events = []
    for index, text in enumerate(body.decode().removesuffix("\n\n").split("\n\n")):
        name, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == index
        _EVENTS[event["type"]].model_validate(event)
        events.append(event)
    return events


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a stream from its deltas alone, checked against what its other events say of them."""
    items: dict[int, dict[str, Any]] = {}
    done: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    for event in events:
        kind, index = event["type"], event.get("output_index", -1)
        if kind == "response.output_item.added":
            assert index == len(items), "items are numbered in their order"
            items[index], texts[index] = event["item"], ""
            assert event["item"]["status"] == "in_progress"
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[index]["id"]
            assert event["delta"]
            texts[index] += event["delta"]
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert event["text"] == texts[index]
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == texts[index]
            assert event["name"] == items[index]["name"]
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == texts[index]
        elif kind == "response.output_item.done":
            item = event["item"]
            assert (item["id"], item["type"]) == (items[index]["id"], items[index]["type"])
            assert texts[index] == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
            if not (item["type"] == "function_call" and item["status"] == "incomplete"):  # a call that turned out to be none
                done.append(item)
    return done
