"""A server of completions with a toy language model, plain and speculative decoding under `coupled`, and faults to plant.

`ToyCompletions.handle` is the server without HTTP: a path and a JSON body in, a status and a JSON body out. `InProcess` puts it under the
certificate's client; `serve_toy` puts it on a socket.
"""

import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from paceline.prove.certificate.server import Line, Server

WORDS = (" red", " blue", " green", " black", " white")
VOCABULARY = (*WORDS, ",", "Colours:", "blue", *map(chr, range(32, 127)), "\n")
ID = {text: index for index, text in enumerate(VOCABULARY)}
END = len(VOCABULARY)  # no text
DRAFT_LENGTH = 3
_COMMA = ID[","]


def tokenize(text: str) -> list[int]:
    """By the longest match; what is not ASCII is lost."""
    longest = sorted(ID, key=len, reverse=True)
    ids: list[int] = []
    while text:
        token = next((token for token in longest if text.startswith(token)), None)
        if token is not None:
            ids.append(ID[token])
        text = text[len(token or "x") :]
    return ids


def logits_table() -> NDArray[np.float64]:
    """Logits `[V + 1, V]` by the last token. Behind a word comes a comma, behind a comma a word; red and blue are nearly equal there."""
    rng = np.random.default_rng(5)
    table = rng.normal(0, 1.5, (len(VOCABULARY) + 1, len(VOCABULARY)))
    for word in WORDS:
        table[ID[word], _COMMA] = 9.0
    table[_COMMA] -= 1.0
    table[_COMMA, [ID[word] for word in WORDS]] = (5.0, 4.98, 4.4, 3.8, 3.2)
    return table + 30.0  # nothing to a law, but a repetition penalty divides by it


@dataclass
class Faults:
    """What the speculative arm does wrong; nothing by default."""

    counts_rejected: bool = False  # penalties count drafts that were rejected
    ignores: str = ""  # an option that is not applied where a draft is verified
    accepts_likely: bool = False  # takes a draft because it is likely, whatever was drawn
    wrong_at: int = -1  # output position at which greedy takes the second token, where it is no tie
    flips_near_ties: bool = False  # greedy takes the second token where it is nearly as likely


@dataclass
class Habits:
    """What kind of server it is."""

    is_foreign: bool = False  # no max_draft_length, metrics, token ids or tokenizer
    has_logprobs: bool = True
    refused: tuple[str, ...] = ()  # fields that get HTTP 400
    fails_every: int = 0  # each so many completions, one gets HTTP 500
    default_top_k: int = 0  # where the request says nothing


class ToyCompletions:
    """See above. `num_completions` counts what was asked."""

    def __init__(self, faults: Faults | None = None, habits: Habits | None = None) -> None:
        self.faults, self.habits = faults or Faults(), habits or Habits()
        self.table = logits_table()
        self.num_completions = 0
        self.draft_length_limit = DRAFT_LENGTH

    def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """(HTTP status, JSON body)."""
        if path == "/v1/completions":
            return self._complete(body)
        if self.habits.is_foreign or path not in ("/tokenize", "/detokenize"):
            return 404, {"error": {"message": f"no route {path}"}}
        if path == "/detokenize":
            return 200, {"prompt": "".join(VOCABULARY[token_id] for token_id in body["tokens"])}
        text = body.get("prompt") or "".join(message["content"] + "\n" for message in body.get("messages", ()))
        return 200, {"tokens": tokenize(text)}

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.num_completions += 1
        for name in self.habits.refused:
            if body.get(name):
                return 400, {"error": {"message": f"{name} is not supported"}}
        if self.habits.fails_every and self.num_completions % self.habits.fails_every == 0:
            return 500, {"error": {"message": "out of order"}}
        if isinstance(body["prompt"], list) and self.habits.is_foreign:
            return 422, {"error": {"message": "prompt must be a string"}}
        prompt = tokenize(body["prompt"]) if isinstance(body["prompt"], str) else list(body["prompt"])
        asked = DRAFT_LENGTH if self.habits.is_foreign else body.get("max_draft_length", DRAFT_LENGTH)
        draft_length = min(asked, self.draft_length_limit)
        decoding = _Decoding(self, prompt, body, draft_length)
        output = decoding.run()
        choice: dict[str, Any] = {"text": "".join(VOCABULARY[token_id] for token_id in output), "finish_reason": "length", "logprobs": None}
        if body.get("logprobs") and self.habits.has_logprobs:
            choice["logprobs"] = self._logprobs(prompt, output, int(body["logprobs"]))
        if self.habits.is_foreign:
            return 200, {"choices": [choice]}
        choice["token_ids"] = output
        return 200, {"choices": [choice], "metrics": {"speculative_decoding": {"num_draft_tokens": decoding.num_drafts}}}

    def _logprobs(self, prompt: list[int], output: list[int], num_top: int) -> dict[str, Any]:
        tokens, tops = [prompt[-1], *output], list[dict[str, float]]()
        for before in tokens[:-1]:
            raw = self.table[before] - np.logaddexp.reduce(self.table[before])
            tops.append({VOCABULARY[index]: float(raw[index]) for index in np.argsort(-raw, kind="stable")[:num_top]})
        return {"tokens": [VOCABULARY[token_id] for token_id in output], "top_logprobs": tops}


@dataclass
class _Decoding:
    """One request."""

    server: ToyCompletions
    prompt: list[int]
    body: dict[str, Any]
    draft_length: int
    output: list[int] = field(default_factory=list[int])
    rejected: list[int] = field(default_factory=list[int])
    num_drafts: int = 0

    def run(self) -> list[int]:
        wanted = self.body["max_tokens"]
        self.output.append(self._choose([], is_drafted=False))
        while len(self.output) < wanted:
            drafts = self._drafts(min(self.draft_length, wanted - len(self.output) - 1))
            self.num_drafts += len(drafts)
            accepted: list[int] = []
            for draft in drafts:
                chosen = self._choose(accepted, is_drafted=True, draft=draft)
                accepted.append(chosen)
                if chosen != draft:
                    self.rejected.append(draft)
                    break
            else:
                accepted.append(self._choose(accepted, is_drafted=False))
            self.output += accepted
        return self.output

    def _drafts(self, num_wanted: int) -> list[int]:
        """Prompt lookup of the last two tokens, newest match first."""
        tokens = self.prompt + self.output
        for start in range(len(tokens) - 3, -1, -1):
            if tokens[start : start + 2] == tokens[-2:] and num_wanted > 0:
                return tokens[start + 2 : start + 2 + num_wanted]
        return []

    def _choose(self, drafts: list[int], is_drafted: bool, draft: int = -1) -> int:
        faults = self.server.faults
        output = self.output + drafts
        raw = self.server.table[(self.prompt + output)[-1]]
        if self.body.get("temperature") == 0:
            return self._greedy(raw, len(output))
        logits = self._processed(raw, output, is_drafted)
        if faults.accepts_likely and is_drafted and raw[draft] > raw.max() - 1.5:
            return draft
        noise = np.random.default_rng([self.body.get("seed") or 0, len(output)]).gumbel(size=len(VOCABULARY))
        return int(np.argmax(logits + noise))

    def _greedy(self, raw: NDArray[np.float64], position: int) -> int:
        first, second = np.argsort(-raw, kind="stable")[:2]
        faults, is_speculative = self.server.faults, self.draft_length > 0 and self.body["max_tokens"] > 1
        gap = raw[first] - raw[second]
        if is_speculative and ((faults.flips_near_ties and gap < 0.1) or (position == faults.wrong_at and gap > 1)):
            return int(second)
        return int(first)

    def _processed(self, raw: NDArray[np.float64], output: list[int], is_drafted: bool) -> NDArray[np.float64]:
        faults, body = self.server.faults, self.body
        option = {name: None if is_drafted and faults.ignores == name else value for name, value in body.items()}
        logits = raw.copy()
        counted = output + (self.rejected if faults.counts_rejected else [])
        seen = sorted({*output, *self.prompt})
        repetition = option.get("repetition_penalty") or 1.0
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition)
        for token_id in set(counted):
            logits[token_id] -= (option.get("frequency_penalty") or 0) * counted.count(token_id) + (option.get("presence_penalty") or 0)
        for name, bias in (option.get("logit_bias") or {}).items():
            logits[int(name)] += bias
        for word in option.get("bad_words") or ():
            logits[[ID[spelling] for spelling in (word, f" {word}") if spelling in ID]] = -np.inf
        return _cut(logits / (option.get("temperature") or 1.0), option, self.server.habits.default_top_k)


def _cut(logits: NDArray[np.float64], option: dict[str, Any], default_top_k: int) -> NDArray[np.float64]:
    order = np.argsort(-logits, kind="stable")
    top_k = option["top_k"] if option.get("top_k") is not None else default_top_k
    if top_k > 0:
        logits[order[top_k:]] = -np.inf
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    logits[order[before >= (option.get("top_p") or 1.0)]] = -np.inf
    min_p = option.get("min_p") or 0
    if min_p:
        logits[logits < logits.max() + math.log(min_p)] = -np.inf
    return logits


class InProcess(Server):
    """The certificate's client of a toy, without a socket."""

    def __init__(self, toy: ToyCompletions, fields: dict[str, object] | None = None) -> None:
        line = Line(None, contextlib.nullcontext(), lambda _: None)  # type: ignore[arg-type]
        super().__init__(line, "", "toy", fields or {})
        self._toy = toy

    def asking(self, fields: Any) -> "InProcess":
        return InProcess(self._toy, {**self._fields, **fields})

    async def _post(self, path: str, body: Any) -> tuple[int, object, str | None]:
        status, answer = self._toy.handle(path, dict(body))
        return (200, answer, None) if status == 200 else (status, None, f"HTTP {status}: {answer['error']['message']}")


@contextlib.asynccontextmanager
async def serve_toy(toy: ToyCompletions) -> AsyncIterator[str]:
    """The toy's URL."""

    async def post(request: web.Request) -> web.Response:
        status, answer = toy.handle(request.path, await request.json())
        return web.json_response(answer, status=status)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "toy", "object": "model"}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/{path:.*}", post)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
