"""LangChain's ChatOpenAI against the real model: answers, streams, batches, tools, structured output and errors."""

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from tests.e2e.conftest import DEFAULT_MODEL, RunningServer

QUESTION = "What is the capital of France? Answer in one sentence."


def chat_model(url: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=SecretStr("none"),
        model=model,
        temperature=0,
        max_completion_tokens=40,
        max_retries=0,
        stream_usage=True,
    )


@pytest.fixture(scope="module")
def model(real_server: RunningServer) -> ChatOpenAI:
    return chat_model(real_server.url, DEFAULT_MODEL)


@pytest.fixture(scope="module")
def model_with_tools(tools_server: RunningServer) -> ChatOpenAI:
    return chat_model(tools_server.url, "tools")


def test_invoke_and_stream_say_the_same(model: ChatOpenAI) -> None:
    answer = model.invoke(QUESTION)
    assert "Paris" in answer.text
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 3
    chunks = list(model.stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert sum(chunk.text != "" for chunk in chunks) > 2
    (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata is not None]
    assert usage["output_tokens"] == answer.usage_metadata["output_tokens"]


def test_a_batch_of_conversations(model: ChatOpenAI) -> None:
    names = ("Anna", "Boris")
    conversations: list[list[BaseMessage]] = [
        [
            SystemMessage("You are brief."),
            HumanMessage(f"My name is {name}."),
            AIMessage(f"Hello, {name}!"),
            HumanMessage("What is my name?"),
        ]
        for name in names
    ]
    for name, answer in zip(names, model.batch(conversations), strict=True):
        assert name in answer.text


def test_a_request_that_does_not_fit_is_known_as_such(model: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        model.invoke(QUESTION, max_completion_tokens=1_000_000)
    assert error.value.code == "context_length_exceeded"


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


def test_a_tool_is_called_and_its_result_is_read(model_with_tools: ChatOpenAI) -> None:
    offered = model_with_tools.bind_tools([get_weather], tool_choice="auto")
    seen = AIMessage("", tool_calls=[{"name": "get_weather", "args": {"city": "Berlin"}, "id": "call_0"}])
    conversation: list[BaseMessage] = [
        SystemMessage("Call get_weather for every city."),
        HumanMessage("What is the weather in Berlin?"),
        seen,
        HumanMessage("What is the weather in Paris?"),
    ]
    answer = offered.invoke(conversation)
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    assert answer.response_metadata["finish_reason"] == "tool_calls"

    streamed = AIMessageChunk("")
    for chunk in offered.stream(conversation):
        assert isinstance(chunk, AIMessageChunk)
        streamed += chunk
    assert [(made["name"], made["args"]) for made in streamed.tool_calls] == [(call["name"], call["args"])]

    result = get_weather.invoke(call)
    told = offered.invoke([*conversation, answer, result])
    assert "18 degrees" in told.text


class City(BaseModel):
    """A city and its country."""

    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


def test_structured_output(model: ChatOpenAI, model_with_tools: ChatOpenAI) -> None:
    """By schema, LangChain's default; by a function that must be called; and any object."""
    question = "Which city is the capital of France?"
    by_schema = model.with_structured_output(City, include_raw=True).invoke(question)
    assert isinstance(by_schema, dict) and by_schema["parsing_error"] is None
    assert City.model_validate_json(by_schema["raw"].text) == by_schema["parsed"]
    by_call = model_with_tools.with_structured_output(City, method="function_calling").invoke(question)
    assert isinstance(by_call, City)
    any_object = model.with_structured_output(None, method="json_mode").invoke('Repeat this JSON object: {"name": "Paris"}')
    assert isinstance(any_object, dict)


def test_a_call_of_some_tool_is_forced(model_with_tools: ChatOpenAI) -> None:
    answer = model_with_tools.bind_tools([get_weather], tool_choice="any").invoke("What is the weather in Paris?")
    assert isinstance(answer, AIMessage)
    assert [call["name"] for call in answer.tool_calls] == ["get_weather"]
