"""Chat templates: the dialect of Hugging Face's, in a sandbox; what they refuse or break on is the request's error."""

import json
from pathlib import Path

import pytest

from paceline.errors import BadInputError
from paceline.server.template import ChatTemplate, load_chat_template

HELLO = [{"role": "user", "content": "hello"}]


def rendered(source: str, messages: list[dict[str, str]] = HELLO, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(messages)


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
def test_the_dialect(source: str, text: str) -> None:
    assert rendered(source, bos_token="<s>", eos_token="</s>") == text


def test_a_refusal_reaches_the_user() -> None:
    with pytest.raises(BadInputError, match="roles must alternate") as caught:
        rendered("{{ raise_exception('roles must alternate') }}")
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
def test_what_the_sandbox_forbids_is_a_bad_input(source: str) -> None:
    """Template injection, mutation, endless recursion: an error without a word about the inside."""
    with pytest.raises(BadInputError) as caught:
        rendered(source)
    assert "Traceback" not in str(caught.value)
    assert "paceline" not in str(caught.value)


def test_output_is_bounded() -> None:
    source = "{% for a in range(9999) %}{% for b in range(9999) %}xxxxxxxxxxxxxxxx{{ a }}{% endfor %}{% endfor %}"
    with pytest.raises(BadInputError, match="characters"):
        rendered(source)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "-" * 5000 + "1 }}", "{{ 1" + "9" * 5000 + " }}"]
)
def test_an_invalid_template_says_so(source: str) -> None:
    """Also one that is too deep for the compiler."""
    with pytest.raises(BadInputError, match="not a valid Jinja template"):
        ChatTemplate(source, {})


def folder_with(tmp_path: Path, **files: object) -> Path:
    for name, content in files.items():
        file_name = {"config": "tokenizer_config.json", "tokens": "special_tokens_map.json", "jinja": "chat_template.jinja"}[name]
        (tmp_path / file_name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return tmp_path


def test_a_folder_without_a_template(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    assert load_chat_template(folder_with(tmp_path, config={"bos_token": "<s>"})) is None


def test_template_and_special_tokens_of_the_configuration(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", "bos_token": {"content": "<b>"}, "eos_token": "<e>"}
    template = load_chat_template(folder_with(tmp_path, config=config, tokens={"pad_token": "<p>", "bos_token": "loses"}))
    assert template is not None
    assert template.render(HELLO) == "<b>|<e>|<p>"


def test_the_default_of_several_templates(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    template = load_chat_template(folder_with(tmp_path, config={"chat_template": several}))
    assert template is not None
    assert template.render(HELLO) == "plain"


def test_the_file_wins_over_the_configuration(tmp_path: Path) -> None:
    template = load_chat_template(folder_with(tmp_path, config={"chat_template": "old"}, jinja="new"))
    assert template is not None
    assert template.render(HELLO) == "new"


def test_a_broken_configuration_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"tokenizer_config\.json is not valid JSON"):
        load_chat_template(folder_with(tmp_path, config="{"))
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    with pytest.raises(BadInputError, match=r"special_tokens_map\.json is not valid JSON"):
        load_chat_template(folder_with(tmp_path, config="{}", tokens=deep, jinja="x"))
