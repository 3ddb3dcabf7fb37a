"""Anthropic's own client over a socket: it puts streams with thoughts and calls together, and raises its own errors."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam
from tokenizers import Tokenizer

from paceline.config import EngineConfig, ServerConfig
from tests.fakes.fake_engine import FACTS, FakeEngine, Faults
from tests.fakes.served import Served

OUTPUT = '<think>\nlet me see\n</think>\n\nI jump.\n<tool_call>\n{"name": "fox", "arguments": {"over": "dog"}}\n</tool_call>'
TOOLS: list[ToolParam] = [{"name": "fox", "input_schema": {"type": "object"}}]
HI: list[MessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def served(thinking_folder: Path, tokenizer: Tokenizer) -> Iterator[Served]:
    ids = tokenizer.encode(OUTPUT).ids
    facts = replace(FACTS, max_model_len=4096)
    config = ServerConfig(EngineConfig(seed=7), port=0)
    with Served(lambda: FakeEngine(facts, answer=lambda _: [*ids, 2], chunk=3), thinking_folder, config) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=10) as client:
        yield client


def test_a_turn_with_a_call_and_the_next_one(client: anthropic.Anthropic, served: Served, tokenizer: Tokenizer) -> None:
    """What the client got goes back as it is."""
    with client.messages.stream(model="fake", max_tokens=500, messages=HI, tools=TOOLS) as stream:
        streamed = stream.get_final_message()
    whole = client.messages.create(model="fake", max_tokens=500, messages=HI, tools=TOOLS)
    assert streamed.usage == whole.usage
    for message in (streamed, whole):
        thinking, text, call = message.content
        assert thinking.type == "thinking" and thinking.thinking == "let me see"
        assert text.type == "text" and text.text == "I jump."
        assert call.type == "tool_use" and (call.name, call.input) == ("fox", {"over": "dog"})
        assert message.stop_reason == "tool_use"
        result: MessageParam = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "42"}]}
        client.messages.create(model="fake", max_tokens=500, messages=[*HI, message.to_param(), result], tools=TOOLS)
    prompts = [tokenizer.decode(list(request.prompt_token_ids)) for request in served.engine.requests[-2:]]
    assert prompts[0] == prompts[1]
    assert "<tool_response>\n42\n</tool_response>" in prompts[0]


def test_errors(client: anthropic.Anthropic, served: Served) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(model="fake", max_tokens=5, messages=[{"role": "user", "content": [{"type": "image"}]}])  # type: ignore[typeddict-item, list-item]
    assert bad.value.type == "invalid_request_error"
    served.engine.faults = Faults(fail_after=3)
    with pytest.raises(anthropic.APIStatusError) as broken, client.messages.stream(model="fake", max_tokens=50, messages=HI) as stream:
        list(stream)
    assert broken.value.type == "api_error"
    served.engine.kill()
    with pytest.raises(anthropic.APIStatusError) as gone:
        client.messages.create(model="fake", max_tokens=5, messages=HI)
    assert (gone.value.status_code, gone.value.type) == (503, "overloaded_error")
