"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: chat in Anthropic's words. The app puts them beside its own routes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from paceline.errors import BadInputError
from paceline.metrics.requests import RequestMetrics
from paceline.server.anthropic.answers import Envelope, Limits, count_body
from paceline.server.anthropic.conversion import chat_form
from paceline.server.anthropic.errors import PATH, error_body
from paceline.server.anthropic.requests import MessagesRequest, Thinking, read_messages, read_prompt, schemas
from paceline.server.anthropic.stream import Form, MessageResponse, MessageStream
from paceline.server.chat import Job, Preparation
from paceline.server.exchange import read_request
from paceline.server.generation import Generation
from paceline.server.inflight import InFlight
from paceline.server.openai.errors import ErrorAnswer


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes need of the server. `refusal`: what to tell a good request that cannot run now."""

    preparation: Preparation
    generation: Callable[[Job], Generation]
    refusal: Callable[[], ErrorAnswer | None]
    in_flight: InFlight
    metrics: RequestMetrics
    model_name: str


class MessagesRoutes:
    """The routes of Anthropic's API."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def add_to(self, routes: FastAPI, ref_template: str) -> dict[str, object]:
        """Add the routes. Returns the schemas that their descriptions refer to."""
        messages, prompt, named = schemas(ref_template)
        for path, endpoint, schema in ((PATH, self.create, messages), (f"{PATH}/count_tokens", self.count_tokens, prompt)):
            body = {"required": True, "content": {"application/json": {"schema": schema}}}
            routes.add_api_route(path, endpoint, methods=["POST"], response_class=Response, openapi_extra={"requestBody": body})
        return named

    async def create(self, request: Request) -> Response:
        """Anthropic's messages: a chat and its answer."""
        parts, body = self._parts, await read_request(request, read_messages)
        job, limits = await self._job(body)
        refusal = parts.refusal()
        if refusal is not None:
            parts.metrics.error(refusal.kind)
            headers = {"retry-after": str(refusal.retry_after_s)} if refusal.retry_after_s is not None else {}
            return Response(error_body(refusal, request.scope), refusal.status, headers, media_type="application/json")
        form = Form(Envelope(job.answer_id, parts.model_name), limits, partial(error_body, scope=request.scope))
        kind = MessageStream if body.stream else MessageResponse
        return kind(parts.generation(job), form, parts.in_flight, parts.metrics)

    async def count_tokens(self, request: Request) -> Response:
        """The tokens of the prompt that a request would have."""
        body = await read_request(request, read_prompt)
        self._check_thinking(body.thinking)
        form = chat_form(body)
        try:
            prompt = await self._parts.preparation.chat_prompt(form.request)
        except BadInputError as error:
            raise form.explained(error) from None
        return Response(count_body(len(prompt)), media_type="application/json")

    async def _job(self, body: MessagesRequest) -> tuple[Job, Limits]:
        """The chat's job, with at most `max_tokens` and as many as the context has room for: clients ask for all there is."""
        self._check_thinking(body.thinking)
        form = chat_form(body)
        try:
            job = await self._parts.preparation.chat(form.request)
        except BadInputError as error:
            raise form.explained(error) from None
        (only,) = job.requests
        num_tokens = min(body.max_tokens, only.sampling.max_tokens)
        job = replace(
            job,
            answer_id=f"msg_{job.answer_id.rpartition('-')[2]}",
            requests=(replace(only, sampling=replace(only.sampling, max_tokens=num_tokens)),),
        )
        return job, Limits(is_cut_by_context=num_tokens < body.max_tokens, has_one_call=body.has_one_call)

    def _check_thinking(self, thinking: Thinking | None) -> None:
        """Raise BadInputError for what a model that thinks would not do. One that does not keeps every budget, and `disabled`."""
        if thinking is None or thinking.is_models_choice or not self._parts.preparation.has_reasoning:
            return
        raise BadInputError(
            "thinking: this model thinks as long as it likes and shows it, so a budget, disabled and omitted would be ignored; "
            'leave thinking out, or send {"type": "adaptive"}, and bound thoughts and answer together by max_tokens',
            param="thinking",
            code="unsupported_parameter",
        )
