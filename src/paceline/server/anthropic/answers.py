"""Whole messages and stream events of Anthropic's API, encoded. Text events are glued from prepared bytes: one per step must be cheap."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from paceline.core.request import FinishReason
from paceline.server.anthropic.blocks import Piece, ToolUse
from paceline.server.detokenize import TextDelta
from paceline.server.openai.answers import AnswerMetrics, Usage
from paceline.server.parsing.deltas import ContentDelta

_encode = msgspec.json.encode

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds an answer beside `max_tokens`, as far as its end is told by it."""

    is_cut_by_context: bool  # the context has less room than max_tokens asks for
    has_one_call: bool


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ended, in Anthropic's words."""

    stop_reason: str
    stop_sequence: str | None


def ending(last: TextDelta, num_calls: int, limits: Limits) -> Ending:
    """Why an answer with that many whole calls ended. A time limit counts as one of tokens: there is more that could be said."""
    if num_calls and limits.has_one_call:
        return Ending("tool_use", None)  # whatever ended it, the answer was over before
    if last.stop is not None:
        return Ending("stop_sequence", last.stop)
    if num_calls and last.finish_reason is FinishReason.STOP:
        return Ending("tool_use", None)
    if last.finish_reason is FinishReason.STOP:
        return Ending("end_turn", None)
    if last.finish_reason is FinishReason.LENGTH and limits.is_cut_by_context:
        return Ending("model_context_window_exceeded", None)
    return Ending("max_tokens", None)


def usage_fields(usage: Usage) -> dict[str, int]:
    """The three counts of input add up to the prompt. The prefix cache takes what it likes, so nothing is written to order."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
    }


class Envelope:
    """What the events of one answer, or its one body, share."""

    def __init__(self, answer_id: str, model: str) -> None:
        self._head: dict[str, object] = {"id": answer_id, "type": "message", "role": "assistant", "model": model}

    def body(self, pieces: Iterable[Piece], end: Ending, usage: Usage, metrics: AnswerMetrics) -> bytes:
        """The whole answer of a request that does not stream."""
        return _encode(
            {
                **self._head,
                "content": _content(pieces),
                "stop_reason": end.stop_reason,
                "stop_sequence": end.stop_sequence,
                "usage": usage_fields(usage),
                "metrics": metrics.fields(),
            }
        )

    def start(self, usage: Usage) -> bytes:
        """The first event: the message, still empty."""
        still_open: dict[str, object] = {"content": (), "stop_reason": None, "stop_sequence": None}
        return _event("message_start", {"message": {**self._head, **still_open, "usage": usage_fields(usage)}})


class BlockWriter:
    """Writes the events of an answer's blocks, one open at a time."""

    def __init__(self) -> None:
        self._index = -1  # of the latest block
        self._kind: type[Piece] | None = None  # of the open one
        self._delta_head = b""

    def write(self, pieces: Iterable[Piece]) -> bytes:
        events: list[bytes] = []
        for piece in pieces:
            if isinstance(piece, ToolUse):
                events += (self.close(), self._whole_call(piece))
                continue
            if self._kind is not type(piece):
                events += (self.close(), self._open(piece))
            events.append(self._delta_head + _encode(piece.text) + b"}}\n\n")
        return b"".join(events)

    def close(self) -> bytes:
        """End the open block, if there is one."""
        if self._kind is None:
            return b""
        self._kind = None
        return _block_stop(self._index)

    def _open(self, piece: Piece) -> bytes:
        self._index += 1
        self._kind = type(piece)
        if isinstance(piece, ContentDelta):
            self._delta_head = _delta_head(self._index, b"text_delta", b"text")
            return _block_start(self._index, _text_block(""))
        self._delta_head = _delta_head(self._index, b"thinking_delta", b"thinking")
        return _block_start(self._index, _thinking_block(""))

    def _whole_call(self, call: ToolUse) -> bytes:
        self._index += 1
        start = _block_start(self._index, _tool_use_block(call, {}))
        delta = _delta_head(self._index, b"input_json_delta", b"partial_json") + _encode(call.arguments) + b"}}\n\n"
        return start + delta + _block_stop(self._index)


def message_end(end: Ending, usage: Usage, metrics: AnswerMetrics) -> bytes:
    """The last two events: how the message ended and what it cost, and that nothing follows."""
    delta = {"stop_reason": end.stop_reason, "stop_sequence": end.stop_sequence}
    return _event("message_delta", {"delta": delta, "usage": usage_fields(usage), "metrics": metrics.fields()}) + _STOP


def error_event(body: bytes) -> bytes:
    """The last event of a stream that broke."""
    return b"event: error\ndata: " + body + b"\n\n"


def count_body(num_tokens: int) -> bytes:
    """The answer to `count_tokens`."""
    return _encode({"input_tokens": num_tokens})


def _content(pieces: Iterable[Piece]) -> list[dict[str, object]]:
    blocks: list[dict[str, object]] = []
    texts: list[str] = []  # of the open block
    kind: type[Piece] | None = None

    def close() -> None:
        nonlocal kind
        if kind is not None:
            text = "".join(texts)
            blocks.append(_text_block(text) if kind is ContentDelta else _thinking_block(text))
        texts.clear()
        kind = None

    for piece in pieces:
        if isinstance(piece, ToolUse):
            close()
            blocks.append(_tool_use_block(piece, msgspec.Raw(piece.arguments.encode())))
            continue
        if kind is not type(piece):
            close()
            kind = type(piece)
        texts.append(piece.text)
    close()
    return blocks


def _text_block(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def _thinking_block(text: str) -> dict[str, object]:
    return {"type": "thinking", "thinking": text, "signature": ""}  # nobody here checks that thoughts come back unchanged


def _tool_use_block(call: ToolUse, given: object) -> dict[str, object]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": given}


def _block_start(index: int, block: dict[str, object]) -> bytes:
    return _event("content_block_start", {"index": index, "content_block": block})


def _block_stop(index: int) -> bytes:
    return _event("content_block_stop", {"index": index})


def _delta_head(index: int, kind: bytes, field: bytes) -> bytes:
    """An event's bytes up to its text."""
    head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
    return head % (index, kind, field)


def _event(kind: str, fields: dict[str, object]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **fields}) + b"\n\n"
