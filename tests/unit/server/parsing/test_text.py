"""Tags in pieces of text: found wherever they are cut, never in what only begins like one, and never at the price of held text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.parsing.deltas import ContentDelta, MessageDelta
from paceline.server.parsing.text import ExpectedTag, TagFinder, TextChannel
from tests.fakes.output_player import cut, cut_at

TAG = "<tag>"


def split_by(finder: TagFinder, pieces: list[str]) -> list[str]:
    """The texts between tags."""
    texts = [""]
    for piece in pieces:
        position = 0
        while position < len(piece):
            certain, position, is_found = finder.find(piece, position)
            texts[-1] += certain
            if is_found:
                texts.append("")
    texts[-1] += finder.flush()
    return texts


@given(
    text=st.text(alphabet="<tag> x") | st.lists(st.sampled_from([TAG, "<", "<ta", "<tag", "a>", " "])).map("".join),
    places=st.lists(st.integers(0, 99)),
)
def test_a_finder_splits_as_python_does(text: str, places: list[int]) -> None:
    assert split_by(TagFinder(TAG), cut_at(text, places)) == text.split(TAG)


@pytest.mark.parametrize("beginning", ["<", "<t", "<ta", "<tag"])
def test_only_the_beginning_of_a_tag_is_held(beginning: str) -> None:
    finder = TagFinder(TAG)
    assert finder.find("a < b " + beginning, 0) == ("a < b ", len("a < b " + beginning), False)
    assert finder.find("!", 0) == (beginning + "!", 1, False)
    assert finder.find("<x", 0) == ("<x", 2, False)


def expect(pieces: list[str]) -> tuple[bool | None, str, str, str]:
    """The verdict on a tag, the spaces and the part taken, and what was not read."""
    tag = ExpectedTag(TAG)
    for index, piece in enumerate(pieces):
        position, is_there = tag.take(piece, 0)
        if is_there is not None:
            return is_there, tag.spaces, tag.part, piece[position:] + "".join(pieces[index + 1 :])
        assert position == len(piece)
    return None, tag.spaces, tag.part, ""


@given(
    text=st.text(alphabet="<tag>\n x", max_size=9) | st.sampled_from(["", " ", "\n"]).map(lambda spaces: spaces + TAG + " y"),
    size=st.integers(1, 9),
)
def test_an_expected_tag(text: str, size: int) -> None:
    is_there, spaces, part, rest = expect(cut(text, size))
    assert spaces + part + rest == text
    body = text.lstrip(" \n")
    if body.startswith(TAG):
        assert (is_there, spaces, part) == (True, text[: len(text) - len(body)], TAG)
    else:
        assert is_there is (None if TAG.startswith(body) else False)


def channelled(pieces: list[str], is_trimmed: bool) -> list[str]:
    channel, deltas = TextChannel(ContentDelta, is_trimmed), list[MessageDelta]()
    for piece in pieces:
        channel.push(piece, deltas)
    channel.end(deltas)
    return [delta.text for delta in deltas if isinstance(delta, ContentDelta)]


@given(text=st.text(alphabet="a\n \u00a0"), places=st.lists(st.integers(0, 99)))
def test_a_channel_leaves_out_only_white_space_at_its_ends(text: str, places: list[int]) -> None:
    texts = channelled(cut_at(text, places), is_trimmed=True)
    assert "".join(texts) == text.strip(" \n")
    assert all(texts)
    assert "".join(channelled(cut_at(text, places), is_trimmed=False)) == text


def test_a_channel_holds_white_space_only() -> None:
    channel, deltas = TextChannel(ContentDelta, is_trimmed=False), list[MessageDelta]()
    channel.push("\n a \n", deltas)
    channel.push(" ", deltas)
    assert deltas == [ContentDelta("\n a")]
    channel.push("b", deltas)
    assert deltas[1:] == [ContentDelta(" \n b")]
    channel.push("\n", deltas)
    channel.trim()
    channel.push("\nc", deltas)
    channel.push("\n", deltas)
    channel.end(deltas)
    assert deltas[2:] == [ContentDelta("\nc")]
