"""`paceline draft-server` on the real model: it drafts what the model would say, and a growing context costs its new tokens only."""

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import DEFAULT_MODEL, RunningServer, serve

TEXT = "The quick brown fox jumps over the lazy dog. " * 8 + "Once upon a time, in a small village by the sea,"
PAGE_SIZE = 16


@pytest.fixture(scope="module")
def draft_server() -> Iterator[RunningServer]:
    with serve([DEFAULT_MODEL, "--dtype", "float32", "--kv-cache-memory-bytes", str(128 << 20)], verb="draft-server") as server:
        yield server


def token_ids_of(answer: dict[str, object], name: str = "token_ids") -> list[int]:
    ids = answer[name]
    assert isinstance(ids, list)
    return ids


def test_drafts_are_the_models_own_words(draft_server: RunningServer, real_server: RunningServer) -> None:
    """In one draft or in several, each on top of the last; the second form is how a draft server is used."""
    context = token_ids_of(draft_server.post("/tokenize", {"prompt": TEXT}), "tokens")
    spoken = real_server.post("/v1/completions", {"prompt": context, "max_tokens": 20, "temperature": 0})
    whole = draft_server.post("/draft", {"token_ids": context, "max_draft_length": 20, "return_probs": True})
    drafted = token_ids_of(whole)
    assert draft_server.post("/detokenize", {"tokens": drafted})["prompt"] == spoken["choices"][0]["text"]  # type: ignore[index]
    probs = whole["probs"]
    assert isinstance(probs, list)
    assert len(probs) == len(drafted) == 20
    assert all(0 < prob <= 1 for prob in probs)

    num_hits = draft_server.metric("vllm:prefix_cache_hits_total")
    num_asked = 0
    pieces: list[int] = []
    for _ in range(4):
        num_asked += len(context) + len(pieces)
        pieces += token_ids_of(draft_server.post("/draft", {"token_ids": context + pieces, "max_draft_length": 5}))
    assert pieces == drafted
    num_computed = num_asked - (draft_server.metric("vllm:prefix_cache_hits_total") - num_hits)
    assert num_computed <= 4 * (PAGE_SIZE + 5), "each time at most the last page and what is new"


def test_a_sampled_draft_follows_its_seed(draft_server: RunningServer) -> None:
    body: dict[str, object] = {"token_ids": [100, 200, 300], "max_draft_length": 8, "temperature": 1.0}
    first, again, other = (draft_server.post("/draft", body | {"seed": seed}) for seed in (1, 1, 2))
    assert first == again != other
