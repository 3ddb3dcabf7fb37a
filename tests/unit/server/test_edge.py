"""Request ids: one on every answer, the client's own if it is harmless."""

import pytest

from tests.unit.server.conftest import Site


async def test_every_answer_has_its_own_id(site: Site) -> None:
    ids = [(await site.get(path)).headers["x-request-id"] for path in ("/v1/models", "/nope", "/metrics", "/v1/models")]
    assert len(set(ids)) == 4


GIVEN = [("abc-1.2_3", True), ("a" * 64, True), ("a" * 65, False), ("a b", False), ("a\r\nx: y", False), ("", False)]


@pytest.mark.parametrize(("given", "is_kept"), GIVEN)
async def test_a_clients_id(site: Site, given: str, is_kept: bool) -> None:
    answer = await site.get("/v1/models", headers={"x-request-id": given})
    assert (answer.headers["x-request-id"] == given) == is_kept


async def test_streams_have_one_too(site: Site) -> None:
    answer = await site.post("/v1/completions", {"prompt": "x", "stream": True})
    assert answer.headers["x-request-id"]
