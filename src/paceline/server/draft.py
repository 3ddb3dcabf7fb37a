"""A server that only drafts: `POST /draft` continues token ids by a few tokens. `paceline draft-server` runs it on an ordinary engine.

Beside it, the routes of `app.py` that say what is served and how it fares. A growing context costs its new tokens only: the rest is in
the engine's prefix cache.
"""

import math
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, get_args

import msgspec
from fastapi import FastAPI
from msgspec import Meta, Raw, Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from paceline.config import MAX_INT, EngineConfig, settings
from paceline.core.facts import EngineFacts
from paceline.core.request import Request, SamplingParams
from paceline.errors import BadInputError
from paceline.metrics.requests import RequestMetrics
from paceline.server.app import Server
from paceline.server.chat import Job
from paceline.server.detokenize import TextDelta
from paceline.server.exchange import json_response, read_request
from paceline.server.generation import Generation
from paceline.server.inflight import InFlight
from paceline.server.openai.requests import MAX_PROMPT_TOKEN_IDS, Temperature, TokenId, read_body
from paceline.server.openai.schema import describe_answers
from paceline.server.openai.tokenization import DetokenizeRequest, TokenizeRequest
from paceline.server.openai.tool_requests import ChatMessage
from paceline.server.sampling import check_token_ids
from paceline.server.stream import WholeAnswer

_MAX_DRAFT_LENGTH: int = next(item.metadata["high"] for item, _ in settings(EngineConfig) if item.name == "max_draft_length")
_TOKENS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": MAX_PROMPT_TOKEN_IDS}
_REF = "#/components/schemas/{name}"
# Of the routes of `Server`, by name: one that is new there is not offered here by itself.
_SHARED_ROUTES = frozenset(
    ("/openapi.json", "/v1/models", "/v1/models/{name:path}", "/health", "/ready", "/metrics", "/stats", "/tokenize", "/detokenize")
)


class DraftRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A context and how far to continue it. `seed` counts with a temperature above 0 only; the same seed gives the same draft."""

    token_ids: Annotated[Raw, Meta(extra_json_schema=_TOKENS_SCHEMA)]
    max_draft_length: Annotated[int, Meta(ge=1, le=_MAX_DRAFT_LENGTH)]
    model: str | None = None
    temperature: Temperature | None = None  # 0 if left out
    seed: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None  # 0 if left out
    return_probs: bool | None = None

    def context(self, facts: EngineFacts) -> tuple[int, ...]:
        """The tokens to continue. Raises BadInputError, before any is built if there are too many."""
        num_tokens = bytes(self.token_ids).count(b",") + 1
        if num_tokens > MAX_PROMPT_TOKEN_IDS:
            raise BadInputError(f"the request has {num_tokens:,} tokens, limit {MAX_PROMPT_TOKEN_IDS:,}; send fewer", param="token_ids")
        token_ids = read_body(b'{"token_ids":' + bytes(self.token_ids) + b"}", _Context).token_ids
        if not token_ids:
            raise BadInputError("token_ids is empty; give at least one token", param="token_ids")
        check_token_ids(token_ids, "token_ids", facts)
        return tuple(token_ids)


class _Context(Struct, frozen=True):
    token_ids: list[TokenId]


def read_draft(body: bytes) -> DraftRequest:
    """The body of `POST /draft`. Raises BadInputError naming the first field at fault."""
    return read_body(body, DraftRequest)


class DraftServer(Server):
    """A server whose work is `/draft`."""

    def example(self) -> tuple[str, dict[str, object]]:
        return "/draft", {"token_ids": [1, 2, 3], "max_draft_length": 5}

    def _add_routes(self, routes: FastAPI) -> None:
        super()._add_routes(routes)
        routes.router.routes[:] = [route for route in routes.routes if isinstance(route, Route) and route.path in _SHARED_ROUTES]
        types = (DraftRequest, TokenizeRequest, DetokenizeRequest, *get_args(ChatMessage))  # to tokenise
        (schema, *_), named = msgspec.json.schema_components(types, ref_template=_REF)
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        routes.add_api_route("/draft", self.draft, methods=["POST"], response_class=Response, openapi_extra={"requestBody": body})
        routes.openapi_schema = None  # written anew, without what is not served
        describe_answers(routes.openapi(), named, self.model_name)

    async def draft(self, request: HttpRequest) -> Response:
        """The tokens that the model would say next."""
        arrival_s = time.monotonic()
        body = await read_request(request, read_draft)
        self._preparation.check_model(body.model)
        facts = self._engine.facts
        context = body.context(facts)
        num_tokens = min(body.max_draft_length, facts.max_model_len - len(context))
        refusal = self._refusal()
        if refusal is not None:
            return self._error_response(refusal)
        if num_tokens <= 0:  # the target may go on where this model cannot
            return json_response(_answer((), (), bool(body.return_probs)))
        sampling = SamplingParams(num_tokens, body.temperature or 0.0, seed=body.seed or 0, num_logprobs=0).normalised(facts.vocab_size)
        draft_id = f"draft-{uuid.uuid4().hex}"
        job = Job(draft_id, (Request(draft_id, context, sampling, arrival_s, max_draft_length=0),), ())
        return DraftResponse(self._generation(job), bool(body.return_probs), self._in_flight, self.metrics)


class DraftResponse(WholeAnswer):
    """One JSON object."""

    def __init__(self, generation: Generation, has_probs: bool, in_flight: InFlight, metrics: RequestMetrics) -> None:
        super().__init__(generation, in_flight, metrics)
        self._has_probs = has_probs

    def _body(self, choices: Sequence[TextDelta]) -> bytes:
        (choice,) = choices
        token_ids = [token.token_id for token in choice.tokens]
        assert len(token_ids) == choice.num_tokens, "every token is reported"
        return _answer(token_ids, [min(math.exp(token.logprobs.logprob), 1.0) for token in choice.tokens], self._has_probs)


def _answer(token_ids: Sequence[int], probs: Sequence[float], has_probs: bool) -> bytes:
    """`probs`: of each token under the raw model, whatever temperature it was drawn with."""
    return msgspec.json.encode({"token_ids": token_ids, "probs": probs} if has_probs else {"token_ids": token_ids})
