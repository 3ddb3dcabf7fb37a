"""Bodies and stream chunks of both generation endpoints, encoded. Chunks are glued from prepared bytes: one per token must be cheap."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from paceline.core.outcome import DraftStats

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"
_CHUNK_END = b"}\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one HTTP request, all its prompts together."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    prediction: tuple[int, int] | None = None  # draft tokens accepted and rejected, of a request that came with a predicted output

    def fields(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self.prediction is not None:
            accepted, rejected = self.prediction
            fields["completion_tokens_details"] = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return fields


@dataclass(frozen=True, slots=True)
class AnswerMetrics:
    """The `metrics` object of a final answer."""

    draft: DraftStats
    max_draft_length: int  # K of this request
    verification: str
    queue_ms: float
    prefill_ms: float
    decode_ms: float

    def fields(self) -> dict[str, object]:
        draft, k = self.draft, self.max_draft_length
        histogram = (draft.accepted_histogram + [0] * (k + 1))[: k + 1]  # nothing can be accepted beyond K
        return {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + draft.num_accepted_tokens / draft.num_spec_steps if draft.num_spec_steps else 1.0,
                "draft_acceptance_rate": draft.num_accepted_tokens / draft.num_draft_tokens if draft.num_draft_tokens else 0.0,
                "acceptance_histogram": histogram,
                "acceptance_histogram_by_draft_length": {
                    str(length): of_length for length, of_length in sorted(draft.histograms_by_draft_length.items())
                },
                "num_spec_steps": draft.num_spec_steps,
                "num_accepted_draft_tokens": draft.num_accepted_tokens,
                "num_draft_tokens": draft.num_draft_tokens,
                "num_spec_tokens": k,
            },
            "num_plain_steps": draft.num_plain_steps,
            "num_control_steps": draft.num_control_steps,
            "verification": self.verification,
            "lossless": True,  # both rules keep the target's law; no lossy threshold in this version
            "queue_ms": round(self.queue_ms, 3),
            "prefill_ms": round(self.prefill_ms, 3),
            "decode_ms": round(self.decode_ms, 3),
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer: a completion's text or a chat message's fields."""

    content: str | dict[str, object]
    finish_reason: str
    logprobs: dict[str, object] | None = None
    prompt_logprobs: list[dict[str, object] | None] | None = None  # in vLLM's shape, if asked for
    token_ids: tuple[Sequence[int], Sequence[int]] | None = None  # the prompt's and the answer's, if asked for


class Envelope:
    """What all chunks of one answer, or its one body, share."""

    def __init__(
        self, answer_id: str, model: str, created_s: int, is_chat: bool, has_usage: bool = False, has_token_ids: bool = False
    ) -> None:
        """`has_usage`: the stream ends with a usage chunk, and the others carry `usage: null` as OpenAI's do.

        `has_token_ids`: what is said comes with its tokens, and so does the prompt, as in vLLM.
        """
        self.is_chat = is_chat
        self.has_token_ids = has_token_ids
        self._has_usage = has_usage
        self._head: dict[str, object] = {"id": answer_id, "created": created_s, "model": model}
        chunk_object = "chat.completion.chunk" if is_chat else "text_completion"
        self._chunk_head = b"data: " + _encode({**self._head, "object": chunk_object})[:-1] + b',"choices":['
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # by choice: what stands before and behind the text of a chunk

    def body(self, choices: Sequence[Choice], usage: Usage, metrics: AnswerMetrics) -> bytes:
        """The whole answer of a request that does not stream."""
        body: dict[str, object] = {
            **self._head,
            "object": "chat.completion" if self.is_chat else "text_completion",
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage.fields(),
            "metrics": metrics.fields(),
        }
        if self.is_chat and choices[0].token_ids is not None:  # all choices have one prompt
            body["prompt_token_ids"] = choices[0].token_ids[0]
        return _encode(body)

    def first_chunk(self, index: int, prompt_token_ids: Sequence[int] = ()) -> bytes:
        """Opens choice `index`: chat says who speaks, completions say nothing unless the prompt's tokens were asked for."""
        prompt = b',"prompt_token_ids":' + _encode(prompt_token_ids) if self.has_token_ids else b""
        if self.is_chat:
            chunk = self._chunk(index, b'"delta":{"role":"assistant","content":""}', None, None)
            return chunk.removesuffix(_CHUNK_END) + prompt + _CHUNK_END
        return self._chunk(index, b'"text":""' + prompt, None, None) if prompt else b""

    def chunk(
        self,
        index: int,
        part: str | dict[str, object],
        finish_reason: str | None = None,
        usage: Usage | None = None,
        logprobs: dict[str, object] | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> bytes:
        """What is new of choice `index`: a completion's text or a chat message's fields; the last one has the finish reason.

        `usage`, `token_ids`: the counts so far and the new tokens, if the client asked for them.
        """
        content = (b'"text":' if isinstance(part, str) else b'"delta":') + _encode(part)
        if token_ids is not None:
            content += b',"token_ids":' + _encode(token_ids)
        return self._chunk(index, content, finish_reason, usage, b"null" if logprobs is None else _encode(logprobs))

    def text_chunk(self, index: int, text: str) -> bytes:
        """`chunk` for what nearly all chunks are, text of choice `index` and nothing else, at a fraction of its price."""
        if index not in self._around_text:
            whole = self.chunk(index, {"content": "\0"} if self.is_chat else "\0")
            head, tail = whole.rsplit(_encode("\0"), 1)  # the text is the last that a client could have named so
            self._around_text[index] = (head, tail)
        head, tail = self._around_text[index]
        return head + _encode(text) + tail

    def usage_chunk(self, usage: Usage, metrics: AnswerMetrics) -> bytes:
        """The last chunk before [DONE]: no choices."""
        return self._chunk_head + b'],"usage":' + _encode(usage.fields()) + b',"metrics":' + _encode(metrics.fields()) + b"}\n\n"

    def _chunk(self, index: int, content: bytes, finish_reason: str | None, usage: Usage | None, logprobs: bytes = b"null") -> bytes:
        finish = b"null" if finish_reason is None else _encode(finish_reason)
        choice = b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b}]' % (index, content, logprobs, finish)
        if usage is not None:
            return self._chunk_head + choice + b',"usage":' + _encode(usage.fields()) + b"}\n\n"
        return self._chunk_head + choice + (b',"usage":null}\n\n' if self._has_usage else b"}\n\n")

    def _choice(self, index: int, choice: Choice) -> dict[str, object]:
        content = {"text" if isinstance(choice.content, str) else "message": choice.content}
        entry: dict[str, object] = {"index": index, **content, "logprobs": choice.logprobs, "finish_reason": choice.finish_reason}
        if choice.prompt_logprobs is not None:
            entry["prompt_logprobs"] = choice.prompt_logprobs
        if choice.token_ids is not None:
            prompt_token_ids, entry["token_ids"] = choice.token_ids
            if not self.is_chat:
                entry["prompt_token_ids"] = prompt_token_ids
        return entry


def error_event(body: bytes) -> bytes:
    """The last event of a stream that broke. No [DONE] follows: its absence, too, says that the text is not whole."""
    return b"data: " + body + b"\n\n"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What `GET /v1/models` tells of the one model. `facts`: what decides about speed, for who measures or compares."""

    name: str
    created_s: int
    max_model_len: int
    facts: Mapping[str, object]

    def entry(self) -> dict[str, object]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created_s,
            "owned_by": "paceline",
            "max_model_len": self.max_model_len,
            "lossless": True,
            **self.facts,
        }


def model_list(model: ServedModel) -> bytes:
    """`GET /v1/models`."""
    return _encode({"object": "list", "data": [model.entry()]})


def model_entry(model: ServedModel) -> bytes:
    """`GET /v1/models/NAME`."""
    return _encode(model.entry())


def health(is_healthy: bool, reason: str) -> bytes:
    """`GET /health` and `GET /ready`."""
    return _encode({"status": "ok" if is_healthy else "unavailable", "reason": reason})
