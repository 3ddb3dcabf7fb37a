"""Plays text to an output parser in pieces and puts together what a client would: from a whole answer, and from a stream's chunks."""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.server.openai.messages import Message, delta_fields
from paceline.server.parsing.call import Calls
from paceline.server.parsing.deltas import MessageDelta, OutputParser

TOOL_NAMES = ("f", "get_weather", "é")


def calls() -> Calls:
    """Calls whose ids are c0, c1, ..."""
    counter = itertools.count()
    return Calls(TOOL_NAMES, lambda: f"c{next(counter)}")


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def cut_at(text: str, places: Iterable[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def play(parser: OutputParser, pieces: Iterable[str]) -> list[Sequence[MessageDelta]]:
    """What the parser said of each piece, and at last of the end."""
    return [*(parser.feed(piece) for piece in pieces), parser.finish()]


def message(parser: OutputParser, pieces: Iterable[str]) -> dict[str, Any]:
    """The message of a whole answer, without the role; its calls as (id, name, arguments)."""
    whole = Message()
    for deltas in play(parser, pieces):
        whole.add(deltas)
    fields: dict[str, Any] = whole.fields()
    assert fields.pop("role") == "assistant"
    found = fields.get("tool_calls", [])
    assert all(call["type"] == "function" for call in found)
    assert len(found) == parser.num_calls
    if found:
        fields["tool_calls"] = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in found]
    return fields


def streamed(parser: OutputParser, pieces: Iterable[str]) -> dict[str, Any]:
    """What a client collects from the chunks; calls whose arguments are no JSON are left out, because it cannot run them."""
    collected: dict[str, Any] = {"content": ""}
    slots: list[list[str]] = []
    for deltas in play(parser, pieces):
        delta: dict[str, Any] = delta_fields(deltas)
        for name in ("content", "reasoning_content"):
            if name in delta:
                assert delta[name]
                collected[name] = collected.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(slots):
                assert call["type"] == "function"
                slots.append([call["id"], call["function"]["name"], ""])
            else:
                assert "id" not in call and "name" not in call["function"]
            slots[call["index"]][2] += call["function"]["arguments"]
    whole = [tuple(slot) for slot in slots if is_object(slot[2])]
    if whole:
        collected["tool_calls"] = whole
        collected["content"] = collected["content"] or None
    return collected


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def check_every_cut(make_parser: Callable[[], OutputParser], text: str) -> dict[str, Any]:
    """The message of `text`; fails unless pieces of every size up to 16 give it too, whole and streamed."""
    expected = message(make_parser(), [text])
    assert streamed(make_parser(), [text]) == expected
    for size in range(1, 17):
        assert message(make_parser(), cut(text, size)) == expected
        assert streamed(make_parser(), cut(text, size)) == expected
    return expected
