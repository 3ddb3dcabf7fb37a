"""Asks a server for completions that do not stream. Errors are answers like others: a certificate says what a server refuses.

OpenAI's fields, vLLM's `return_token_ids`, and the tokenizing routes of vLLM, SGLang and llama.cpp where they are offered.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import aiohttp

from paceline.errors import MissingError
from paceline.prove.client import MAX_BODY_BYTES, bounded_body

Prompt = str | tuple[int, ...]
Fields = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion; `error` says why there is none."""

    text: str = ""
    tokens: tuple[str, ...] = ()  # their texts, where log-probabilities were asked for and given
    token_ids: tuple[int, ...] = ()  # where the server gives them
    top: tuple[Mapping[str, float], ...] = ()  # log-probabilities of the likeliest tokens, by token
    num_draft_tokens: int | None = None  # verified for this answer; None: the server does not say
    finish_reason: str | None = None
    error: str | None = None
    is_refusal: bool = False  # the request is at fault, says the server


@dataclass(frozen=True, slots=True)
class Exchange:
    """One completion that was asked for, as the raw records keep it."""

    url: str
    body: Fields
    sent_s: float  # as the answers' times, by the measuring process's monotonic clock
    end_s: float
    answer: Answer


Keep = Callable[[Exchange], None]
"""Called with every completion as soon as it is there, before anything is computed from it."""


@dataclass(frozen=True, slots=True)
class Line:
    """What the servers of one certificate share: a session, a limit of the requests in flight, and where what was said is kept."""

    session: aiohttp.ClientSession
    gate: asyncio.Semaphore
    keep: Keep


class Server:
    """One model of one server. `fields` go into every request."""

    def __init__(self, line: Line, url: str, model: str, fields: Fields) -> None:
        self._line, self._url, self.model, self._fields = line, url, model, fields

    def asking(self, fields: Fields) -> "Server":
        """The same server, with more fields in every request."""
        return Server(self._line, self._url, self.model, {**self._fields, **fields})

    async def complete(self, prompt: Prompt, fields: Fields) -> Answer:
        """A completion of a text or of token ids. Never raises for what the server does."""
        body = {"model": self.model, "prompt": list(prompt) if isinstance(prompt, tuple) else prompt, **self._fields, **fields}
        async with self._line.gate:
            sent_s = time.monotonic()
            status, told, error = await self._post("/v1/completions", body)
            end_s = time.monotonic()
        answer = _answer(status, told, error)
        self._line.keep(Exchange(self._url, body, sent_s, end_s, answer))
        return answer

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """The tokens of a text as it stands; None where no route tells."""
        fields = {"model": self.model, "prompt": text, "content": text, "input": text, "add_special_tokens": False}
        return await self._token_ids(fields)

    async def tokenize_chat(self, messages: list[dict[str, str]]) -> tuple[int, ...] | None:
        """The tokens of a chat as the model sees it, the answer's opening included; None where no route tells."""
        return await self._token_ids({"model": self.model, "messages": messages})

    async def detokenize(self, token_ids: tuple[int, ...]) -> str | None:
        """The text of tokens; None where no route tells."""
        async with self._line.gate:
            _, answer, error = await self._post("/detokenize", {"model": self.model, "tokens": list(token_ids)})
        text = cast("dict[str, object]", answer).get("prompt") if error is None and isinstance(answer, dict) else None
        return text if isinstance(text, str) else None

    async def _token_ids(self, body: Fields) -> tuple[int, ...] | None:
        paths = ("/tokenize",) if "messages" in body else ("/tokenize", "/extras/tokenize")
        for path in paths:
            async with self._line.gate:
                _, answer, error = await self._post(path, body)
            tokens = cast("dict[str, object]", answer).get("tokens") if error is None and isinstance(answer, dict) else None
            if isinstance(tokens, list) and tokens and all(isinstance(token, int) for token in cast("list[object]", tokens)):
                return tuple(cast("list[int]", tokens))
        return None

    async def _post(self, path: str, body: Fields) -> tuple[int, object, str | None]:
        """(status, JSON body, None), or (status or 0, None, what went wrong)."""
        try:
            # No redirects: the key is for this server, and what is certified must be what was named.
            async with self._line.session.post(self._url + path, json=body, allow_redirects=False) as response:
                raw = await bounded_body(response.content)
                if response.status != 200:
                    return response.status, None, f"HTTP {response.status}: {_message(raw)}"
                if len(raw) > MAX_BODY_BYTES:
                    return 200, None, f"the body is longer than {MAX_BODY_BYTES:,} bytes"
                return 200, json.loads(raw), None
        except TimeoutError:
            return 0, None, "no answer within the time limit"
        except (aiohttp.ClientError, OSError) as fault:
            return 0, None, f"{type(fault).__name__}: {str(fault)[:200]}"
        except (ValueError, RecursionError):
            return 200, None, "the body is not JSON"


def root_url(url: str) -> str:
    """Without `/v1` and slashes at the end."""
    return url.rstrip("/").removesuffix("/v1")


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that the server lists. Raises MissingError if there is no such server."""
    try:
        async with session.get(f"{url}/v1/models", allow_redirects=False) as response:
            raw = await bounded_body(response.content)
            if response.status != 200:
                raise MissingError(f"{url}/v1/models answers HTTP {response.status}: {_message(raw)}; give the server's URL and key")
            return str(json.loads(raw)["data"][0]["id"])
    except (TimeoutError, aiohttp.ClientError, OSError) as fault:
        raise MissingError(f"no server answers at {url} ({type(fault).__name__}); start it, or give another --url") from fault
    except (ValueError, LookupError, TypeError, RecursionError) as fault:
        raise MissingError(f"{url}/v1/models does not list models as OpenAI's API does; give the model's name") from fault


def _answer(status: int, told: object, error: str | None) -> Answer:
    if error is not None:
        return Answer(error=error, is_refusal=400 <= status < 500 and status not in (404, 405, 408, 429))
    try:
        return _read(cast("dict[str, object]", told))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as fault:
        return Answer(error=f"the answer does not have the shape of a completion ({type(fault).__name__}: {str(fault)[:100]})")


def _read(body: dict[str, object]) -> Answer:
    choice = cast("dict[str, object]", cast("list[object]", body["choices"])[0])
    logprobs = cast("dict[str, list[object]]", choice.get("logprobs") or {})
    tops = [cast("dict[str, float] | None", top) or {} for top in logprobs.get("top_logprobs") or []]
    return Answer(
        text=str(choice["text"]),
        tokens=tuple(str(token) for token in logprobs.get("tokens") or []),
        token_ids=tuple(cast("list[int]", choice.get("token_ids") or [])),
        top=tuple({str(token): float(value) for token, value in top.items()} for top in tops),
        num_draft_tokens=_num_draft_tokens(body.get("metrics")),
        finish_reason=cast("str | None", choice.get("finish_reason")),
    )


def _num_draft_tokens(metrics: object) -> int | None:
    """From vLLM's object, which this server gives as well."""
    if not isinstance(metrics, dict):
        return None
    drafting = cast("dict[str, object]", metrics).get("speculative_decoding")
    count = cast("dict[str, object]", drafting).get("num_draft_tokens") if isinstance(drafting, dict) else None
    return count if isinstance(count, int) else None


def _message(raw: bytes) -> str:
    """A server's own words, cut short."""
    try:
        error = cast("dict[str, object]", json.loads(raw)).get("error")
        if isinstance(error, dict):
            error = cast("dict[str, object]", error).get("message")
        if isinstance(error, str):
            return error[:200]
    except (ValueError, AttributeError, RecursionError):
        pass
    return raw[:200].decode(errors="replace")
