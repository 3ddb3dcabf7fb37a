"""`POST /infer`: a prompt in, its text and what it took out. The smallest interface of the server, on the same path as completions."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from paceline.metrics.requests import RequestMetrics
from paceline.server.detokenize import TextDelta
from paceline.server.generation import Generation
from paceline.server.inflight import InFlight
from paceline.server.openai import answers
from paceline.server.openai.requests import CompletionRequest, OutputTokens, Temperature, read_body
from paceline.server.stream import EventStream, WholeAnswer


class InferRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_length` is the most tokens of the answer. Completions have the other options."""

    prompt: Annotated[str, Meta(extra_json_schema={"minLength": 1})]  # an empty one is refused with the reason
    max_length: OutputTokens
    temperature: Temperature | None = None
    stream: bool | None = None

    def as_completion(self) -> CompletionRequest:
        prompt = Raw(msgspec.json.encode(self.prompt))
        return CompletionRequest(prompt=prompt, max_tokens=self.max_length, temperature=self.temperature, stream=self.stream)


def read_infer(body: bytes) -> InferRequest:
    """The body of `POST /infer`. Raises BadInputError naming the first field at fault."""
    return read_body(body, InferRequest)


class InferResponse(WholeAnswer):
    """One JSON object."""

    def _body(self, choices: Sequence[TextDelta]) -> bytes:
        (choice,) = choices
        return _answer(self._generation, choice.text, choice.finish_reason or "")


class InferStream(EventStream):
    """Pieces of text, then the object of an answer that does not stream, then [DONE]."""

    def __init__(self, generation: Generation, in_flight: InFlight, metrics: RequestMetrics) -> None:
        super().__init__(generation, in_flight, metrics)
        self._texts: list[str] = []
        self._finish_reason = ""

    def _event(self, index: int, delta: TextDelta) -> bytes:
        self._texts.append(delta.text)
        self._finish_reason = delta.finish_reason or ""
        return b'data: {"text":' + msgspec.json.encode(delta.text) + b"}\n\n" if delta.text else b""

    def _end(self) -> bytes:
        return b"data: " + _answer(self._generation, "".join(self._texts), self._finish_reason) + b"\n\n" + answers.DONE


def _answer(generation: Generation, text: str, finish_reason: str) -> bytes:
    draft = generation.metrics.draft
    return msgspec.json.encode(
        {
            "text": text,
            "tokens": generation.usage.num_output_tokens,
            "latency_ms": round(generation.latency_ms, 3),
            "first_token_ms": round(generation.first_token_ms, 3),
            "accepted_length": 1 + draft.num_accepted_tokens / draft.num_spec_steps if draft.num_spec_steps else 1.0,
            "finish_reason": finish_reason,
        }
    )
