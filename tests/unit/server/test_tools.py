"""Tools through the routes: offered in the prompt, called in the answer, whole and streamed alike."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.fakes.fake_engine import FACTS, FakeEngine
from tests.unit.server.conftest import Site

CHAT = "/v1/chat/completions"
QWEN = Path(__file__).parents[2] / "data" / "templates" / "qwen2.5-coder.jinja"
TOOLS = [{"type": "function", "function": {"name": "fox", "description": "jumps", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "user", "content": "the lazy dog"}]
CALL = '<tool_call>\n{"name": "fox", "arguments": {"over": "dog"}}\n</tool_call>'


@pytest.fixture
def tool_site(make_site: Callable[..., Site], folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> Callable[[str], Site]:
    """A server whose model writes Qwen's format of calls, and answers with a given text."""
    model = tmp_path / "qwen"
    shutil.copytree(folder, model)
    (model / "chat_template.jinja").write_text(QWEN.read_text())

    def make(answer: str) -> Site:
        ids = tokenizer.encode(answer, add_special_tokens=False).ids
        facts = replace(FACTS, max_model_len=4096)  # Qwen's template has much to say of tools
        return make_site(FakeEngine(facts, answer=lambda request: (*ids, 2), chunk=3), model_folder=model)

    return make


async def ask(site: Site, stream: bool, **given: Any) -> tuple[dict[str, Any], str]:
    """The message and why it ended, put together if it came in pieces."""
    answer = await site.post(CHAT, {"messages": MESSAGES, "stream": stream, "max_tokens": 500, **given})
    assert answer.status == 200, answer.body
    if not stream:
        choice = answer.json()["choices"][0]
        return choice["message"], choice["finish_reason"]
    message: dict[str, Any] = {"content": ""}
    reason = ""
    for event in answer.events()[:-1]:
        choice = event["choices"][0]
        message["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({**call, "function": {**call["function"]}})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return message, reason


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_comes_back_as_one(tool_site: Callable[[str], Site], tokenizer: Tokenizer, stream: bool) -> None:
    site = tool_site(CALL)
    message, reason = await ask(site, stream, tools=TOOLS)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "fox"
    assert json.loads(call["function"]["arguments"]) == {"over": "dog"}
    assert (call["type"], reason) == ("function", "tool_calls")
    assert not message["content"]
    prompt = tokenizer.decode(list(site.engine.requests[0].prompt_token_ids), skip_special_tokens=False)
    assert '"name": "fox"' in prompt, "the model is told of the tool"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_it_is_text(tool_site: Callable[[str], Site], stream: bool, given: dict[str, Any]) -> None:
    message, reason = await ask(tool_site(CALL), stream, **given)
    assert (message["content"], reason) == (CALL, "stop")
    assert "tool_calls" not in message


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_at_most(tool_site: Callable[[str], Site], stream: bool) -> None:
    site = tool_site(f"I jump.\n{CALL}\n{CALL}")
    message, reason = await ask(site, stream, tools=TOOLS, parallel_tool_calls=False)
    assert (message["content"], len(message["tool_calls"]), reason) == ("I jump.", 1, "tool_calls")
    message, _ = await ask(site, stream, tools=TOOLS, parallel_tool_calls=True)
    assert len(message["tool_calls"]) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_plain_text_stays_plain_beside_tools(tool_site: Callable[[str], Site], stream: bool) -> None:
    message, reason = await ask(tool_site("the quick brown fox"), stream, tools=TOOLS)
    assert (message["content"], reason) == ("the quick brown fox", "stop")


async def test_results_go_back_to_the_model(tool_site: Callable[[str], Site], tokenizer: Tokenizer) -> None:
    site = tool_site("over")
    call = {"id": "call_1", "type": "function", "function": {"name": "fox", "arguments": '{"over": "dog"}'}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    await ask(site, False, tools=TOOLS, messages=turns)
    prompt = tokenizer.decode(list(site.engine.requests[0].prompt_token_ids), skip_special_tokens=False)
    assert "<tool_response>\n42\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "dog"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS * 2}, "tools.1.function.name"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ],
)
async def test_offers_that_cannot_be_made(tool_site: Callable[[str], Site], given: dict[str, Any], param: str) -> None:
    answer = await tool_site("x").post(CHAT, {"messages": MESSAGES, **given})
    assert answer.status == 400
    assert answer.json()["error"]["param"] == param


async def test_a_model_without_a_format_of_calls_says_so(site: Site) -> None:
    answer = await site.post(CHAT, {"messages": MESSAGES, "tools": TOOLS})
    assert answer.status == 400
    assert "hermes, llama_json" in answer.json()["error"]["message"]
    assert (await site.post(CHAT, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"})).status == 200
