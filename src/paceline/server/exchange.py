"""What all routes do with HTTP: a body in, JSON out. Answers of generations are `stream.py`'s."""

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from paceline.errors import BadInputError
from paceline.server.origin import check_content_type

T = TypeVar("T")


async def read_request(request: Request, read: Callable[[bytes], T]) -> T:
    """A request's body by `read`. Raises BadInputError."""
    check_content_type(request.headers.get("content-type"))
    try:
        body = await request.body()
    except ClientDisconnect:
        raise BadInputError("the client left before its body was complete") from None
    return read(body)


def json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A whole answer; `body` is encoded JSON."""
    return Response(body, status, headers, media_type="application/json")
