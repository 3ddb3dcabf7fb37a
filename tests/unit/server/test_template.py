"""Chat templates: the dialect of Hugging Face's, in a sandbox; what they refuse or break on is the request's error."""

import json
from pathlib import Path

import pytest

from paceline.errors import BadInputError
from paceline.server.template import ChatTemplate, load_chat_template

HELLO = [{"role": "user", "content": "hello"}]
TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Now & here",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


async def rendered(source: str, messages: list[dict[str, str]] = HELLO, **tokens: str) -> str:
    return await ChatTemplate(source, tokens).render(messages)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}{{ eos_token }}", "<s>[user]hello</s>"),
        ("{%- for m in messages -%}\n    {{- m.content }}\n{%- endfor %}\n{% if add_generation_prompt %}\n>>{% endif %}", "hello>>"),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{% for m in messages %}{% if m.role == 'user' %}{% break %}{% endif %}x{% endfor %}.", "."),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hello"}]'),
        ("{{ '<b>&é' | tojson }}{{ {'b': 1, 'a': 2} | tojson(indent=0, sort_keys=true) | length }}", '"<b>&é"18'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hello!"),
        ("{% if tools %}tools{% else %}none{% endif %}{{ documents is defined }}", "noneFalse"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
async def test_the_dialect(source: str, text: str) -> None:
    assert await rendered(source, bos_token="<s>", eos_token="</s>") == text


async def test_a_refusal_reaches_the_user() -> None:
    with pytest.raises(BadInputError, match="roles must alternate") as caught:
        await rendered("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.pop() }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for a in range(10**9) %}{% endfor %}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ nothing.like.it }}",
        "{% macro loop() %}{{ loop() }}{% endmacro %}{{ loop() }}",
    ],
)
async def test_what_the_sandbox_forbids_is_a_bad_input(source: str) -> None:
    """Template injection, mutation, endless recursion: an error without a word about the inside."""
    with pytest.raises(BadInputError) as caught:
        await rendered(source)
    assert "Traceback" not in str(caught.value)
    assert "paceline" not in str(caught.value)


async def test_output_is_bounded() -> None:
    source = "{% for a in range(9999) %}{% for b in range(9999) %}xxxxxxxxxxxxxxxx{{ a }}{% endfor %}{% endfor %}"
    with pytest.raises(BadInputError, match="characters"):
        await rendered(source)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "-" * 5000 + "1 }}", "{{ 1" + "9" * 5000 + " }}"]
)
async def test_an_invalid_template_says_so(source: str) -> None:
    """Also one that is too deep for the compiler."""
    with pytest.raises(BadInputError, match="not a valid Jinja template"):
        await ChatTemplate(source, {}).start()


def folder_with(tmp_path: Path, **files: object) -> Path:
    for name, content in files.items():
        file_name = {"config": "tokenizer_config.json", "tokens": "special_tokens_map.json", "jinja": "chat_template.jinja"}[name]
        (tmp_path / file_name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return tmp_path


def test_a_folder_without_a_template(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    assert load_chat_template(folder_with(tmp_path, config={"bos_token": "<s>"})) is None


async def test_template_and_special_tokens_of_the_configuration(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", "bos_token": {"content": "<b>"}, "eos_token": "<e>"}
    template = load_chat_template(folder_with(tmp_path, config=config, tokens={"pad_token": "<p>", "bos_token": "loses"}))
    assert template is not None
    assert await template.render(HELLO) == "<b>|<e>|<p>"


async def test_the_default_of_several_templates(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    template = load_chat_template(folder_with(tmp_path, config={"chat_template": several}))
    assert template is not None
    assert await template.render(HELLO) == "plain"


async def test_the_file_wins_over_the_configuration(tmp_path: Path) -> None:
    template = load_chat_template(folder_with(tmp_path, config={"chat_template": "old"}, jinja="new"))
    assert template is not None
    assert await template.render(HELLO) == "new"


def test_a_broken_configuration_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"tokenizer_config\.json is not valid JSON"):
        load_chat_template(folder_with(tmp_path, config="{"))
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    with pytest.raises(BadInputError, match=r"special_tokens_map\.json is not valid JSON"):
        load_chat_template(folder_with(tmp_path, config="{}", tokens=deep, jinja="x"))


async def test_tools_reach_the_template_and_no_tools_are_none() -> None:
    template = ChatTemplate("{{ tools is none }} {{ tools | tojson }}", {})
    assert await template.render(HELLO) == await template.render(HELLO, []) == "True null"
    assert await template.render(HELLO, [WEATHER]) == "False " + json.dumps([WEATHER])


async def test_a_template_cannot_change_the_tools() -> None:
    with pytest.raises(BadInputError):
        await ChatTemplate("{{ tools[0].function.update({'name': 'x'}) }}", {}).render(HELLO, [WEATHER])


async def test_tools_and_calls_of_a_real_template() -> None:
    """Qwen's: the tools in the system turn, calls in tags, results in the user's turn; arguments are objects there."""
    template = ChatTemplate((TEMPLATES / "qwen2.5-coder.jinja").read_text(encoding="utf-8"), {})
    call = {"id": "c0", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "rain", "tool_call_id": "c0"},
        {"role": "tool", "content": "sun", "tool_call_id": "c0"},
    ]
    text = await template.render(messages, [WEATHER])
    tags = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in text
    assert text.endswith(
        f"<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n{tags}\n{tags}<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n"
        "</tool_response>\n<tool_response>\nsun\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert "<tools>" not in await template.render(HELLO)


async def test_a_template_without_tools_leaves_them_out() -> None:
    template = ChatTemplate((TEMPLATES / "smollm2.jinja").read_text(encoding="utf-8"), {})
    assert await template.render(HELLO, [WEATHER]) == await template.render(HELLO)
    assert (await template.render(HELLO)).endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def test_the_source_stays_readable() -> None:
    """Its text says which formats the model writes."""
    assert ChatTemplate("{{ messages[0].content }}", {}).source == "{{ messages[0].content }}"
