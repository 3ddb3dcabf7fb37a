"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: chat in Anthropic's words. The app puts them beside its own routes."""

from dataclasses import replace
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from paceline.errors import BadInputError
from paceline.server.anthropic.answers import Envelope, Limits, count_body
from paceline.server.anthropic.conversion import chat_form
from paceline.server.anthropic.errors import PATH, error_body
from paceline.server.anthropic.requests import MessagesRequest, Thinking, read_messages, read_prompt, schemas
from paceline.server.anthropic.stream import Form, MessageResponse, MessageStream
from paceline.server.chat import Job
from paceline.server.core import Core
from paceline.server.exchange import json_response, read_request


class MessagesRoutes:
    """The routes of Anthropic's API."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def add_to(self, routes: FastAPI, ref_template: str) -> dict[str, object]:
        """Add the routes. Returns the schemas that their descriptions refer to."""
        messages, prompt, named = schemas(ref_template)
        for path, endpoint, schema in ((PATH, self.create, messages), (f"{PATH}/count_tokens", self.count_tokens, prompt)):
            body = {"required": True, "content": {"application/json": {"schema": schema}}}
            routes.add_api_route(path, endpoint, methods=["POST"], response_class=Response, openapi_extra={"requestBody": body})
        return named

    async def create(self, request: Request) -> Response:
        """Anthropic's messages: a chat and its answer."""
        core, body = self._core, await read_request(request, read_messages)
        job, limits = await self._job(body)
        refusal = core.refusal()
        if refusal is not None:
            return core.refuse(refusal, request.scope)
        form = Form(Envelope(job.answer_id, core.model_name), limits, partial(error_body, scope=request.scope))
        kind = MessageStream if body.stream else MessageResponse
        return kind(core.new_generation(job), form, core.in_flight, core.metrics)

    async def count_tokens(self, request: Request) -> Response:
        """The tokens of the prompt that a request would have."""
        body = await read_request(request, read_prompt)
        self._check_thinking(body.thinking)
        form = chat_form(body)
        try:
            prompt = await self._core.preparation.chat_prompt(form.request)
        except BadInputError as error:
            raise form.explained(error) from None
        return json_response(count_body(len(prompt)))

    async def _job(self, body: MessagesRequest) -> tuple[Job, Limits]:
        """The chat's job, with at most `max_tokens` and as many as the context has room for: clients ask for all there is."""
        self._check_thinking(body.thinking)
        form = chat_form(body)
        try:
            job = await self._core.preparation.chat(form.request)
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
        if thinking is None or thinking.is_models_choice or not self._core.preparation.has_reasoning:
            return
        raise BadInputError(
            "thinking: this model thinks as long as it likes and shows it, so a budget, disabled and omitted would be ignored; "
            'leave thinking out, or send {"type": "adaptive"}, and bound thoughts and answer together by max_tokens',
            param="thinking",
            code="unsupported_parameter",
        )
