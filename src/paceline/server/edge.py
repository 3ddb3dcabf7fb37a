"""The outermost ASGI layer: a request id on every answer, who may ask, a limit on bodies, and an answer to every error.

Pure ASGI, so that streams pass untouched.
"""

import logging
import re
import uuid

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.metrics.requests import RequestMetrics
from paceline.server.openai.errors import ErrorAnswer, answer_for, answer_for_status
from paceline.server.origin import foreign_header
from paceline.server.stream import send_error

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 10 * 1024 * 1024

_TOO_LARGE = f"the body is larger than {MAX_BODY_BYTES // 1024**2} MB; send less in one request"
_REQUEST_ID = b"x-request-id"
_PLAIN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")  # a client's own id is echoed only if it cannot hurt a header or a log


class Edge:
    """Wraps the application. `is_local`: only programs of this machine may ask, or those that ask for one of `allowed_hosts`."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics, is_local: bool, allowed_hosts: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._is_local = is_local
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _client_id(scope) or uuid.uuid4().hex.encode()
        is_started = is_complete = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started, is_complete
            if message["type"] == "http.response.start":
                is_started = True
                message["headers"] = [*message.get("headers", []), (_REQUEST_ID, request_id)]
            elif not message.get("more_body", False):
                is_complete = True
            await send(message)

        if self._is_local and (reason := foreign_header(scope["headers"], self._allowed_hosts)) is not None:
            await self._refuse(answer_for_status(403, reason), send_with_id)
            return
        if _content_length(scope) > MAX_BODY_BYTES:
            await self._refuse(answer_for_status(413, _TOO_LARGE), send_with_id)
            return
        try:
            await self._app(scope, _limited(receive), send_with_id)
        except Exception as error:
            _log.exception("request %s to %s failed", request_id.decode(), scope["path"])
            if not is_started:
                await self._refuse(answer_for(error), send_with_id)
            elif not is_complete:
                raise  # half an answer is out: the connection must break, or the client takes it for whole

    async def _refuse(self, answer: ErrorAnswer, send: Send) -> None:
        self._metrics.error(answer.kind)
        await send_error(send, answer)


def _limited(receive: Receive) -> Receive:
    """`receive` that stops a body without a declared length at the limit, before it is held in memory."""
    num_bytes = 0

    async def receive_limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, _TOO_LARGE)
        return message

    return receive_limited


def _content_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


def _client_id(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == _REQUEST_ID and _PLAIN_ID.fullmatch(value):
            return value
    return None
