"""Errors in OpenAI's JSON, and which HTTP status each error of the vocabulary has. Nothing here tells how the server works inside."""

from dataclasses import dataclass

import msgspec

from paceline.errors import BadInputError, EngineDeadError, MissingError, NotFoundError, PacelineError
from paceline.metrics.requests import ErrorKind

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_MAX_MESSAGE_CHARS = 1000
_RESTART_S = 5  # about what a process manager needs to start the server again


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """One error as a client sees it. `retry_after_s` becomes a header."""

    status: int
    kind: ErrorKind
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    @property
    def clean_message(self) -> str:
        """The message as it leaves: parts of a request may stand in it, and what is not Unicode in them must not break the answer."""
        return self.message[:_MAX_MESSAGE_CHARS].encode(errors="replace").decode()

    @property
    def body(self) -> bytes:
        """In OpenAI's form."""
        fields = {"message": self.clean_message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": fields})


def answer_for(error: BaseException) -> ErrorAnswer:
    """The answer to an error raised while a request was served; anything unforeseen is a 500 without details."""
    match error:
        case NotFoundError():
            return ErrorAnswer(404, ErrorKind.NOT_FOUND, str(error), _INVALID, error.param, error.code)
        case BadInputError():
            return ErrorAnswer(400, ErrorKind.BAD_INPUT, str(error), _INVALID, error.param, error.code)
        case MissingError():
            return ErrorAnswer(503, ErrorKind.UNAVAILABLE, str(error), _SERVER, code="unavailable", retry_after_s=1)
        case EngineDeadError():
            message = "the engine has stopped, so this request cannot be finished; the server's log says why"
            return ErrorAnswer(500, ErrorKind.ENGINE_DEAD, message, _SERVER, code="engine_dead")
        case PacelineError():
            return ErrorAnswer(500, ErrorKind.ENGINE_FAILED, str(error), _SERVER, code="engine_failed")
        case _:
            return ErrorAnswer(500, ErrorKind.INTERNAL, "internal error; the server's log says more", _SERVER, code="internal")


ENGINE_GONE = ErrorAnswer(
    503,
    ErrorKind.ENGINE_DEAD,
    "the engine has stopped, and this server ends in a moment; send the request again once it is back",
    _SERVER,
    code="engine_dead",
    retry_after_s=_RESTART_S,
)
"""The answer to requests that come after the engine's death; those it was working on get `answer_for(EngineDeadError)`."""


STOPPING = ErrorAnswer(
    503, ErrorKind.UNAVAILABLE, "the server is shutting down; send the request again", _SERVER, code="shutting_down", retry_after_s=1
)
"""The answer to requests that come, or still run, when the server ends."""


def busy(max_concurrent_requests: int) -> ErrorAnswer:
    """The answer to a request over the limit of the server."""
    message = (
        f"the server is busy with {max_concurrent_requests:,} requests, its limit; send the request again in a moment, "
        "or start the server with a higher --max-concurrent-requests"
    )
    return ErrorAnswer(503, ErrorKind.BUSY, message, _SERVER, code="busy", retry_after_s=1)


def store_full(max_bytes: int) -> ErrorAnswer:
    """The answer to a response that must be stored while running ones take all room."""
    message = (
        f"the store of responses is full with {max_bytes:,} bytes of responses that still run; send the request again in a moment, or with "
        "store: false, or start the server with a larger --responses-memory-bytes"
    )
    return ErrorAnswer(503, ErrorKind.BUSY, message, _SERVER, code="store_full", retry_after_s=1)


def too_many_streams(max_streams: int) -> ErrorAnswer:
    """The answer to one stream of statistics more than the server keeps open."""
    message = f"{max_streams} streams of statistics are open, the limit; close one, or ask without stream"
    return ErrorAnswer(503, ErrorKind.BUSY, message, _SERVER, code="busy", retry_after_s=1)


def timed_out(timeout_s: float) -> ErrorAnswer:
    """The answer to a request that was not finished in time, and of which nothing has been sent."""
    message = (
        f"the request was not finished within {timeout_s:g} s, the limit of this server; ask for fewer tokens, stream the answer, "
        "or start the server with a longer --request-timeout"
    )
    return ErrorAnswer(504, ErrorKind.TIMEOUT, message, _SERVER, code="timeout")


def late_body(timeout_s: float) -> ErrorAnswer:
    """The answer to a client that did not send its body in time."""
    message = (
        f"the body did not arrive within {timeout_s:g} s, the limit of this server; send it faster or send less, "
        "or start the server with a longer --request-timeout"
    )
    return ErrorAnswer(408, ErrorKind.TIMEOUT, message, _INVALID, code="timeout")


def answer_for_status(status: int, detail: str) -> ErrorAnswer:
    """The answer to what the HTTP layer refuses by itself: unknown path, wrong method, body over the limit."""
    kind = {404: ErrorKind.NOT_FOUND, 413: ErrorKind.TOO_LARGE}.get(status, ErrorKind.BAD_INPUT)
    return ErrorAnswer(status, kind, detail, _INVALID)
