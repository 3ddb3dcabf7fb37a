"""An OpenAI server without a model, on a real socket, for clients that measure: exact counters, a prefix cache, and faults on demand.

It keeps what it was asked and who was in flight together, so that a test can judge a schedule from the server's side.
"""

import asyncio
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

MODEL = "mock"
_OPENAI_FIELDS = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options", "seed"}
_WORDS = ("alpha ", "beta ", "gamma ", "delta ", "epsilon ", "zeta ", "eta ", "theta ")


@dataclass(slots=True)
class Clock:
    """Time that is only counted. In the place of the `time` module it is what a client reads."""

    now_s: float = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@dataclass(slots=True)
class Behaviour:
    """What kind of server it is. `faults`: what goes wrong, by a word in the last message."""

    owner: str = "paceline"
    draft_length: int = 3
    honours_draft_length: bool = True
    keeps_salts_apart: bool = True
    tells_cached: bool = True
    has_usage: bool = True
    has_chunk_usage: bool = True
    gives_token_ids: bool = True
    gives_acceptance: bool = True
    has_counters: bool = True
    gpu_percents: tuple[float, float] | None = None  # of its gauge: while it works, and while it does not
    bandwidth_fraction: float | None = None
    counter_factor: float = 1.0  # what the counters of drafts are multiplied by
    refuses_unknown: bool = False
    is_exact: bool = True  # whether drafts leave the answer as it is
    is_lossless: bool = True  # what it says of that
    verification: str | None = "coupled"
    honours_length: bool = False  # `ignore_eos` and `min_tokens`
    api_key: str | None = None
    clock: "Clock | None" = None  # to move on instead of waiting; for one request at a time
    num_miscounted: int = 0  # tokens too many that it finds in texts
    step_s: float = 0.0
    growth_s: float = 0.0  # by which each token before it makes a step longer
    drafting_cost: float = 1.0  # what a step costs without `max_draft_length: 0`, of what it costs with it
    drafted_length: float = 1.0  # the same of how long an answer is that ends by itself
    num_answer_tokens: int = 40  # of an answer that ends by itself
    faults: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True)
class Asked:
    """One request as it came, and when it was in flight by a count of events that only rises."""

    body: dict[str, Any]
    begun: int
    ended: int = 0

    @property
    def is_plain(self) -> bool:
        return self.body.get("max_draft_length") == 0

    @property
    def question(self) -> str:
        return self.body["messages"][-1]["content"]


class MockOpenAi:
    """Use as an async context manager; `url` is where it listens."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.asked: list[Asked] = []
        self.counters = {"drafts": 0, "draft_tokens": 0, "accepted": 0, "generation": 0}
        self._tick = 0
        self._num_running = 0
        self._cached: set[str] = set()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/extras/tokenize/count", self._count)
        self._server = TestServer(app)

    async def __aenter__(self) -> "MockOpenAi":
        await self._server.start_server()
        self.url = str(self._server.make_url("")).rstrip("/")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    def in_flight_together(self) -> set[tuple[bool, bool]]:
        """(is plain, is plain) of every two requests that ran at the same time."""
        return {
            (one.is_plain, other.is_plain)
            for one in self.asked
            for other in self.asked
            if one is not other and one.begun < other.ended and other.begun < one.ended
        }

    def most_in_flight(self) -> int:
        return max((sum(one.begun <= other.begun < one.ended for one in self.asked) for other in self.asked), default=0)

    async def _models(self, request: web.Request) -> web.Response:
        if self.behaviour.api_key and request.headers.get("Authorization") != f"Bearer {self.behaviour.api_key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        entry = {"id": MODEL, "object": "model", "owned_by": self.behaviour.owner, "max_model_len": 4096}
        entry |= {"lossless": self.behaviour.is_lossless, "verification": self.behaviour.verification}
        return web.json_response({"object": "list", "data": [entry]})

    async def _metrics(self, _: web.Request) -> web.Response:
        if not self.behaviour.has_counters:
            return web.Response(status=404)
        factor, counters = self.behaviour.counter_factor, self.counters
        lines = [
            "# TYPE vllm:spec_decode_num_drafts_total counter",
            f'vllm:spec_decode_num_drafts_total{{model_name="m",engine="0"}} {counters["drafts"] * factor}',
            'vllm:spec_decode_num_drafts_created{model_name="m"} 1.7e9',
            f"vllm:spec_decode_num_draft_tokens_total {counters['draft_tokens'] * factor}",
            f"vllm:spec_decode_num_accepted_tokens_total {counters['accepted'] * factor}",
            f"vllm:generation_tokens_total {counters['generation']}",
            f"vllm:num_requests_running {self._num_running}",
        ]
        if self.behaviour.gpu_percents is not None:
            lines.append(f'gpu_utilization_percent{{gpu="0"}} {self.behaviour.gpu_percents[0 if self._num_running else 1]}')
        if self.behaviour.bandwidth_fraction is not None:
            lines.append(f"paceline_memory_bandwidth_fraction {self.behaviour.bandwidth_fraction}")
        return web.Response(text="\n".join(lines) + "\n")

    async def _count(self, request: web.Request) -> web.Response:
        return web.json_response({"count": len((await request.json())["input"].split()) + self.behaviour.num_miscounted})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        behaviour = self.behaviour
        if behaviour.refuses_unknown and (unknown := sorted(set(body) - _OPENAI_FIELDS)):
            return web.json_response({"error": {"message": f"unknown field {unknown[0]}"}}, status=400)
        self._tick += 1
        asked = Asked(body, self._tick)
        asked.ended = 1 << 60
        self.asked.append(asked)
        self._num_running += 1
        try:
            return await _Reply(self, asked, request).send()
        finally:
            self._num_running -= 1
            self._tick += 1
            asked.ended = self._tick

    def cached_tokens(self, body: dict[str, Any]) -> int:
        """Words of the messages that an earlier request with the same salt had at its beginning."""
        salt = body.get("cache_salt", "") if self.behaviour.keeps_salts_apart else ""
        number, text = 0, str(salt)
        for message in body["messages"]:
            text += f"|{message['role']}:{message['content']}"
            if text in self._cached:
                number += len(message["content"].split())
            self._cached.add(text)
        return number


class _Reply:
    """One answer: tokens are words, drawn from a hash of the messages."""

    def __init__(self, server: MockOpenAi, asked: Asked, request: web.Request) -> None:
        self._server, self._body, self._request = server, asked.body, request
        self._behaviour = server.behaviour
        self._fault = next((fault for word, fault in self._behaviour.faults.items() if word in asked.question), "")
        self._has_usage = self._behaviour.has_usage and self._fault != "no_usage"
        key = [self._body["messages"], self._body.get("seed"), not self._behaviour.is_exact and self._body.get("max_draft_length")]
        digest = hashlib.sha256(json.dumps(key).encode()).digest()
        number = self._behaviour.num_answer_tokens + digest[0] % 8
        if not asked.is_plain:
            number = round(number * self._behaviour.drafted_length)
        is_given = self._behaviour.honours_length and (self._body.get("ignore_eos") or self._body.get("min_tokens", 0) >= number)
        number = self._body["max_tokens"] if is_given else min(self._body["max_tokens"], number)
        self._step_factor = 1.0 if asked.is_plain else self._behaviour.drafting_cost
        self._tokens = [digest[place % 32] % len(_WORDS) for place in range(number)]
        self._digest = digest
        self._cached = server.cached_tokens(self._body)
        self._counts = {"steps": 0, "drafted": 0, "accepted": 0, "plain": 0}
        asks = self._body.get("max_draft_length")
        is_free = asks is None or not self._behaviour.honours_draft_length
        self._k = self._behaviour.draft_length if is_free else min(asks, self._behaviour.draft_length)
        self._histogram = [0] * (self._k + 1)

    async def send(self) -> web.StreamResponse:
        if self._fault == "http_500":
            return web.json_response({"error": {"message": "the engine is on fire"}}, status=500)
        if self._fault == "no_stream":
            return web.json_response({"choices": []})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(self._request)
        if self._fault == "hang":
            await asyncio.sleep(30)
        held = b""
        await response.write(b": welcome\n\n" + self._event(delta={"role": "assistant", "content": ""}, usage=self._usage(0)))
        for place, event in enumerate(self._steps()):
            await self._wait(self._step_factor * (self._behaviour.step_s + place * self._behaviour.growth_s))
            if self._fault == "coalesced":
                held += event
                continue
            if self._fault == "split":
                for place in range(0, len(event), 7):
                    await response.write(event[place : place + 7])
                    await asyncio.sleep(0)
                continue
            await response.write(event)
        await response.write(held + self._end())
        if self._fault == "cut":
            self._request.transport.abort()
        return response

    async def _wait(self, seconds: float) -> None:
        if self._behaviour.clock is None:
            await asyncio.sleep(seconds)
        else:
            self._behaviour.clock.now_s += seconds

    def _steps(self) -> list[bytes]:
        """A chunk for each step: the prompt's token, then an accepted draft and one more token each time."""
        events, place, step = [], 0, 0
        while place < len(self._tokens):
            room = len(self._tokens) - place
            accepted = 0 if place == 0 else min(self._digest[step % 32] % (self._k + 1), room - 1)
            if place and self._k:
                self._counts["steps"] += 1
                self._counts["drafted"] += self._k
                self._counts["accepted"] += accepted
                self._histogram[accepted] += 1
            elif place:
                self._counts["plain"] += 1
            tokens = self._tokens[place : place + 1 + accepted]
            place, step = place + len(tokens), step + 1
            if self._fault in ("cut", "short", "error_event") and place >= 10:
                break
            is_last = place == len(self._tokens)
            reason = None if not is_last else "tool_calls" if self._fault == "bad_finish" else self._reason()
            text = "".join(_WORDS[token] for token in tokens)
            ids = {"token_ids": tokens} if self._behaviour.gives_token_ids and self._body.get("return_token_ids") else {}
            events.append(self._event({"content": text}, reason, self._usage(place), ids))
        counters = self._server.counters
        for name, count in (("drafts", "steps"), ("draft_tokens", "drafted"), ("accepted", "accepted")):
            counters[name] += self._counts[count]
        counters["generation"] += place
        return events

    def _reason(self) -> str:
        return "length" if len(self._tokens) == self._body["max_tokens"] else "stop"

    def _end(self) -> bytes:
        if self._fault == "error_event":
            return b'data: {"error": {"message": "step 17 went wrong"}}\n\n'
        if self._fault in ("cut", "short"):
            return b""
        last: dict[str, Any] = {"choices": []}
        if self._has_usage:
            last["usage"] = self._usage(len(self._tokens), is_final=True)
        if self._behaviour.gives_acceptance:
            accepted = self._counts["accepted"] + (self._fault == "wrong_counter")
            last["metrics"] = {
                "speculative_decoding": {
                    "acceptance_histogram": self._histogram,
                    "num_spec_steps": self._counts["steps"],
                    "num_accepted_draft_tokens": accepted,
                    "num_draft_tokens": self._counts["drafted"],
                    "num_spec_tokens": self._k,
                },
                "num_plain_steps": self._counts["plain"],
                "num_control_steps": 0,
            }
        done = b"" if self._fault == "no_done" else b"data: [DONE]\n\n"
        return b"data:" + json.dumps(last).encode() + b"\r\n\r\n" + done

    def _usage(self, num_tokens: int, is_final: bool = False) -> dict[str, Any] | None:
        asked = (self._body.get("stream_options") or {}).get("continuous_usage_stats")
        if not is_final and not (asked and self._behaviour.has_chunk_usage and self._has_usage):
            return None
        num_prompt = sum(len(message["content"].split()) for message in self._body["messages"])
        details = {"cached_tokens": self._cached} if self._behaviour.tells_cached else {}
        return {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "prompt_tokens_details": details}

    def _event(
        self, delta: dict[str, Any], reason: str | None = None, usage: dict[str, Any] | None = None, more: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, **(more or {})}
        return b"data: " + json.dumps({"id": "x", "choices": [choice], "usage": usage}).encode() + b"\n\n"
