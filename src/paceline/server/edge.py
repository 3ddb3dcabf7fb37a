"""The outermost ASGI layer: a request id on every answer, who may ask, limits on requests and bodies, and an answer to every error.

Pure ASGI, so that streams pass untouched.
"""

import asyncio
import logging
import re
import secrets

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.metrics.requests import RequestMetrics
from paceline.server.anthropic.errors import REQUEST_ID, error_body, is_anthropic
from paceline.server.limits import RequestLimits
from paceline.server.openai.errors import ErrorAnswer, answer_for, answer_for_status
from paceline.server.origin import foreign_header
from paceline.server.stream import SEND_PART, send_error

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 10 * 1024 * 1024

_TOO_LARGE = f"the body is larger than {MAX_BODY_BYTES // 1024**2} MB; send less in one request"
_REQUEST_ID = b"x-request-id"
_PLAIN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")  # a client's own id is echoed only if it cannot hurt a header or a log


class Edge:
    """Wraps the application. `is_local`: only programs of this machine may ask, or those that ask for one of `allowed_hosts`."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics, limits: RequestLimits, is_local: bool, allowed_hosts: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._limits = limits
        self._is_local = is_local
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _client_id(scope) or secrets.token_hex(16).encode()
        scope[REQUEST_ID] = request_id.decode()
        id_headers = [(name, request_id) for name in ((_REQUEST_ID, b"request-id") if is_anthropic(scope) else (_REQUEST_ID,))]
        is_started = is_complete = is_late = False
        task = asyncio.current_task()
        assert task is not None

        async def send_with_id(message: Message) -> None:
            nonlocal is_started, is_complete
            if message["type"] == "http.response.start":
                is_started = True
                message["headers"] = [*message.get("headers", []), *id_headers]
            elif not message.get("more_body", False):
                is_complete = True
            await send(message)

        def end_late() -> None:
            nonlocal is_late
            if not is_started:  # what has begun is whole already, but for the sending
                is_late = True
                task.cancel()

        refusal = self._refusal(scope)
        if refusal is not None:
            await self._refuse(scope, refusal, send_with_id)
            return
        body = _LimitedBody(receive)
        scope[SEND_PART] = send
        try:
            with self._limits.serving(scope, end_late):
                await self._app(scope, body.receive, send_with_id)
        except asyncio.CancelledError:
            if not is_late:
                raise
            task.uncancel()
            await self._refuse(scope, self._limits.late_answer(body.is_complete), send_with_id)
        except Exception as error:
            _log.exception("request %s to %s failed", request_id.decode(), scope["path"])
            if not is_started:
                await self._refuse(scope, answer_for(error), send_with_id)
            elif not is_complete:
                raise  # half an answer is out: the connection must break, or the client takes it for whole

    def _refusal(self, scope: Scope) -> ErrorAnswer | None:
        """What to tell a request that is refused by its headers, before any of its body is read."""
        if self._is_local and (reason := foreign_header(scope["headers"], self._allowed_hosts)) is not None:
            return answer_for_status(403, reason)
        if _content_length(scope) > MAX_BODY_BYTES:
            return answer_for_status(413, _TOO_LARGE)
        return self._limits.refusal(scope)

    async def _refuse(self, scope: Scope, answer: ErrorAnswer, send: Send) -> None:
        self._metrics.error(answer.kind)
        await send_error(send, answer, error_body(answer, scope))


class _LimitedBody:
    """A request's body, which stops at the limit before it is held in memory, declared length or not."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._num_bytes = 0
        self.is_complete = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        self.is_complete = not message.get("more_body", False)
        if self._num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, _TOO_LARGE)
        return message


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
