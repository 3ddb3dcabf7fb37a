"""Options that this version lacks: refused by name when they would change the answer, accepted when they ask for nothing."""

from typing import Any

import pytest

from tests.unit.server.conftest import Site

MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

HARMLESS: dict[str, Any] = {
    "user": "ann", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True, "no_such_option": [1],
    "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "logprobs": False, "n": 1, "best_of": 1,
    "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "min_tokens": 0, "echo": False, "suffix": None,
    "top_logprobs": None, "prediction": {"type": "content", "content": "x"}, "priority": 3,
}  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_neutral_and_unknown_options_are_accepted(site: Site, path: str) -> None:
    answer = await site.post(path, {"prompt": "x", "messages": MESSAGES, **HARMLESS})
    assert answer.status == 200, answer.body


UNSUPPORTED: list[tuple[str, Any]] = [
    ("best_of", 4), ("echo", True), ("suffix", "x"),
    ("chat_template", "{{ 1 }}"), ("chat_template_kwargs", {"a": 1}), ("modalities", ["audio"]),
    ("skip_special_tokens", False), ("conversation_id", "c1"), ("prompt_embeds", "AAAA"), ("reasoning_effort", "high"),
    ("verbosity", "low"), ("guided_whitespace_pattern", " "),
]  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
async def test_options_that_are_lacking_are_refused_by_name(site: Site, path: str, name: str, value: Any) -> None:
    answer = await site.post(path, {"prompt": "x", "messages": MESSAGES, name: value})
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is not supported by this version")
    assert not site.engine.requests


@pytest.mark.parametrize(("name", "value"), [
    ("tools", [{"type": "function"}]), ("tools", [{}] * 1000), ("tool_choice", "required"),
    ("max_completion_tokens", 5), ("top_logprobs", 2),
])  # fmt: skip
async def test_completions_lack_some_of_chats_options(site: Site, name: str, value: Any) -> None:
    answer = await site.post(COMPLETIONS, {"prompt": "x", name: value})
    assert answer.status == 400
    assert answer.json()["error"]["message"].startswith(f"{name} is not supported by this version")
