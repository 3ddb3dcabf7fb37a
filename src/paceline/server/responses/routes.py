"""The routes of `/v1/responses`: make, fetch, list the input of, cancel and delete responses."""

import time
from dataclasses import replace
from functools import cache, partial

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from paceline.errors import BadInputError, NotFoundError
from paceline.server.chat import Job
from paceline.server.core import Core
from paceline.server.exchange import json_response, read_request
from paceline.server.limits import place_of
from paceline.server.openai.errors import store_full
from paceline.server.responses.answer import BackgroundResponse, ResponseStream, WholeResponse
from paceline.server.responses.events import Events
from paceline.server.responses.items import decode_items, encode_items, stored_item
from paceline.server.responses.listing import input_item_list
from paceline.server.responses.reply import Reply, head_fields
from paceline.server.responses.requests import ResponseRequest, chat_request, in_our_terms, read_response_request
from paceline.server.responses.store import Owner, Record, ResponseStore, owner_of
from paceline.server.responses.truncation import fitting_job

_BYTES_PER_TOKEN = 16  # of an answer: its text stands in the response object and among the items
_BYTES_PER_LOGPROB = 160  # the same
_HEAD_BYTES = 2048
_REFUSED = ("max_tokens", "n", "prompt_logprobs", "response_format")  # chat's options that `unsupported.py` refuses
_MAX_RESERVED_TOKENS = 1024  # most answers end long before they may; a longer one makes its room when it ends


class ResponseRoutes:
    """OpenAI's responses, over the core of chat."""

    def __init__(self, core: Core, store: ResponseStore) -> None:
        self._core = core
        self._store = store

    def add_to(self, routes: FastAPI, ref_template: str) -> dict[str, object]:
        """Add the routes; returns the schemas that their description refers to by name."""
        schema, named = _schemas(ref_template)
        body = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
        routes.add_api_route("/v1/responses", self.create, methods=["POST"], response_class=Response, openapi_extra=body)
        for method, path, endpoint in (
            ("GET", "/v1/responses/{response_id}", self.retrieve),
            ("DELETE", "/v1/responses/{response_id}", self.delete),
            ("POST", "/v1/responses/{response_id}/cancel", self.cancel),
            ("GET", "/v1/responses/{response_id}/input_items", self.list_input),
        ):
            routes.add_api_route(path, endpoint, methods=[method], response_class=Response)
        return named

    async def create(self, request: Request) -> Response:
        """A response to a text or to items: whole, streamed, or made in the background."""
        body = await read_request(request, read_response_request)
        owner = owner_of(request.headers.get("authorization"))
        earlier = self._earlier_turns(owner, body.previous_response_id)
        chat = chat_request(body, decode_items(earlier))
        try:
            prepare = self._core.preparation.chat if body.truncation != "auto" else partial(fitting_job, self._core.preparation)
            job = await prepare(chat)
        except BadInputError as error:
            raise in_our_terms(error) from None
        refusal = self._core.refusal()
        if refusal is not None:
            return self._core.refuse(refusal, request.scope)
        job = replace(job, answer_id=job.answer_id.replace("chatcmpl-", "resp_"))
        turns = (*earlier, encode_items([stored_item(item) for item in body.items]))
        record = Record(job.answer_id, owner, turns, bool(body.background), _reserved_bytes(job))
        is_stored = body.store is not False and self._store.add(record)
        if not is_stored and (body.store or body.background):
            return self._refuse_storing(request, record)
        return self._answer(request, body, job, record, is_stored)

    async def retrieve(self, request: Request, response_id: str) -> Response:
        """A stored response as it stands."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise BadInputError("stream: a stored response comes as a whole in this version; leave it out", param="stream")
        return json_response(self._record(request, response_id).body)

    async def delete(self, request: Request, response_id: str) -> Response:
        """Forget a response; one that is made in the background ends."""
        record = self._record(request, response_id)
        self._store.remove(record)
        if record.cancel is not None:
            await record.cancel()
        return json_response(msgspec.json.encode({"id": record.response_id, "object": "response", "deleted": True}))

    async def cancel(self, request: Request, response_id: str) -> Response:
        """End a response that is made in the background. One that was cancelled before is given again."""
        record = self._record(request, response_id)
        if not record.is_background:
            raise BadInputError("only a response with background: true can be cancelled; to end another one, close its connection")
        if record.end is not None and record.end.status != "cancelled":
            raise BadInputError(f"the response has ended with the status {record.end.status}, and cannot be cancelled any more")
        if record.cancel is not None:
            await record.cancel()
        return json_response(record.body)

    async def list_input(self, request: Request, response_id: str) -> Response:
        """The items that a response answers, those of earlier responses included."""
        return json_response(input_item_list(self._record(request, response_id).turns, request.query_params))

    def _answer(self, request: Request, body: ResponseRequest, job: Job, record: Record, is_stored: bool) -> Response:
        core, generation = self._core, self._core.new_generation(job)
        head = head_fields(body, job.answer_id, core.model_name, int(time.time()), is_stored)
        reply = Reply(generation, head, Events(is_silent=not body.stream), lambda end: self._store.end(record, end))
        record.show = reply.body
        if not body.background:
            kind = ResponseStream if body.stream else WholeResponse
            return kind(reply, generation, core.in_flight, core.metrics)
        background = BackgroundResponse(reply, generation, core.in_flight, core.metrics)
        record.cancel = background.cancel
        background.start(place_of(request.scope))
        return json_response(reply.body())

    def _earlier_turns(self, owner: Owner, response_id: str | None) -> tuple[bytes, ...]:
        """The conversation that a request goes on from. Raises BadInputError."""
        if response_id is None:
            return ()
        param, code = "previous_response_id", "previous_response_not_found"
        record = self._store.get(owner, response_id)
        if record is None:
            raise BadInputError(f"{param}: {_not_found(response_id)}", param=param, code=code)
        if record.end is None or record.end.status not in ("completed", "incomplete"):
            status = "not ended yet" if record.end is None else f"ended with the status {record.end.status}"
            raise BadInputError(f"{param}: the response has {status}; go on from one that is completed", param=param)
        return record.conversation

    def _record(self, request: Request, response_id: str) -> Record:
        record = self._store.get(owner_of(request.headers.get("authorization")), response_id)
        if record is None:
            raise NotFoundError(_not_found(response_id), param="response_id")
        return record

    def _refuse_storing(self, request: Request, record: Record) -> Response:
        limit = self._store.max_bytes
        if record.num_bytes > limit:
            raise BadInputError(
                f"store: the response needs {record.num_bytes:,} bytes, and the store of this server has {limit:,}; send store: false, "
                "or start the server with a larger --responses-memory-bytes",
                param="store",
            )
        return self._core.refuse(store_full(limit), request.scope)


@cache  # the same for every server of a process
def _schemas(ref_template: str) -> tuple[dict[str, object], dict[str, object]]:
    """The JSON schema of a body, and those that it refers to by name."""
    (schema,), named = msgspec.json.schema_components((ResponseRequest,), ref_template=ref_template)
    for name in _REFUSED:
        del named[ResponseRequest.__name__]["properties"][name]
    return schema, named


def _not_found(response_id: str) -> str:
    return f"there is no response {response_id[:100]!r}; it may have been deleted, made room for others, or be more than an hour old"


def _reserved_bytes(job: Job) -> int:
    """What an answer is taken to need while it runs."""
    sampling = job.requests[0].sampling
    per_token = _BYTES_PER_TOKEN + (0 if sampling.num_logprobs is None else _BYTES_PER_LOGPROB * (1 + sampling.num_logprobs))
    return _HEAD_BYTES + per_token * min(sampling.max_tokens, _MAX_RESERVED_TOKENS)
