"""Odd requests against the real engine behind a real server: none ends it, and the next good request is answered at once."""

from pathlib import Path

import pytest

from tests.e2e.conftest import serve
from tests.fakes.api_tour import tour

pytestmark = pytest.mark.system

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/infer")


def test_no_request_breaks_the_engine(tiny_folder: Path) -> None:
    """The same tour as the unit tests' with the fake engine, in random requests only: sampling, drafts and their options are real here."""
    with serve([str(tiny_folder), "--served-model-name", "tiny", "--max-model-len", "64"]) as server:
        result = tour(server.url, max_examples=20, phases=("fuzzing",), paths=GENERATING)
        assert not result.failures, "\n\n".join(result.failures[:5])
        assert result.statuses["POST /v1/completions"][200] > 2
        assert result.statuses["POST /v1/chat/completions"][200] > 2
        assert server.get("/health")[0] == 200
