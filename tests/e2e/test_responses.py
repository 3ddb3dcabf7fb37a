"""`/v1/responses` with OpenAI's client and the default model: what agent frameworks call, over a real socket."""

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import DEFAULT_MODEL, RunningServer

QUESTION = "What is the capital of France? Answer in one sentence."
LONG = "Tell me a very long story about a sailor."
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


@pytest.fixture(scope="module")
def client(real_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real_server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_response_is_chats_answer(client: openai.OpenAI) -> None:
    response = client.responses.create(model=DEFAULT_MODEL, input=QUESTION, temperature=0, max_output_tokens=32)
    chat = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=32
    )
    assert response.output_text == chat.choices[0].message.content
    assert "Paris" in response.output_text
    assert (response.status, response.output[0].type) == ("completed", "message")
    assert response.usage is not None and chat.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    report = (response.model_extra or {})["metrics"]["speculative_decoding"]
    assert sum(report["acceptance_histogram"]) == report["num_spec_steps"]
    assert client.responses.retrieve(response.id) == response


def test_a_stream_ends_in_the_same_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=DEFAULT_MODEL, input=QUESTION, temperature=0, max_output_tokens=32)
    with client.responses.stream(model=DEFAULT_MODEL, input=QUESTION, temperature=0, max_output_tokens=32) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert final.output_text == whole.output_text
    assert (events[0].type, events[-1].type, final.status) == ("response.created", "response.completed", "completed")


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": DEFAULT_MODEL, "temperature": 0, "max_output_tokens": 8}
    first = client.responses.create(input="My name is Ada.", instructions="Be brief.", **options)
    second = client.responses.create(input="What is my name?", previous_response_id=first.id, **options)
    turns = [("user", "My name is Ada."), ("assistant", first.output_text), ("user", "What is my name?")]
    spelt_out = client.responses.create(input=[{"role": role, "content": text} for role, text in turns], store=False, **options)
    assert second.output_text == spelt_out.output_text
    listed = client.responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in listed] == ["My name is Ada.", first.output_text, "What is my name?"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(spelt_out.id)
    with pytest.raises(openai.NotFoundError):
        client.with_options(api_key="another").responses.retrieve(second.id)


def test_a_background_response_comes_later(client: openai.OpenAI) -> None:
    response = client.responses.create(model=DEFAULT_MODEL, input=QUESTION, temperature=0, max_output_tokens=32, background=True)
    deadline_s = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
        response = client.responses.retrieve(response.id)
    assert response.status == "completed"
    assert "Paris" in response.output_text
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(response.id)


def test_a_cancelled_response_frees_the_engine(client: openai.OpenAI, real_server: RunningServer) -> None:
    response = client.responses.create(
        model=DEFAULT_MODEL, input=LONG, background=True, max_output_tokens=4000, extra_body={"ignore_eos": True, "min_tokens": 4000}
    )
    deadline_s = time.monotonic() + 60
    while client.responses.retrieve(response.id).status != "in_progress":
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert cancelled.usage is not None and 0 < cancelled.usage.output_tokens < 4000
    assert client.responses.retrieve(response.id) == cancelled
    while real_server.metric("vllm:num_requests_running"):
        assert time.monotonic() < deadline_s, "the engine works on it still"
        time.sleep(0.1)


def test_a_length_cap_and_logprobs(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=DEFAULT_MODEL, input=LONG, temperature=0, max_output_tokens=16, include=["message.output_text.logprobs"], top_logprobs=2
    )
    assert response.status == "incomplete"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    (content,) = response.output[0].content  # type: ignore[union-attr]
    assert len(content.logprobs) == 16
    assert "".join(entry.token for entry in content.logprobs) == response.output_text
    assert all(entry.token == entry.top_logprobs[0].token for entry in content.logprobs), "at temperature 0 the likeliest is taken"


def test_the_form_of_the_text(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"sea": {"enum": ["calm", "rough"]}}, "required": ["sea"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "weather", "schema": schema, "strict": True}}
    response = client.responses.create(model=DEFAULT_MODEL, input=LONG, temperature=0, max_output_tokens=32, text=text)
    assert json.loads(response.output_text)["sea"] in ("calm", "rough")
    assert response.text is not None and response.text.format is not None and response.text.format.type == "json_schema"


def test_tools_of_a_model_that_calls_none_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=DEFAULT_MODEL, input="Weather in Paris?", tools=[TOOL])
    assert caught.value.param == "tools"
    assert client.responses.create(model=DEFAULT_MODEL, input="hi", tools=[TOOL], tool_choice="none", max_output_tokens=16).tools
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=DEFAULT_MODEL, input="hi", tools=[{"type": "web_search"}])
    assert caught.value.param == "tools.0.type"
