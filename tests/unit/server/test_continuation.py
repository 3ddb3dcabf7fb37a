"""Answers that go on with the assistant's last message: the prompt ends exactly where its text does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from paceline.errors import BadInputError
from paceline.server.continuation import mark_end, up_to_mark
from paceline.server.template import ChatTemplate
from tests.unit.server.conftest import Site

CHAT = "/v1/chat/completions"
TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
THINKING = (
    "{% for message in messages %}[{{ message.role }}]{% if message.role == 'assistant' %}"
    "<think>{{ message.reasoning_content | default('') }}</think>{{ message.content.split('</think>')[-1].lstrip() }}"
    "{% else %}{{ message.content }}{% endif %}[end]{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)
USER = {"role": "user", "content": "hi"}


def said(content: str) -> dict[str, object]:
    return {"role": "assistant", "content": content}


async def rendered(source: str, messages: list[dict[str, object]]) -> str:
    marked, mark = mark_end(messages)
    return up_to_mark(await ChatTemplate(source, {}).render(marked), mark)


@pytest.mark.parametrize("text", ["", "The best", " two spaces  ", "\n", "<|im_end|>", ">", "im_end|>\n", "]"])
@pytest.mark.parametrize("name", ["smollm2.jinja", "qwen2.5-coder.jinja"])
async def test_the_prompt_ends_with_the_last_messages_text(name: str, text: str) -> None:
    """As the template would begin the answer itself, and then the text: even where the text looks like what follows it."""
    template = ChatTemplate((TEMPLATES / name).read_text(), {})
    assert await rendered(template.source, [USER, said(text)]) == await template.render([USER]) + text


async def test_a_template_that_thinks_first_writes_the_thoughts_of_the_message() -> None:
    last = {**said("The best"), "reasoning_content": "Let me see."}
    assert await rendered(THINKING, [USER, last]) == "[user]hi[end][assistant]<think>Let me see.</think>The best"


@pytest.mark.parametrize("source", ["{% for m in messages %}{{ m.role }}{% endfor %}", "{{ messages[-1].content * 2 }}"])
async def test_a_template_that_changes_the_text_is_told(source: str) -> None:
    with pytest.raises(BadInputError, match="does not write the assistant's last message"):
        await rendered(source, [USER, said("x")])


async def test_a_chat_goes_on_with_the_last_message(site: Site, tokenizer: Tokenizer) -> None:
    messages = [USER, {"role": "assistant", "content": "the quick"}]
    answer = await site.post(CHAT, {"messages": messages, "continue_final_message": True})
    assert answer.status == 200
    prompt = tokenizer.decode(list(site.engine.requests[0].prompt_token_ids), skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nthe quick"
    counted = await site.post("/tokenize", {"messages": messages, "continue_final_message": True})
    assert tuple(counted.json()["tokens"]) == site.engine.requests[0].prompt_token_ids


CALL = {"id": "c", "type": "function", "function": {"name": "fox", "arguments": "{}"}}


@pytest.mark.parametrize("last", [USER, {"role": "system", "content": "x"}, {"role": "assistant", "content": "x", "tool_calls": [CALL]}])
async def test_other_messages_cannot_be_continued(make_site: Callable[..., Site], last: dict[str, Any]) -> None:
    site = make_site()
    answer = await site.post(CHAT, {"messages": [USER, last], "continue_final_message": True})
    assert answer.status == 400
    assert answer.json()["error"]["param"] == "continue_final_message"
    assert not site.engine.requests
