"""The routes. `create_app` puts the parts together; each route is a few lines that hand over to the part that does the work."""

import time
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from paceline import __version__
from paceline.config import ServerConfig, is_loopback
from paceline.errors import BadInputError, NotFoundError, PacelineError
from paceline.metrics.prometheus import CONTENT_TYPE, Snapshot, render
from paceline.metrics.requests import RequestMetrics
from paceline.server.about import model_facts
from paceline.server.anthropic.errors import error_body
from paceline.server.anthropic.routes import MessagesRoutes
from paceline.server.chat import Job, Preparation
from paceline.server.core import Core
from paceline.server.edge import Edge
from paceline.server.engine_port import Engine
from paceline.server.exchange import json_response as _json
from paceline.server.exchange import read_request
from paceline.server.generation import Generation
from paceline.server.health import Health, HealthCheck
from paceline.server.infer import InferRequest, InferResponse, InferStream, read_infer
from paceline.server.inflight import InFlight
from paceline.server.limits import RequestLimits
from paceline.server.openai import answers
from paceline.server.openai.answers import Envelope, ServedModel
from paceline.server.openai.errors import ENGINE_GONE, STOPPING, ErrorAnswer, answer_for, answer_for_status, too_many_streams
from paceline.server.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
    read_chat_completion,
    read_completion,
    schemas,
)
from paceline.server.openai.schema import describe_answers
from paceline.server.openai.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize_answer,
    read_detokenize,
    read_tokenize,
    tokenize_answer,
)
from paceline.server.responses.routes import ResponseRoutes
from paceline.server.responses.store import ResponseStore
from paceline.server.routing import served
from paceline.server.stats import MAX_STREAMS, Stats, StatsStream
from paceline.server.stream import BodyResponse, StreamResponse

_REF = "#/components/schemas/{name}"
_STREAM = {"name": "stream", "in": "query", "schema": {"enum": ["0", "1"]}, "description": "1: an event each second."}


def create_app(engine: Engine, config: ServerConfig, model_folder: Path, in_flight: InFlight | None = None) -> ASGIApp:
    """The server as an ASGI application. Raises BadInputError if the folder's tokenizer files cannot be used.

    `in_flight`: given by who wants to end running answers at shut-down.
    """
    return Server(engine, config, model_folder, in_flight or InFlight()).app


class Server:
    """The parts of a server, and its application."""

    def __init__(self, engine: Engine, config: ServerConfig, model_folder: Path, in_flight: InFlight) -> None:
        self.model_name = config.served_model_name or engine.facts.model_name
        self.metrics = RequestMetrics()
        self.health = HealthCheck(engine, in_flight, config.engine.max_num_batched_tokens)
        self._engine = engine
        self._config = config
        self._in_flight = in_flight
        self._preparation = Preparation(model_folder, engine.facts, self.model_name, config.engine.seed)
        told = model_facts(engine.facts, config.engine, model_folder)
        self._model = ServedModel(self.model_name, int(time.time()), engine.facts.max_model_len, told)
        core = Core(self.model_name, self._preparation, in_flight, self.metrics, self._generation, self._refusal, self._error_response)
        self._messages = MessagesRoutes(core)
        self._responses = ResponseRoutes(core, ResponseStore(config.responses_memory_bytes))
        # No docs pages: they would load from a CDN.
        routes = FastAPI(title="Paceline", version=__version__, docs_url=None, redoc_url=None)
        self._add_routes(routes)
        self._add_error_handlers(routes)
        allowed_hosts = frozenset(name.strip().lower() for name in (config.allowed_hosts or "").split(","))
        limits = RequestLimits(config.max_concurrent_requests, config.request_timeout)
        self._stats = Stats(self.model_name, engine, self.metrics, limits, in_flight)
        self.app: ASGIApp = Edge(served(routes), self.metrics, limits, is_loopback(config.host), allowed_hosts)

    async def start(self) -> None:
        """Start what helps to serve, before the first request. Raises BadInputError if the model's chat template cannot be used."""
        await self._preparation.start()
        self._exposition()  # the first one takes four times as long as the others

    async def close(self) -> None:
        """End the server's own processes. The engine is the caller's."""
        await self._preparation.close()

    def example(self) -> tuple[str, dict[str, object]]:
        """A route and a body for it, with which to try this server."""
        if self._preparation.has_chat_template:
            return "/v1/chat/completions", {"model": self.model_name, "messages": [{"role": "user", "content": "Say hello."}]}
        return "/v1/completions", {"model": self.model_name, "prompt": "Once upon a time"}

    def _add_routes(self, routes: FastAPI) -> None:
        completion, chat_completion, named = schemas(_REF)
        (tokenize, detokenize, infer), more = msgspec.json.schema_components(
            (TokenizeRequest, DetokenizeRequest, InferRequest), ref_template=_REF
        )
        for path, endpoint, schema in (
            ("/v1/completions", self.create_completion, completion),
            ("/v1/chat/completions", self.create_chat_completion, chat_completion),
            ("/tokenize", self.tokenize, tokenize),
            ("/detokenize", self.detokenize, detokenize),
            ("/infer", self.infer, infer),
        ):
            body = {"required": True, "content": {"application/json": {"schema": schema}}}
            routes.add_api_route(path, endpoint, methods=["POST"], response_class=Response, openapi_extra={"requestBody": body})
        for path, endpoint in (
            ("/v1/models", self.list_models),
            ("/v1/models/{name:path}", self.get_model),
            ("/health", self.get_health),
            ("/ready", self.get_ready),
            ("/metrics", self.get_metrics),
        ):
            routes.add_api_route(path, endpoint, methods=["GET"], response_class=Response)
        routes.add_api_route("/stats", self.get_stats, methods=["GET"], response_class=Response, openapi_extra={"parameters": [_STREAM]})
        messages, responses = self._messages.add_to(routes, _REF), self._responses.add_to(routes, _REF)
        described: dict[str, object] = {}
        for name, schema in (*named.items(), *more.items(), *messages.items(), *responses.items()):
            assert described.setdefault(name, schema) == schema, f"two things are called {name}"
        describe_answers(routes.openapi(), described, self.model_name)  # kept there, and served as it is

    def _add_error_handlers(self, routes: FastAPI) -> None:
        async def on_error(request: Request, error: Exception) -> Response:
            return self._error_response(answer_for(error), request.scope)

        async def on_http_error(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            detail = error.detail
            if error.status_code in (404, 405):
                detail = f"{request.method} {request.scope['path'][:100]} is no route of this server; GET /openapi.json lists them"
            response = self._error_response(answer_for_status(error.status_code, detail), request.scope)
            response.headers.update(error.headers or {})
            if error.status_code == 405:
                response.headers["allow"] = _allowed_methods(routes, request)
            return response

        routes.add_exception_handler(PacelineError, on_error)
        routes.add_exception_handler(Exception, on_error)  # raised on by Starlette, logged by the edge
        routes.add_exception_handler(HTTPException, on_http_error)

    async def create_completion(self, request: Request) -> Response:
        """OpenAI's completions: text or token ids in, text out."""
        body = await read_request(request, read_completion)
        return self._answer(body, await self._preparation.completion(body), is_chat=False)

    async def create_chat_completion(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        body = await read_request(request, read_chat_completion)
        return self._answer(body, await self._preparation.chat(body), is_chat=True)

    async def tokenize(self, request: Request) -> Response:
        """vLLM's: the tokens of a text or of a chat."""
        body, chat = await read_request(request, read_tokenize)
        self._preparation.check_model(body.model)
        if chat is None:
            token_ids = await self._preparation.text_prompt(body.prompt or "", body.add_special_tokens is not False)
        else:
            token_ids = await self._preparation.chat_prompt(chat)
        token_strs = await self._preparation.token_strings(token_ids) if body.return_token_strs else None
        return _json(tokenize_answer(token_ids, self._engine.facts.max_model_len, token_strs))

    async def detokenize(self, request: Request) -> Response:
        """vLLM's: the text of tokens."""
        body = await read_request(request, read_detokenize)
        self._preparation.check_model(body.model)
        return _json(detokenize_answer(await self._preparation.decode(body.token_ids())))

    async def infer(self, request: Request) -> Response:
        """A prompt's text, and what it took."""
        body = await read_request(request, read_infer)
        job = await self._preparation.completion(body.as_completion(), "max_length")
        refusal = self._refusal()
        if refusal is not None:
            return self._error_response(refusal)
        kind = InferStream if body.stream else InferResponse
        return kind(self._generation(job), self._in_flight, self.metrics)

    async def list_models(self) -> Response:
        """The one model that is served."""
        return _json(answers.model_list(self._model))

    async def get_model(self, name: str) -> Response:
        """The same by its name."""
        if name != self.model_name:
            raise NotFoundError(f"the model {name[:100]!r} does not exist here", param="model", code="model_not_found")
        return _json(answers.model_entry(self._model))

    async def get_health(self) -> Response:
        """200 only while the engine makes progress."""
        return _verdict(await self.health.check())

    async def get_ready(self) -> Response:
        """200 while new requests are taken."""
        if self._in_flight.is_draining:
            return _verdict(Health(False, "the server is shutting down"))
        return _verdict(Health(self._engine.is_alive, "ready" if self._engine.is_alive else "the engine has stopped"))

    async def get_metrics(self) -> Response:
        """Prometheus' text format."""
        return Response(self._exposition(), media_type=CONTENT_TYPE)

    async def get_stats(self, request: Request) -> Response:
        """What `/metrics` counts, as JSON; with `?stream=1` an event each second."""
        stream = request.query_params.get("stream", "0")
        if stream not in ("0", "1"):
            raise BadInputError("stream: must be 0 or 1", param="stream")
        if stream == "0":
            return _json(self._stats.body())
        if self._stats.num_streams >= MAX_STREAMS:
            return self._error_response(too_many_streams(MAX_STREAMS))
        return StatsStream(self._stats)

    def _exposition(self) -> bytes:
        enable_prefix_caching = self._config.engine.enable_prefix_caching
        return render(Snapshot(self.model_name, self._engine.facts, self._engine.stats(), self.metrics, enable_prefix_caching))

    def _refusal(self) -> ErrorAnswer | None:
        """What to tell a good request that cannot run now."""
        if self._in_flight.is_draining:
            return STOPPING
        return None if self._engine.is_alive else ENGINE_GONE

    def _generation(self, job: Job) -> Generation:
        return Generation(self._engine, self._preparation.vocabulary, job, self.metrics, self._config.engine.verification)

    def _answer(self, body: CompletionRequest | ChatCompletionRequest, job: Job, is_chat: bool) -> Response:
        refusal = self._refusal()
        if refusal is not None:
            return self._error_response(refusal)
        options = (body.stream_options or StreamOptions()) if body.stream else StreamOptions()
        has_usage, has_token_ids = bool(options.include_usage), bool(body.return_token_ids)
        envelope = Envelope(job.answer_id, self.model_name, int(time.time()), is_chat, has_usage, has_token_ids)
        generation = self._generation(job)
        if body.stream:
            return StreamResponse(generation, envelope, self._in_flight, self.metrics, options)
        return BodyResponse(generation, envelope, self._in_flight, self.metrics)

    def _error_response(self, error: ErrorAnswer, scope: Scope | None = None) -> Response:
        """`scope`: of a request that may be one of Anthropic's API."""
        self.metrics.error(error.kind)
        headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
        return _json(error.body if scope is None else error_body(error, scope), error.status, headers)


def _verdict(health: Health) -> Response:
    return _json(answers.health(health.is_healthy, health.reason), 200 if health.is_healthy else 503)


def _allowed_methods(routes: FastAPI, request: Request) -> str:
    """Of all routes with the request's path; Starlette names those of the first one."""
    found = (route for route in routes.routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE)
    return ", ".join(sorted({method for route in found for method in route.methods or ()}))
