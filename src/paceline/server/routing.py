"""FastAPI describes the interface, Starlette serves what it needs: of a short request's time their layers would take a third, and our
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
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[..., Awaitable[Response]]
ErrorHandler = Callable[[Request, Exception], Awaitable[Response]]


def served(described: FastAPI) -> ASGIApp:
    """An application with the routes and the error handlers of `described`, whose endpoints take `request`, path parameters, or both.

    An error that only the handler of all errors would take is raised, for who stands around the application.
    """
    routes = [_plain(route) for route in described.routes]
    return _Served(routes, Starlette(routes=routes, exception_handlers=described.exception_handlers), described.exception_handlers)


class _Served:
    """Finds a path without parameters by a look-up and leaves all else to Starlette: other paths, methods, and what it redirects."""

    def __init__(self, routes: list[BaseRoute], others: ASGIApp, handlers: dict[Any, Any]) -> None:
        self._others = others
        self._handlers: dict[type[Exception], ErrorHandler] = {
            kind: handler for kind, handler in handlers.items() if isinstance(kind, type) and kind is not Exception
        }
        self._endpoints: dict[tuple[str, str], Endpoint] = {}
        for route in routes:
            if isinstance(route, Route) and not route.param_convertors:
                for method in route.methods or ():
                    self._endpoints.setdefault((method, route.path), route.endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await self._others(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except Exception as error:
            handler = next((self._handlers[kind] for kind in type(error).__mro__ if kind in self._handlers), None)
            if handler is None:
                raise
            response = await handler(request, error)
        await response(scope, receive, send)


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
