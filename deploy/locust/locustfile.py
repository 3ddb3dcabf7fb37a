"""Many users at once, on `/infer` and on chat. `locust -f deploy/locust/locustfile.py --headless -u 1000 -r 50 -t 5m -H http://127.0.0.1:8000`

Beside locust's own lines, which time whole answers, it reports for chat the first token and the time per token: (last chunk - first) /
(tokens - those of the first chunk), with the tokens of the server's usage. A speculative server sends several tokens in a chunk, so that
the time between chunks is not the time per token. An answer that is cut off or ends for a wrong reason is a failure.

Locust replaces sockets by gevent's when it is imported: run it as a command of its own.
"""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from locust import FastHttpUser, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FastResponse

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that adds two numbers.",
    "Repeat this list exactly: red, blue, green, black, white, red, blue, green, black, white.",
    "List ten animals, one a line.",
    "What is the difference between a list and a tuple?",
    "Summarise: the ship left the harbour, met a storm, and came back to the harbour.",
)
WHOLE_REASONS = ("stop", "length")
MAX_LINE_BYTES = 1 << 20


@events.init_command_line_parser.add_listener
def add_arguments(parser: LocustArgumentParser) -> None:
    """Settings of this file, beside locust's own."""
    parser.add_argument("--max-tokens", type=int, default=64, env_var="LOCUST_MAX_TOKENS", help="most tokens of an answer")
    parser.add_argument(
        "--think-s", type=float, default=1.0, env_var="LOCUST_THINK_S", help="mean seconds from an answer to the next question"
    )


@dataclass
class Stream:
    """What is known of a streamed answer."""

    first_s: float | None = None  # when the first chunk with text came
    last_s: float = 0.0
    first_tokens: int | None = None  # in the first chunk
    num_tokens: int | None = None
    finish_reason: str | None = None
    is_whole: bool = False  # [DONE] came

    def add(self, event: dict, now_s: float) -> None:
        """One chunk of a chat completion."""
        usage = event.get("usage")
        if usage:
            self.num_tokens = usage["completion_tokens"]
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if (choice.get("delta") or {}).get("content"):
                if self.first_s is None:
                    self.first_s, self.first_tokens = now_s, self.num_tokens
                self.last_s = now_s

    @property
    def fault(self) -> str | None:
        """Why the answer is not whole."""
        if not self.is_whole:
            return "the stream ended without [DONE]"
        if self.finish_reason not in WHOLE_REASONS:
            return f"the finish reason is {self.finish_reason}"
        return None if self.num_tokens is not None else "the stream has no usage"

    @property
    def token_ms(self) -> float | None:
        """Milliseconds per token behind the first chunk; None for an answer of one chunk."""
        if self.first_s is None or self.num_tokens is None:
            return None
        num_after = self.num_tokens - (self.first_tokens or 1)
        return (self.last_s - self.first_s) * 1e3 / num_after if num_after > 0 and self.last_s > self.first_s else None


class Person(FastHttpUser):
    """Asks, reads the answer, thinks, asks again."""

    abstract = True
    connection_timeout = 30.0
    network_timeout = 300.0

    def wait_time(self) -> float:
        mean_s = self.environment.parsed_options.think_s
        return between(0.5 * mean_s, 1.5 * mean_s)(self)

    @property
    def max_tokens(self) -> int:
        return self.environment.parsed_options.max_tokens

    def report(self, name: str, milliseconds: float, num_tokens: int) -> None:
        """A line of its own in locust's statistics; its length column shows tokens."""
        events.request.fire(
            request_type="TOKEN", name=name, response_time=milliseconds, response_length=num_tokens, exception=None, context={}
        )  # fmt: skip


class InferUser(Person):
    """`POST /infer`, the answer as a whole."""

    @task
    def infer(self) -> None:
        body = {"prompt": any_prompt(), "max_length": self.max_tokens, "temperature": 0}
        with self.client.post("/infer", json=body, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"HTTP {response.status_code}")
                return
            answer = response.json()
            if answer["finish_reason"] not in WHOLE_REASONS:
                response.failure(f"the finish reason is {answer['finish_reason']}")
                return
        if answer["tokens"] > 1:
            after_first_ms = answer["latency_ms"] - answer["first_token_ms"]
            self.report("infer: time per token", after_first_ms / (answer["tokens"] - 1), answer["tokens"])


class ChatUser(Person):
    """`POST /v1/chat/completions`, streamed."""

    weight = 3

    def on_start(self) -> None:
        with self.client.get("/v1/models", catch_response=True) as response:
            self.model = response.json()["data"][0]["id"] if response.status_code == 200 else ""

    @task
    def chat(self) -> None:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": any_prompt()}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        started_s = time.perf_counter()
        stream = Stream()
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"HTTP {response.status_code}")
                return
            for event in events_of(response, stream):
                stream.add(event, time.perf_counter())
            response.request_meta["response_time"] = (time.perf_counter() - started_s) * 1e3  # locust stopped at the headers
            if stream.fault is not None:
                response.failure(stream.fault)
                return
        if stream.first_s is not None:
            self.report("chat: first token", (stream.first_s - started_s) * 1e3, stream.first_tokens or 1)
        if stream.token_ms is not None:
            self.report("chat: time per token", stream.token_ms, stream.num_tokens or 0)


def any_prompt() -> str:
    return random.choice(PROMPTS)  # noqa: S311 - load, no secret


def events_of(response: FastResponse, stream: Stream) -> Iterator[dict]:
    """The JSON of each server-sent event."""
    while line := response.stream.readline(b"\n"):
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") : MAX_LINE_BYTES].strip()
        if data == b"[DONE]":
            stream.is_whole = True
            response.stream.read()  # to the end, so that the connection can be used again
            return
        yield json.loads(data)
