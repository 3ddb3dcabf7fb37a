"""FastAPI describes the interface, Starlette serves it: of a short request's time FastAPI's own layers would take a quarter, and our
routes read their bodies themselves. Called once, by `app.py`.
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

Endpoint = Callable[..., Awaitable[Response]]


def served(described: FastAPI) -> Starlette:
    """An application with the routes and the error handlers of `described`, whose endpoints take `request`, path parameters, or both."""
    return Starlette(routes=[_plain(route) for route in described.routes], exception_handlers=described.exception_handlers)


def _plain(route: BaseRoute) -> BaseRoute:
    if not isinstance(route, Route):
        return route
    plain = Route(route.path, _of_request(route.endpoint), name=route.name, include_in_schema=route.include_in_schema)
    plain.methods = route.methods
    return plain


def _of_request(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    names = tuple(inspect.signature(endpoint).parameters)
    if len(names) == 1 and names[0] in ("request", "req"):  # the latter is FastAPI's, of /openapi.json
        return endpoint

    async def answer(request: Request) -> Response:
        arguments: dict[str, Any] = {name: request if name == "request" else request.path_params[name] for name in names}
        return await endpoint(**arguments)

    return answer
