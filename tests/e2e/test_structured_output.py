"""Structured output over a real socket: what OpenAI's own client asks for, valid and the same with and without speculation."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.conftest import DEFAULT_MODEL, RunningServer

MESSAGES: list[Any] = [{"role": "user", "content": "Describe Bob Smith, who is 42, as JSON."}]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=150)
    nickname: str | None = Field(max_length=20)


@pytest.fixture(scope="module")
def client(real_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real_server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_client_parses_a_model_of_its_own(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=DEFAULT_MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=120, response_format=Person
    )
    person = answer.choices[0].message.parsed
    assert person is not None and person.age == 42
    assert answer.choices[0].finish_reason == "stop"


def test_speculation_changes_nothing_and_streams_nothing_more(client: openai.OpenAI) -> None:
    """Whole, streamed, and without drafts: one text, and no token billed behind the end of the grammar."""
    wanted: dict[str, Any] = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": Person.model_json_schema(), "strict": True},
    }
    for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 5}):
        given: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": MESSAGES, "max_tokens": 80, "response_format": wanted, **sampling}
        whole = client.chat.completions.create(**given)
        plain = client.chat.completions.create(**given, extra_body={"max_draft_length": 0})
        chunks = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
        text = whole.choices[0].message.content or ""
        jsonschema.validate(json.loads(text), Person.model_json_schema())
        assert plain.choices[0].message.content == text
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert {whole.choices[0].finish_reason, plain.choices[0].finish_reason} == {"stop"}
        assert whole.usage is not None and plain.usage is not None and chunks[-1].usage is not None
        assert whole.usage.completion_tokens == plain.usage.completion_tokens == chunks[-1].usage.completion_tokens
        report = (whole.model_extra or {})["metrics"]["speculative_decoding"]
        assert report["num_accepted_draft_tokens"] > 0, "what the schema forces is drafted"


def test_patterns_choices_and_grammars(client: openai.OpenAI) -> None:
    def complete(**extra: Any) -> str:
        answer = client.completions.create(model=DEFAULT_MODEL, prompt="The answer is", max_tokens=20, temperature=0, extra_body=extra)
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert complete(guided_choice=[" yes", " no"]) in (" yes", " no")
    assert complete(structured_outputs={"regex": r"[0-9]{2}/[0-9]{2}"})[2] == "/"
    assert complete(guided_grammar='start: "<" /[a-z]{1,3}/ ">"')[-1] == ">"


def test_a_bad_schema_is_refused_and_the_next_request_answered(client: openai.OpenAI) -> None:
    for schema in ({"type": "strin"}, {"$ref": "#"}, {"not": {}}):
        with pytest.raises(openai.BadRequestError, match="cannot be followed"):
            client.chat.completions.create(
                model=DEFAULT_MODEL,
                messages=MESSAGES,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
            )
        assert client.completions.create(model=DEFAULT_MODEL, prompt="x", max_tokens=1).choices
