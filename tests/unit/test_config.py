"""The defaults, their ranges, and the rules between settings."""

import math
from dataclasses import replace
from typing import get_args

import pytest

from paceline.config import AnswerConfig, EngineConfig, ServerConfig, check_engine, check_ranges, schema, settings, settle_server, values
from paceline.errors import BadInputError


def test_every_setting_has_a_help_text_and_a_valid_default() -> None:
    for kind in (ServerConfig, AnswerConfig):
        for item, _ in settings(kind):
            assert item.metadata["help"].endswith("."), item.name
        check_ranges(kind())
    check_engine(EngineConfig())
    assert settle_server(ServerConfig()) == ServerConfig()


def test_a_server_shows_the_engines_settings_too() -> None:
    names = [item.name for item, _ in settings(ServerConfig)]
    assert set(names) == set(values(ServerConfig()))
    assert {"model", "block_size", "host", "port"} <= set(names)
    assert "engine" not in names
    assert values(ServerConfig(EngineConfig(block_size=32), port=1))["block_size"] == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_draft_length": -1}, ["--max-draft-length", "-1", "between 0 and 64"]),
        ({"max_batch_size": 0}, ["--max-batch-size", "0", "between 1 and 4096"]),
        ({"batch_wait_ms": float("nan")}, ["--batch-wait-ms", "nan"]),
        ({"control_share": 0.6}, ["--control-share", "0.6", "between 0 and 0.5"]),
        ({"max_model_len": 1}, ["--max-model-len", "between 2 and"]),
        ({"seed": -1}, ["--seed"]),
        ({"seed": 2**64}, ["--seed"]),
        ({"kv_cache_memory_bytes": 10**20}, ["--kv-cache-memory-bytes"]),
        ({"max_num_batched_tokens": 10**20}, ["--max-num-batched-tokens"]),
        ({"device": "cuda"}, ["--device cuda", "auto, cpu"]),
        ({"dtype": "float16"}, ["--dtype float16", "bfloat16"]),
        ({"verification": "none"}, ["coupled, ratio"]),
        ({"min_batch_size": 9, "max_batch_size": 8}, ["--min-batch-size 9", "--max-batch-size 8"]),
        ({"max_num_batched_tokens": 255}, ["255", "256", "--max-batch-size 255"]),
    ],
)
def test_what_cannot_work_is_refused_with_numbers_and_remedy(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(BadInputError) as caught:
        check_engine(replace(EngineConfig(), **change))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf"), 1e300])
def test_what_is_no_number_of_seconds_is_refused(timeout: float) -> None:
    with pytest.raises(BadInputError, match="--shutdown-timeout"):
        settle_server(ServerConfig(shutdown_timeout=timeout))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"request_timeout": 0.0}, "--request-timeout is 0.0; it must be above 0 and at most 86400"),
        ({"request_timeout": float("nan")}, "--request-timeout"),
        ({"request_timeout": float("inf")}, "--request-timeout"),
        ({"max_concurrent_requests": 0}, "--max-concurrent-requests is 0; it must be between 1 and"),
        ({"max_concurrent_requests": 10**9}, "--max-concurrent-requests"),
    ],
)
def test_limits_of_requests_have_ranges(change: dict[str, float], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        settle_server(replace(ServerConfig(), **change))
    settle_server(ServerConfig(request_timeout=0.5, max_concurrent_requests=1))


def test_every_number_has_two_ends() -> None:
    for kind in (ServerConfig, AnswerConfig):
        for item, hint in settings(kind):
            if {int, float} & {hint, *get_args(hint)}:
                ends = (item.metadata["low"] if item.metadata["above"] is None else item.metadata["above"], item.metadata["high"])
                assert all(end is not None and math.isfinite(end) for end in ends), item.name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_p": 0.0}, "--top-p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": float("nan")}, "--top-p"),
        ({"top_k": 10**20}, "--top-k"),
        ({"top_k": -2}, "--top-k"),
        ({"temperature": float("inf")}, "--temperature"),
        ({"max_tokens": 10**20}, "--max-tokens"),
        ({"min_p": 1.1}, "--min-p"),
    ],
)
def test_answers_have_ranges(change: dict[str, float], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        check_ranges(replace(AnswerConfig(), **change))
    check_ranges(AnswerConfig(top_p=1e-9, top_k=-1, min_p=1, temperature=100))


def test_limits_are_inclusive() -> None:
    check_engine(EngineConfig(max_draft_length=0, seed=2**64 - 1, max_model_len=2))
    check_engine(EngineConfig(max_draft_length=64, max_num_batched_tokens=256))


def test_batch_size_sets_both_ends() -> None:
    engine = settle_server(ServerConfig(batch_size="8")).engine
    assert (engine.min_batch_size, engine.max_batch_size) == (8, 8)
    assert settle_server(ServerConfig(EngineConfig(max_batch_size=8), batch_size="8")).engine == engine


@pytest.mark.parametrize("batch_size", ["0", "-1", "many", "1.5", ""])
def test_a_bad_batch_size_is_refused(batch_size: str) -> None:
    with pytest.raises(BadInputError, match="--batch-size"):
        settle_server(ServerConfig(batch_size=batch_size))


def test_batch_size_against_its_parts_is_refused() -> None:
    with pytest.raises(BadInputError, match="--batch-size 8 contradicts --max-batch-size 16"):
        settle_server(ServerConfig(EngineConfig(max_batch_size=16), batch_size="8"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_this_machines_own_addresses_need_no_leave(host: str) -> None:
    assert settle_server(ServerConfig(host=host)).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "localhost.example.org", "127.0.0.1.example.org"])
def test_an_open_address_needs_insecure(host: str) -> None:
    with pytest.raises(BadInputError, match="--insecure"):
        settle_server(ServerConfig(host=host))
    assert settle_server(ServerConfig(host=host, insecure=True)).host == host


def test_the_schema_covers_every_setting() -> None:
    properties = schema()["properties"]
    assert isinstance(properties, dict)
    assert set(properties) == {item.name for item, _ in settings(ServerConfig)}
    assert properties["port"] == {
        "description": "Port to listen on; 0 picks a free one.",
        "default": 8000,
        "type": "integer",
        "minimum": 0,
        "maximum": 65535,
    }
    assert properties["device"]["enum"] == ["auto", "cpu"]
    assert properties["max_model_len"]["type"] == ["integer", "null"]
    assert properties["batch_wait_ms"]["type"] == "number"
    assert properties["insecure"]["type"] == "boolean"


def test_two_formats_of_the_weights_are_refused() -> None:
    check_engine(EngineConfig(quantization="int4"))
    check_engine(EngineConfig(quantization="none", dtype="float32"))
    check_engine(EngineConfig(dtype="float32"))
    with pytest.raises(BadInputError, match="--quantization int8 and --dtype bfloat16 contradict"):
        check_engine(EngineConfig(quantization="int8", dtype="bfloat16"))
