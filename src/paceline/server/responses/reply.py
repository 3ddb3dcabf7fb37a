"""One response from its first token to its end: its object, its status, its events. The same for whole, streamed and background ones."""

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

import msgspec

from paceline.core.request import FinishReason
from paceline.server.detokenize import TextDelta
from paceline.server.generation import Generation
from paceline.server.openai.answers import Usage
from paceline.server.openai.errors import ErrorAnswer
from paceline.server.openai.structured import JsonSchemaFormat
from paceline.server.parsing.deltas import CallArguments, ContentDelta, MessageDelta, ReasoningDelta
from paceline.server.responses.events import Events
from paceline.server.responses.items import encode_items
from paceline.server.responses.output import Output
from paceline.server.responses.requests import ResponseRequest, response_format

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

_encode = msgspec.json.encode
_LATE = "the response was not finished within the time limit of this server (--request-timeout)"


@dataclass(frozen=True, slots=True)
class End:
    """How a response ended. `body`: its object; `output`: its items as one JSON list, for the conversation that goes on from it."""

    status: Status
    body: bytes
    output: bytes


class Reply:
    """Built from the deltas of a generation. Ends once, by `finish`, `fail` or `cancel`, and tells `on_end`."""

    def __init__(self, generation: Generation, head: bytes, events: Events, on_end: Callable[[End], None]) -> None:
        """`head`: the fields of the response object that do not change, encoded as an object."""
        self._generation = generation
        self._head = head[:-1]
        self.events = events
        self._on_end = on_end
        self._parser = generation.job.new_parser()
        self._output = Output(generation.vocabulary, events)
        self._num_reasoning_tokens = 0.0
        self._num_undecided_tokens = 0  # of steps that showed nothing yet
        self._reason: FinishReason | None = None
        self._error: dict[str, object] | None = None
        self._completed_s: int | None = None
        self._ended_body: bytes | None = None
        self.status: Status = "queued"

    @property
    def has_ended(self) -> bool:
        return self.status not in ("queued", "in_progress")

    async def follow(self) -> None:
        """Run the generation to its end."""
        async with aclosing(self._generation.run()) as deltas:
            async for _, delta in deltas:
                self.feed(delta)
        self.finish()

    def feed(self, delta: TextDelta) -> None:
        """The next step."""
        if self.status == "queued":
            self._begin()
        parts = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            parts = [*parts, *self._parser.finish()]
        self._count_reasoning(parts, delta.num_tokens)
        self._output.add(parts, delta.tokens)

    def finish(self) -> None:
        """The generation is over."""
        assert self._reason is not None, "the last delta has a finish reason"
        if self._reason is FinishReason.STOP:
            self._end("completed")
        elif self._reason is FinishReason.LENGTH:
            self._end("incomplete")
        else:
            self._error = _error_fields(_LATE)
            self._end("failed")

    def fail(self, error: ErrorAnswer) -> None:
        """The generation broke off."""
        if not self.has_ended:
            self._error = _error_fields(error.message)
            self._end("failed")
            self.events.say_error(error)

    def cancel(self) -> None:
        """Nobody wants it any more."""
        if not self.has_ended:
            self._end("cancelled")

    def body(self) -> bytes:
        """The response object as it stands. What has been said stands in it once the response has ended."""
        if self._ended_body is not None:
            return self._ended_body
        has_ended = self.has_ended
        fields: dict[str, object] = {
            "status": self.status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "completed_at": self._completed_s,
            "output": self._output.items if has_ended else [],
            "usage": _usage_fields(self._generation.usage, round(self._num_reasoning_tokens)) if has_ended else None,
        }
        if has_ended:
            fields["metrics"] = self._generation.metrics.fields()
        return self._head + b"," + _encode(fields)[1:]

    def _begin(self) -> None:
        self.status = "in_progress"
        body = self.body()
        self.events.say_response("response.created", body)
        self.events.say_response("response.in_progress", body)

    def _end(self, status: Status) -> None:
        if self._reason is None:  # cut off: what the parser held back is told, too
            self._output.add(self._parser.finish())
        self._output.end(is_whole=status == "completed")
        self.status = status
        if status == "completed":
            self._completed_s = int(time.time())
        body = self._ended_body = self.body()
        self.events.say_response(f"response.{status}", body)
        self._on_end(End(status, body, encode_items(self._output.items)))

    def _count_reasoning(self, parts: Sequence[MessageDelta], num_tokens: int) -> None:
        """Tokens of a step that ended a thought are shared out by characters; those of one that showed nothing count with the next."""
        self._num_undecided_tokens += num_tokens
        num_chars = num_reasoning_chars = 0
        for part in parts:
            if isinstance(part, ReasoningDelta):
                num_reasoning_chars += len(part.text)
            if isinstance(part, ReasoningDelta | ContentDelta | CallArguments):
                num_chars += len(part.text)
        if num_chars:
            self._num_reasoning_tokens += self._num_undecided_tokens * num_reasoning_chars / num_chars
            self._num_undecided_tokens = 0


def _usage_fields(usage: Usage, num_reasoning_tokens: int) -> dict[str, object]:
    details: dict[str, object] = {"reasoning_tokens": num_reasoning_tokens}
    if usage.prediction is not None:
        details |= {"accepted_prediction_tokens": usage.prediction[0], "rejected_prediction_tokens": usage.prediction[1]}
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},  # writing is not charged for here
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": details,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


def _error_fields(message: str) -> dict[str, object]:
    return {"code": "server_error", "message": message}


def head_fields(request: ResponseRequest, response_id: str, model: str, created_s: int, is_stored: bool) -> bytes:
    """The fields of the response object that do not change, encoded: what it is, and the options it was asked for with."""
    return _encode(
        {
            "id": response_id,
            "object": "response",
            "created_at": created_s,
            "model": model,
            "background": bool(request.background),
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": is_stored,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": _format_fields(request), "verbosity": "medium"},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": request.truncation or "disabled",
            "user": request.user,
        }
    )


def _format_fields(request: ResponseRequest) -> dict[str, object]:
    asked = response_format(request.text)
    if isinstance(asked, JsonSchemaFormat):
        of = asked.json_schema
        return {"type": "json_schema", "name": of.name, "description": of.description, "schema": of.schema, "strict": of.strict}
    return {"type": "text" if asked is None else "json_object"}
