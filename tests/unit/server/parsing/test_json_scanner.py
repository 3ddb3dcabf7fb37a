"""The incremental check of a JSON object accepts what Python's parser accepts, stops where it must, and costs little per character."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.parsing.json_scanner import MAX_DEPTH, JsonScanner, Mark

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=4)


def run(pieces: list[str]) -> tuple[int | None, list[tuple[Mark, int]]]:
    """Where the object ends in the joined pieces (None: not at all, or a character that cannot follow), and all marks but MORE."""
    scanner, offset, marks = JsonScanner(), 0, []
    for piece in pieces:
        position = 0
        while position < len(piece):
            position, mark = scanner.scan(piece, position)
            if mark is not Mark.MORE:
                marks.append((mark, offset + position))
            if mark in (Mark.END, Mark.BAD):
                return (offset + position if mark is Mark.END else None), marks
        offset += len(piece)
    return None, marks


def is_object(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


@given(value=OBJECTS, indent=st.none() | st.integers(0, 2), is_ascii=st.booleans(), after=st.text(max_size=3))
def test_accepts_every_object_and_stops_at_its_end(value: dict[str, object], indent: int | None, is_ascii: bool, after: str) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    end, marks = run([text + after])
    assert end == len(text)
    assert run(list(text + after)) == (end, marks)
    assert sum(mark is Mark.KEY_START for mark, _ in marks) == len(value)


@given(
    value=OBJECTS,
    place=st.integers(0, 999),
    replacement=st.sampled_from(["", "0", "-", ".", "e", "+", ",", ":", "{", "}", "[", "]", '"', "\\", "u", "\n", "t", "/", " ", "\x0b"]),
    num_removed=st.integers(0, 2),
)
def test_judges_damaged_objects_as_pythons_parser_does(value: dict[str, object], place: int, replacement: str, num_removed: int) -> None:
    text = json.dumps(value, ensure_ascii=False)
    place %= len(text)
    text = text[:place] + replacement + text[place + num_removed :]
    end, _ = run([text])
    assert (end is not None and not text[end:].strip(" \t\n\r")) == is_object(text)
    assert run(list(text))[0] == end


@pytest.mark.parametrize(
    ("number", "is_valid"),
    [
        *((text, True) for text in ("0", "-0", "10", "-7", "0.5", "1.25e10", "1E+2", "2e-07", "0e0", "1" * 5000)),
        *(
            (text, False)
            for text in ("", "-", "01", "-01", "1.", ".5", "+1", "1e", "1e+", "0x1", "1.e1", "1 2", "NaN", "Infinity", "\u0663")
        ),
    ],
)
def test_numbers(number: str, is_valid: bool) -> None:
    """With what ends a number directly behind it, and with white space."""
    for text in (f'{{"a":{number}}}', f'{{"a": {number} , "b": [{number},{number}]}}'):
        assert (run([text])[0] == len(text)) is is_valid
        assert (run(list(text))[0] == len(text)) is is_valid


@pytest.mark.parametrize(
    "text",
    [
        *('{"a":' + literal + "}" for literal in ("True", "nul", "nulll", "truefalse", "undefined", "'a'")),
        '{"a":"\\x"}', '{"a":"\\u12g4"}', '{"a":"\n"}', '{"a":"\x1f"}', '{"a":1,}', '{,"a":1}', '{"a" 1}', '{"a":}', '{a:1}',
        '{"a":1 "b":2}', '{"a":[1,]}', '{"a":[,1]}', '{"a":[1}', '{"a":{]}', "[]", '"a"', "1", "null", "x", "}", '{"a":1/**/}',
    ],
)  # fmt: skip
def test_refuses(text: str) -> None:
    end, marks = run([text])
    assert end is None
    assert marks[-1][0] is Mark.BAD
    assert run(list(text)) == (None, marks)


def test_marks_are_those_of_the_outermost_members() -> None:
    text = ' {"a" : {"x":["y",{}]}, "b":12,"c":"s"}'
    found = [(mark.name, text[position - 1]) for mark, position in run([text])[1]]
    assert found == [
        ("KEY_START", '"'), ("KEY_END", '"'), ("VALUE_START", "{"), ("VALUE_END", "}"),
        ("KEY_START", '"'), ("KEY_END", '"'), ("VALUE_START", "1"),
        ("KEY_START", '"'), ("KEY_END", '"'), ("VALUE_START", '"'), ("VALUE_END", '"'), ("END", "}"),
    ]  # fmt: skip


@pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ("[", "]")])
def test_nesting_is_bounded(opening: str, closing: str) -> None:
    def nested(depth: int) -> str:
        return '{"a":' + opening * (depth - 1) + "1" + closing * (depth - 1) + "}"

    assert run([nested(MAX_DEPTH)])[0] == len(nested(MAX_DEPTH))
    assert run([nested(MAX_DEPTH + 1)])[1][-1][0] is Mark.BAD
    assert run(['{"a":' + opening * 1_000_000])[1][-1][0] is Mark.BAD


@pytest.mark.parametrize("content", ['"' + "a" * 100_000, '"' + "\\n" * 40_000, "[" + "1," * 40_000, "1" * 80_000, " " * 80_000])
def test_hostile_lengths_cost_little(content: str) -> None:
    began_s = time.process_time()
    assert run(['{"a":' + content])[0] is None
    scanner = JsonScanner()
    scanner.scan('{"a":', 0)
    for character in content:
        scanner.scan(character, 0)
    assert time.process_time() - began_s < 5  # quadratic work takes minutes
