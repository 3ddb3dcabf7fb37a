"""Structured output through the routes: which grammar reaches the engine, and what is refused before any engine sees it."""

import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from paceline.server import grammar as server_grammar
from paceline.server.grammar import GrammarCheck, callable_functions
from paceline.server.parsing.deltas import ContentDelta
from paceline.server.parsing.formats import OutputFormat
from paceline.server.parsing.grammar import ANSWER, CALLS, Tags, call_rules, composed, top_rules
from tests.fakes.fake_engine import FACTS, FakeEngine
from tests.fakes.tiny_models import make_tiny_model
from tests.unit.server.conftest import Site

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x/y", 'q"']}},
    "required": ["a"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "fox", "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}},
    },
    {"type": "function", "function": {"name": "dog"}},
]


@pytest.fixture
async def structured(make_site: Callable[..., Site]) -> AsyncIterator[Site]:
    """A server with room for longer answers, closed at the end."""
    site = make_site(FakeEngine(replace(FACTS, max_model_len=512)))
    yield site
    await site.server.close()


def matches(folder: Path, grammar: str, text: str) -> bool:
    """Whether a text is in the language, whole."""
    tokenizer = LLTokenizer(str(folder / "tokenizer.json"), n_vocab=FACTS.vocab_size, eos_token=list(FACTS.eos_token_ids))
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def body_for(path: str, **given: Any) -> dict[str, Any]:
    prompt = {"prompt": "the fox"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "the fox"}]}
    return {"max_tokens": 9, **prompt, **given}


GIVEN: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}}, ["{}", '{"a": [1, {"b": null}]}', '{\n  "a":1}'], ["[]", "{", "x", '"a"']),
    ({"response_format": NAMED}, ['{"a": 1}', '{"a":-20, "b": "q\\""}'], ['{"a": "1"}', '{"b": "x/y"}', '{"a": 1, "c": 2}', '{"a": 1} ']),
    ({"guided_json": SCHEMA}, ['{"a": 1}'], ['{"a": 1.5}']),
    ({"guided_json": json.dumps(SCHEMA)}, ['{"a": 1, "b": "x/y"}'], ['{"a": 1, "b": "z"}']),
    ({"structured_outputs": {"json": SCHEMA}}, ['{"a": 1}'], ["{}"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
    ({"guided_choice": ["yes", "no/maybe", 'a "b"']}, ["yes", "no/maybe", 'a "b"'], ["ye", "yesno", ""]),
    ({"structured_outputs": {"choice": ["yes"]}}, ["yes"], ["no"]),
    ({"guided_grammar": 'start: "(" start ")" | "x"'}, ["x", "((x))"], ["(x", ""]),
    ({"structured_outputs": {"grammar": 'start: /[0-9]+/ "!"'}}, ["12!"], ["12"]),
    ({"structured_outputs": {"regex": "[a-f]{2}"}}, ["ab"], ["abc"]),
    ({"guided_json": {"type": "string", "format": "nonesuch", "$comment": "lenient"}}, ['"x"'], ["x"]),
]
PATTERNS = [r"a/b", r"a\/b+", r"\d{2}-\w+", "a\nb", "a\\\nb", r"(yes|no)\.", r'"[^"]*"', r"\\/x", r"[/]{2}"]
TEXTS = ["a/b", "a/bbb", "12-ab", "a\nb", "yes.", "yesx", '"q"', "\\/x", "//", "", "a"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_is_asked_for_reaches_the_engine(structured: Site, folder: Path, path: str) -> None:
    for given, inside, outside in GIVEN:
        answer = await structured.post(path, body_for(path, **given))
        assert answer.status == 200, (given, answer.body)
        grammar = structured.engine.requests[-1].sampling.grammar
        assert grammar is not None
        assert [text for text in inside if not matches(folder, grammar, text)] == [], given
        assert [text for text in outside if matches(folder, grammar, text)] == [], given
    assert (await structured.post(path, body_for(path, response_format={"type": "text"}))).status == 200
    assert structured.engine.requests[-1].sampling.grammar is None


async def test_patterns_mean_what_they_mean_elsewhere(structured: Site, folder: Path) -> None:
    for pattern in PATTERNS:
        assert (await structured.post(COMPLETIONS, body_for(COMPLETIONS, guided_regex=pattern))).status == 200, pattern
        grammar = structured.engine.requests[-1].sampling.grammar
        assert grammar is not None
        for text in TEXTS:
            assert matches(folder, grammar, text) == bool(re.fullmatch(pattern, text)), (pattern, text)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}, "strict": True}}},
        "response_format.json_schema.schema",
    ),
    ({"guided_json": {"type": "strin"}}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": r'{"enum": ["\ud800"]}'}, "guided_json"),
    ({"guided_json": {"$ref": "#"}}, "guided_json"),
    ({"guided_json": {"$ref": "http://localhost:1/x"}}, "guided_json"),
    ({"guided_json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "guided_json"),
    ({"guided_json": {"enum": ["z" * 70_000]}}, "guided_json"),
    ({"guided_json": json.loads('{"items":' * 300 + "{}" + "}" * 300)}, "guided_json"),
    ({"guided_regex": "([a"}, "guided_regex"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_regex": "\\"}, "guided_regex"),
    ({"guided_regex": "x" * 70_000}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice.0"),
    ({"guided_choice": ["x"] * 2000}, "guided_choice"),
    ({"guided_grammar": "start: foo"}, "guided_grammar"),
    ({"guided_grammar": "start: start"}, "guided_grammar"),
    ({"guided_grammar": "start: <nonesuch>"}, "guided_grammar"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"response_format": NAMED, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_bad_grammars_are_refused_for_themselves_alone(structured: Site, path: str) -> None:
    for given, param in BAD:
        answer = await structured.post(path, body_for(path, **given))
        assert answer.status == 400, (given, answer.body)
        assert answer.json()["error"]["param"] == param, answer.body
        assert len(answer.json()["error"]["message"]) < 600
    assert structured.engine.requests == []
    assert (await structured.post(path, body_for(path, guided_regex="a+"))).status == 200


async def test_one_that_takes_too_long(child_processes: None, structured: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await structured.post(COMPLETIONS, body_for(COMPLETIONS, guided_regex="a"))).status == 200
    many = {"anyOf": [{"type": "object", "properties": {f"p{number}": {"type": "string"}}} for number in range(900)]}
    with monkeypatch.context() as patch:
        patch.setattr(server_grammar, "COMPILE_LIMIT_S", 0.01)
        answer = await structured.post(COMPLETIONS, body_for(COMPLETIONS, guided_json=many))
    assert answer.status == 400
    assert "took more than 0.01 s to compile" in answer.json()["error"]["message"]
    assert (await structured.post(COMPLETIONS, body_for(COMPLETIONS, guided_json=many))).status == 200, "a busy machine is no verdict"
    assert (await structured.post(COMPLETIONS, body_for(COMPLETIONS, guided_regex="b"))).status == 200


async def test_a_child_that_ends_between_reading_the_tokenizer_and_compiling(
    child_processes: None, structured: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request's grammar may end it: reading the tokenizer again must not count as this one's time."""
    honest, num_ends = server_grammar.Worker.call, 0

    async def call(self: server_grammar.Worker, request: bytes, timeout_s: float) -> bytes:
        nonlocal num_ends
        if json.loads(request)["grammar"] is not None and num_ends < 2:
            num_ends += 1
            async with self._start_lock:
                await self._end_child()
        return await honest(self, request, timeout_s)

    monkeypatch.setattr(server_grammar.Worker, "call", call)
    assert (await structured.post(COMPLETIONS, body_for(COMPLETIONS, guided_regex="a"))).status == 200
    num_ends = -1
    answer = await structured.post(COMPLETIONS, body_for(COMPLETIONS, guided_regex="b"))
    assert (num_ends, answer.status) == (2, 503)


async def test_a_model_whose_tokenizer_has_no_grammars(make_site: Callable[..., Site]) -> None:
    site = make_site(FakeEngine(replace(FACTS, eos_token_ids=())))
    answer = await site.post(COMPLETIONS, body_for(COMPLETIONS, guided_regex="a"))
    await site.server.close()
    assert answer.status == 400
    assert "structured output cannot be had from this model's tokenizer" in answer.json()["error"]["message"]


async def test_verdicts_are_remembered_and_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck(folder, FACTS)
    compiled: list[str] = []

    async def compile_once(self: GrammarCheck, grammar: str) -> str | None:
        compiled.append(grammar)
        return "is bad" if grammar == "bad" else None

    monkeypatch.setattr(GrammarCheck, "_compile", compile_once)
    for _ in range(3):
        await check.check("good", "x")
        with pytest.raises(server_grammar.BadInputError, match="x: is bad"):
            await check.check("bad", "x")
    assert compiled == ["good", "bad"]
    for number in range(10_000):
        await check.check(f"grammar {number}", "x")
    assert check.num_verdicts == 4096


def with_tags(folder: Path, tags: list[str]) -> Path:
    """The folder with a tokenizer that has these tags as tokens, as Qwen's has."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


TAG_NAMES = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


@pytest.fixture(params=["tags-are-text", "tags-are-tokens"])
def tagged(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Tags]:
    folder = make_tiny_model(tmp_path / "tagged", vocab_size=300)
    names = TAG_NAMES if request.param == "tags-are-tokens" else []
    return with_tags(folder, names), Tags(names.__contains__)


@pytest.mark.parametrize("tools", ["hermes", "llama_json"])
@pytest.mark.parametrize("is_single", [False, True])
def test_forced_calls_are_what_the_parser_reads(tagged: tuple[Path, Tags], tools: str, is_single: bool) -> None:
    folder, tags = tagged
    output_format = OutputFormat(tools, has_reasoning=False)
    functions = callable_functions(TOOLS, ["fox", "dog"])
    rules = call_rules(output_format, functions, tags, is_single)
    grammar = composed({CALLS: {"lark_grammar": rules}}, top_rules(output_format, "", tags, [CALLS]))
    field, between = ("arguments", "\n") if tools == "hermes" else ("parameters", "; ")
    calls = [f'{{"name": "fox", "{field}": {{"n": 2}}}}', f'{{"name": "dog", "{field}": {{}}}}']
    if tools == "hermes":
        calls = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    for text in calls:
        assert matches(folder, grammar, text)
        parser = output_format.parser("", ["fox", "dog"])
        deltas = [*parser.feed(text), *parser.finish()]
        assert parser.num_calls == 1
        assert not any(isinstance(delta, ContentDelta) for delta in deltas)
    assert matches(folder, grammar, between.join(calls)) == (not is_single)
    wrong = [calls[0].replace("fox", "cat"), calls[0].replace("2", "3"), calls[1].replace("{}", '{"n": 1}'), "", "text", calls[0] + "x"]
    assert [text for text in wrong if matches(folder, grammar, text)] == []


def test_thoughts_come_before_the_answer(tagged: tuple[Path, Tags]) -> None:
    folder, tags = tagged
    thinking = OutputFormat(None, has_reasoning=True)
    answer = {ANSWER: {"lark_grammar": 'start: "yes"'}}
    free = composed(answer, top_rules(thinking, "user: hm?\nassistant:", tags, [ANSWER]))
    assert [text for text in ("yes", "<think>\nno < maybe\n</think>\n\nyes", "<think></think>yes") if not matches(folder, free, text)] == []
    assert [text for text in ("<think>yes", "no", "</think>yes", "<think>\n</think>no") if matches(folder, free, text)] == []
    opened = composed(answer, top_rules(thinking, "assistant:\n<think>\n", tags, [ANSWER]))
    assert [text for text in ("so\n</think>\nyes", "</think>yes") if not matches(folder, opened, text)] == []
    assert not matches(folder, opened, "yes")


QWEN = Path(__file__).parents[2] / "data" / "templates" / "qwen2.5-coder.jinja"


@pytest.fixture
async def tool_site(make_site: Callable[..., Site], tmp_path: Path) -> AsyncIterator[Site]:
    model = make_tiny_model(tmp_path / "qwen")
    (model / "chat_template.jinja").write_text(QWEN.read_text())
    site = make_site(FakeEngine(replace(FACTS, max_model_len=4096)), model_folder=model)
    yield site
    await site.server.close()


async def test_tool_choice_decides_the_grammar(tool_site: Site, folder: Path) -> None:
    fox, dog = (
        '<tool_call>\n{"name": "fox", "arguments": {"n": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "dog", "arguments": {}}\n</tool_call>',
    )
    named = {"type": "function", "function": {"name": "dog"}}
    rows: list[tuple[dict[str, Any], list[str], list[str]]] = [
        ({"tool_choice": "required"}, [fox, dog, f"{fox}\n{dog}"], ["text", "{}"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [fox, dog], [f"{fox}\n{dog}"]),
        ({"tool_choice": named}, [dog], [fox, f"{dog}\n{dog}"]),
        ({"tool_choice": named, "response_format": NAMED}, [dog], ['{"a": 1}']),
        ({"tool_choice": "auto", "response_format": NAMED}, [fox, dog, '{"a": 1}'], ["text"]),
        ({"tool_choice": "none", "response_format": NAMED}, ['{"a": 1}'], [fox]),
    ]
    for given, inside, outside in rows:
        answer = await tool_site.post(CHAT, body_for(CHAT, tools=TOOLS, **given))
        assert answer.status == 200, answer.body
        grammar = tool_site.engine.requests[-1].sampling.grammar
        assert grammar is not None
        assert [text for text in inside if not matches(folder, grammar, text)] == [], given
        assert [text for text in outside if matches(folder, grammar, text)] == [], given
    assert (await tool_site.post(CHAT, body_for(CHAT, tools=TOOLS))).status == 200
    assert tool_site.engine.requests[-1].sampling.grammar is None
    bad = [{"type": "function", "function": {"name": "cat", "parameters": {"type": "strin"}}}]
    answer = await tool_site.post(CHAT, body_for(CHAT, tools=bad, tool_choice="required"))
    assert (answer.status, answer.json()["error"]["param"]) == (400, "tools")
