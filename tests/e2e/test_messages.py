"""Anthropic's client against the default model: whole and streamed messages, prefill, stop sequences, counts and errors."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageParam, TextBlock

from tests.e2e.conftest import DEFAULT_MODEL, RunningServer

QUESTION: list[MessageParam] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
GREEDY = {"temperature": 0}  # the client's own argument is gone; the API still has the field
SYSTEM = "You answer in one short sentence."


@pytest.fixture(scope="module")
def client(real_server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=real_server.url, api_key="none", max_retries=0) as client:
        yield client


def text_of(message: Message) -> str:
    (block,) = message.content
    assert isinstance(block, TextBlock)
    return block.text


def speculation(message: Message) -> dict[str, Any]:
    return (message.model_extra or {})["metrics"]["speculative_decoding"]


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model=DEFAULT_MODEL, max_tokens=32, messages=QUESTION, system=SYSTEM, extra_body=GREEDY)
    assert "Paris" in text_of(message)
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == ("assistant", DEFAULT_MODEL, "end_turn", None)
    assert message.usage.output_tokens > 3
    report = speculation(message)
    assert sum(report["acceptance_histogram"]) == report["num_spec_steps"]
    assert message._request_id


def test_a_stream_says_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model=DEFAULT_MODEL, max_tokens=32, messages=QUESTION, extra_body=GREEDY)
    with client.messages.stream(model=DEFAULT_MODEL, max_tokens=32, messages=QUESTION, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == text_of(final) == text_of(whole)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_stop_sequence(client: anthropic.Anthropic) -> None:
    text = text_of(client.messages.create(model=DEFAULT_MODEL, max_tokens=32, messages=QUESTION, extra_body=GREEDY))
    message = client.messages.create(
        model=DEFAULT_MODEL, max_tokens=32, messages=QUESTION, extra_body=GREEDY, stop_sequences=["no such text", " Paris"]
    )
    assert text_of(message) == text[: text.index(" Paris")]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " Paris")


def test_a_prefilled_answer_goes_on_to_the_same_end(client: anthropic.Anthropic) -> None:
    text = text_of(client.messages.create(model=DEFAULT_MODEL, max_tokens=32, messages=QUESTION, extra_body=GREEDY))
    beginning = text[: text.index(" Paris")]
    message = client.messages.create(
        model=DEFAULT_MODEL, max_tokens=32, messages=[*QUESTION, {"role": "assistant", "content": beginning}], extra_body=GREEDY
    )
    assert beginning + text_of(message) == text


def test_same_tokens_with_and_without_speculation(client: anthropic.Anthropic) -> None:
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    ask: list[MessageParam] = [{"role": "user", "content": "Repeat this list three times: red, green, blue, white, black."}]
    drafted, plain = [
        client.messages.create(model=DEFAULT_MODEL, max_tokens=48, messages=ask, extra_body={**options, **extra})
        for extra in ({}, {"max_draft_length": 0})
    ]
    assert drafted.content == plain.content
    assert speculation(drafted)["num_accepted_draft_tokens"] > 0
    assert speculation(plain)["num_draft_tokens"] == 0


def test_an_answer_with_a_schema(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 12}, "population": {"type": "integer", "maximum": 99}},
        "required": ["capital", "population"],
        "additionalProperties": False,
    }
    message = client.messages.create(
        model=DEFAULT_MODEL,
        max_tokens=64,
        messages=QUESTION,
        output_config={"format": {"type": "json_schema", "schema": schema}},
        extra_body=GREEDY,
    )
    assert json.loads(text_of(message)).keys() == {"capital", "population"}
    assert message.stop_reason == "end_turn"


def test_count_tokens_and_the_cache(client: anthropic.Anthropic) -> None:
    messages: list[MessageParam] = [{"role": "user", "content": "A long beginning that is sent twice. " * 12}]
    counted = client.messages.count_tokens(model=DEFAULT_MODEL, messages=messages, system=SYSTEM)
    usages = [
        client.messages.create(model=DEFAULT_MODEL, max_tokens=2, messages=messages, system=SYSTEM, extra_body=GREEDY).usage
        for _ in range(2)
    ]
    for usage in usages:
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert (usages[1].cache_read_input_tokens or 0) >= 48


def test_more_tokens_than_there_is_room_for(client: anthropic.Anthropic) -> None:
    """Clients ask for the most that any model can give."""
    message = client.messages.create(model=DEFAULT_MODEL, max_tokens=32_000, messages=QUESTION, extra_body=GREEDY, timeout=120)
    assert message.stop_reason == "end_turn"


def test_errors_are_the_clients(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=5, messages=QUESTION)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="has none of the known formats") as bad:
        client.messages.create(
            model=DEFAULT_MODEL, max_tokens=5, messages=QUESTION, tools=[{"name": "fox", "input_schema": {"type": "object"}}]
        )
    assert bad.value.type == "invalid_request_error"
    assert bad.value.request_id
