"""Errors in OpenAI's JSON, and which HTTP status each error of the vocabulary has. Nothing here tells how the server works inside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from paceline.errors import BadInputError, EngineDeadError, MissingError, NotFoundError, PacelineError
from paceline.metrics.requests import ErrorKind
from paceline.server.openai.requests import UNION_TAGS

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_MAX_MESSAGE_CHARS = 1000


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
    def body(self) -> bytes:
        # Parts of a request may stand in a message; what is not Unicode in them must not break the answer.
        message = self.message[:_MAX_MESSAGE_CHARS].encode(errors="replace").decode()
        return msgspec.json.encode({"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}})


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


def answer_for_status(status: int, detail: str) -> ErrorAnswer:
    """The answer to what the HTTP layer refuses by itself: unknown path, wrong method, body over the limit."""
    kind = {404: ErrorKind.NOT_FOUND, 413: ErrorKind.TOO_LARGE}.get(status, ErrorKind.BAD_INPUT)
    return ErrorAnswer(status, kind, detail, _INVALID)


def answer_for_invalid(errors: Sequence[Mapping[str, object]], body: object) -> ErrorAnswer:
    """The answer to a body that does not fit the endpoint's model; names the first field at fault. `errors` are pydantic's."""
    first = errors[0]
    location, kind, reason = first["loc"], first["type"], str(first["msg"])
    assert isinstance(location, tuple)
    if kind == "json_invalid":
        return ErrorAnswer(400, ErrorKind.BAD_INPUT, f"the body is not valid JSON (at character {location[-1]})", _INVALID)
    path: list[str] = [str(part) for part in location[1:] if part not in UNION_TAGS]  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if not path:
        if isinstance(body, bytes):
            reason = "send JSON with the header Content-Type: application/json"
        return ErrorAnswer(400, ErrorKind.BAD_INPUT, f"the body must be a JSON object: {reason}", _INVALID)
    param = ".".join(path)
    if kind == "literal_error":
        reason += "; other values are not supported by this version"
    return ErrorAnswer(400, ErrorKind.BAD_INPUT, f"{param}: {reason}", _INVALID, param)
