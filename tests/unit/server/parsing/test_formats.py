"""The parser follows from the chat template."""

from pathlib import Path

import pytest

from paceline.server.parsing.formats import TOOL_PARSERS, OutputFormat, output_format
from tests.fakes.output_player import message

TEMPLATES = Path(__file__).parents[3] / "data" / "templates"
HERMES = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("template", "tools", "has_reasoning"),
    [
        ((TEMPLATES / "qwen2.5-coder.jinja").read_text(encoding="utf-8"), "hermes", False),
        ((TEMPLATES / "smollm2.jinja").read_text(encoding="utf-8"), None, False),
        ("{{- '" + HERMES + "' }}{{ '<think>\\n\\n</think>' }}", "hermes", True),
        (
            '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\' }}',
            "llama_json",
            False,
        ),
        ("{{- '<|python_tag|>' + tool_call.name + '.call(' }}", "llama_json", False),
        ("{{- '<tool_call>\\n<function=example>' + arguments }}", None, False),
        ("{{- '<tool_call>' + name + '<arg_key>' + arguments }}", None, False),
        ("{{- message.content.split('</think>')[-1] }}", None, True),
        ('{{- "[AVAILABLE_TOOLS]" + tool.parameters | tojson + arguments }}', None, False),
        ("{{ messages[0].content }}", None, False),
    ],
)
def test_the_format_of_a_template(template: str, tools: str | None, has_reasoning: bool) -> None:
    assert output_format(template) == OutputFormat(tools, has_reasoning)


@pytest.mark.parametrize(("name", "text"), [("hermes", CALL), ("llama_json", '{"name": "f", "parameters": {"a": 1}}')])
def test_a_parser_for_each_name(name: str, text: str) -> None:
    """With tools it finds calls; without, the same text is content."""
    assert name in TOOL_PARSERS
    ((_, function, arguments),) = message(OutputFormat(name, False).parser("", ["f"]), [text])["tool_calls"]
    assert (function, arguments) == ("f", '{"a": 1}')
    assert message(OutputFormat(name, False).parser("", []), [text]) == {"content": text}


def test_a_model_without_a_format_answers_in_plain_text() -> None:
    text = f"<think>a</think>{CALL}"
    assert message(OutputFormat(None, False).parser("", ["f"]), [text]) == {"content": text}


def test_call_ids_differ() -> None:
    found = message(OutputFormat("hermes", False).parser("", ["f"]), [CALL * 3])["tool_calls"]
    found += message(OutputFormat("hermes", False).parser("", ["f"]), [CALL * 3])["tool_calls"]
    assert len({call_id for call_id, _, _ in found}) == 6
    assert all(call_id.startswith("call_") and len(call_id) <= 40 for call_id, _, _ in found)


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("<|im_start|>assistant\n", "why", {"content": "why"}),
        ("<|im_start|>assistant\n<think>\n", "why", {"content": "", "reasoning_content": "why"}),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "why", {"content": "why"}),
        ("what does <think> mean?\n<|im_start|>assistant\n", "<think>why</think>so", {"content": "so", "reasoning_content": "why"}),
    ],
)
def test_the_prompt_says_whether_the_output_begins_in_reasoning(prompt: str, text: str, expected: dict[str, str]) -> None:
    assert message(OutputFormat(None, True).parser(prompt), [text]) == expected
