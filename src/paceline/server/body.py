"""Reads the body of a request. Called by every route that takes one."""

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from paceline.errors import BadInputError
from paceline.server.origin import check_content_type

T = TypeVar("T")


async def read_request(request: Request, read: Callable[[bytes], T]) -> T:
    """A request's body by `read`. Raises BadInputError for one that is no JSON, incomplete, or what `read` refuses."""
    check_content_type(request.headers.get("content-type"))
    try:
        body = await request.body()
    except ClientDisconnect:
        raise BadInputError("the client left before its body was complete") from None
    return read(body)
