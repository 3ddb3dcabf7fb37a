"""Wire forms: prepared bytes are valid JSON whatever the text, and the metrics object is what AIPerf's adapter accepts."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.outcome import DraftStats
from paceline.server.openai.answers import AnswerMetrics, Choice, Envelope, Usage, error_event
from paceline.server.openai.errors import ErrorAnswer, answer_for

USAGE = Usage(3, 4, 1)


def metrics(draft: DraftStats, k: int) -> AnswerMetrics:
    return AnswerMetrics(draft, k, "coupled", 0.41234, 12.1, 803.0)


def payload(chunk: bytes) -> Any:
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    assert chunk.count(b"\n\n") == 1
    return json.loads(chunk[len(b"data: ") :])


@given(text=st.text(), is_chat=st.booleans(), has_usage=st.booleans())
def test_any_text_survives_a_chunk(text: str, is_chat: bool, has_usage: bool) -> None:
    """Line ends, quotes, control characters: an event is one line."""
    envelope = Envelope("id", 'm"\n', 7, is_chat, has_usage)
    event = payload(envelope.chunk(1, {"content": text} if is_chat else text))
    choice = event["choices"][0]
    assert (choice["delta"]["content"] if is_chat else choice["text"]) == text
    assert (choice["index"], choice["finish_reason"], event["model"]) == (1, None, 'm"\n')
    assert ("usage" in event) == has_usage


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_last_chunk(is_chat: bool) -> None:
    envelope = Envelope("id", "m", 7, is_chat)
    choice = payload(envelope.chunk(0, {} if is_chat else "", "length", USAGE))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert (choice["delta"] == {}) if is_chat else (choice["text"] == "")
    last = envelope.chunk(0, {"content": "x"} if is_chat else "x", "stop", USAGE)
    assert payload(last)["usage"]["total_tokens"] == 7


def test_the_whole_body() -> None:
    body = json.loads(
        Envelope("id", "m", 7, True).body([Choice({"role": "assistant", "content": "x"}, "stop")], USAGE, metrics(DraftStats(), 2))
    )
    assert body["choices"] == [{"index": 0, "message": {"role": "assistant", "content": "x"}, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1}}


def test_the_usage_chunk() -> None:
    event = payload(Envelope("id", "m", 7, True, True).usage_chunk(USAGE, metrics(DraftStats(), 2)))
    assert event["choices"] == []
    assert event["metrics"]["queue_ms"] == 0.412


def test_arithmetic_of_the_interfaces_example() -> None:
    draft = DraftStats(
        num_spec_steps=41,
        num_plain_steps=4,
        num_control_steps=2,
        num_draft_tokens=123,
        num_accepted_tokens=70,
        accepted_histogram=[10, 8, 7, 16],
        histograms_by_draft_length={3: [10, 8, 7, 16]},
    )
    fields: Any = metrics(draft, 3).fields()
    spec = fields["speculative_decoding"]
    assert spec == {
        "mean_acceptance_length": 1 + 70 / 41,
        "draft_acceptance_rate": 70 / 123,
        "acceptance_histogram": [10, 8, 7, 16],
        "acceptance_histogram_by_draft_length": {"3": [10, 8, 7, 16]},
        "num_spec_steps": 41,
        "num_accepted_draft_tokens": 70,
        "num_draft_tokens": 123,
        "num_spec_tokens": 3,
    }
    assert (fields["num_plain_steps"], fields["num_control_steps"]) == (4, 2)


@given(k=st.integers(0, 8), data=st.data())
def test_the_object_is_what_aiperf_accepts(k: int, data: st.DataObject) -> None:
    """Histogram of K + 1 whole numbers that sums to the steps and weighs the accepted; finite floats; nothing accepted beyond drafted."""
    histogram = data.draw(st.lists(st.integers(0, 50), min_size=0, max_size=k + 1))
    accepted = sum(n * count for n, count in enumerate(histogram))
    draft = DraftStats(sum(histogram), 3, accepted + 5 * bool(sum(histogram)), accepted, list(histogram))
    spec: Any = json.loads(json.dumps(metrics(draft, k).fields()))["speculative_decoding"]
    assert len(spec["acceptance_histogram"]) == spec["num_spec_tokens"] + 1
    assert all(type(count) is int for count in spec["acceptance_histogram"])
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
    assert sum(n * count for n, count in enumerate(spec["acceptance_histogram"])) == spec["num_accepted_draft_tokens"]
    assert spec["num_accepted_draft_tokens"] <= max(spec["num_draft_tokens"], 0)
    assert 1 <= spec["mean_acceptance_length"] <= k + 1
    assert 0 <= spec["draft_acceptance_rate"] <= 1


def test_an_error_event_is_one_event() -> None:
    error = ErrorAnswer(500, answer_for(ValueError()).kind, "two\nlines\n\nand more", "server_error")
    assert payload(error_event(error.body))["error"]["message"] == "two\nlines\n\nand more"


def test_messages_are_bounded_and_valid_unicode() -> None:
    body = json.loads(ErrorAnswer(400, answer_for(ValueError()).kind, "x\ud800" * 5000, "t").body)
    assert len(body["error"]["message"]) == 1000
