"""Errors in Anthropic's JSON, for all requests to its routes: those that fail before a route, too. Called by the edge, the app and streams.

The statuses are those of the other routes: a server that is busy says 503 with `Retry-After`, where Anthropic's says 529.
"""

import msgspec
from starlette.types import Scope

from paceline.server.openai.errors import ErrorAnswer

PATH = "/v1/messages"
REQUEST_ID = "paceline.request_id"  # where an ASGI scope holds the id of the request, as text

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's API, whether or not there is such a route."""
    path = scope["path"]
    return path == PATH or path.startswith(PATH + "/")


def error_body(error: ErrorAnswer, scope: Scope) -> bytes:
    """An error in the form of the API that `scope` asks."""
    if not is_anthropic(scope):
        return error.body
    fields = {"type": error_type(error.status), "message": error.clean_message}
    return msgspec.json.encode({"type": "error", "error": fields, "request_id": scope.get(REQUEST_ID)})


def error_type(status: int) -> str:
    """Anthropic's name for errors of an HTTP status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
