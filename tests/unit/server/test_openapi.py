"""The description of the interface holds for every route: schemathesis sends what follows from it, and the server stands up to it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig, ServerConfig
from paceline.core.request import Request
from paceline.server.draft import DraftServer
from tests.fakes.api_tour import tour
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.served import Served
from tests.unit.server.conftest import Site

CONFIG = ServerConfig(engine=EngineConfig(seed=7))


def test_no_request_breaks_the_server_or_its_description(folder: Path) -> None:
    """No 5xx, only documented statuses, types and bodies, bad requests refused, and the next good request answered within a second."""
    with Served(lambda: FakeEngine(chunk=2), folder, CONFIG) as served:
        result = tour(served.url, max_examples=5)
    assert not result.failures, "\n\n".join(result.failures[:5])
    untried = [route for route in result.never_answered if "{response_id}" not in route]  # nobody guesses the id of a stored response
    assert not untried, "these routes refused everything, so nothing was tested behind their checks"
    assert result.num_requests > 1000


def test_no_request_breaks_a_draft_server(folder: Path) -> None:
    with Served(FakeEngine, folder, CONFIG, DraftServer) as served:
        result = tour(served.url, max_examples=5, paths=["/draft", "/detokenize"])
    assert not result.failures, "\n\n".join(result.failures[:5])
    assert not result.never_answered


def test_the_tour_notices_a_broken_engine(folder: Path) -> None:
    def fail(request: Request) -> Sequence[int]:
        if request.request_id.startswith("health"):
            return (2,)
        raise RuntimeError("no answer")

    with Served(lambda: FakeEngine(answer=fail), folder, CONFIG) as served:
        result = tour(served.url, max_examples=1, phases=("fuzzing",), paths=["/v1/completions"])
    found = {failure.split(": ")[1] for failure in result.failures}
    assert {"not_a_server_error", "next_request_succeeds"} <= found
    assert result.never_answered == ["POST /v1/completions"]


async def test_every_answer_is_described(site: Site) -> None:
    document = (await site.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert {reference.rpartition("/")[2] for reference in references(document)} <= set(schemas)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["responses"]["200"]["content"], path
            assert {"400", "403", "404", "500", "503"} <= set(operation["responses"]), path
            assert ("413" in operation["responses"]) == (method == "post"), path
    assert set(document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert set(document["paths"]["/tokenize"]["post"]["responses"]["200"]["content"]) == {"application/json"}


async def test_a_limited_server_keeps_to_the_description(make_site: Callable[..., Site]) -> None:
    """The statuses that need limits to occur are described where they can."""
    site = make_site(config=ServerConfig(engine=EngineConfig(seed=7), max_concurrent_requests=1, request_timeout=0.001))
    site.engine.faults.step_s = 1.0
    responses = (await site.get("/openapi.json")).json()["paths"]["/v1/completions"]["post"]["responses"]
    answer = await site.post("/v1/completions", {"prompt": "the fox"})
    assert answer.status == 504
    assert {"408", "503", "504"} <= set(responses)
    for status in ("408", "503", "504"):
        assert responses[status]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for child in node.values():
            yield from references(child)
    elif isinstance(node, list):
        for child in node:
            yield from references(child)
