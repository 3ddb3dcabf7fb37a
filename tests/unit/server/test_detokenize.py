"""Incremental detokenisation: whole characters only, the text of one whole decode, stop strings wherever tokens cut them."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline.core.outcome import TokenDelta
from paceline.core.request import FinishReason
from paceline.server.detokenize import Detokenizer, StopMatcher, Vocabulary

HARD_TEXTS = (
    "plain words",
    "emoji 😀👩‍👩‍👧‍👦 end",
    "日本語のテキスト、漢字",
    "e\u0301 a\u030a combining \u0928\u093f",
    "mixed 😀a日b\u0301c\n\ttab",
    "\u0000 control \u007f and \u00a0 and \u00ad",
    "עברית العربية",
)


def byte_fallback_tokenizer() -> Tokenizer:
    """Llama-2's kind: pieces with a visible space, bytes as tokens, the first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdehlorw", "lo", "\u2581w", "日"]
    model = models.BPE(
        vocab={piece: token_id for token_id, piece in enumerate(pieces)},
        merges=[("l", "o"), ("\u2581", "w")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def deltas(token_ids: list[int], chunk: int, reason: FinishReason = FinishReason.LENGTH) -> list[TokenDelta]:
    pieces = [tuple(token_ids[start : start + chunk]) for start in range(0, len(token_ids), chunk)] or [()]
    return [TokenDelta("r", piece, reason if index == len(pieces) - 1 else None) for index, piece in enumerate(pieces)]


def play(
    vocabulary: Vocabulary, all_deltas: list[TokenDelta], stops: tuple[str, ...] = (), prompt: tuple[int, ...] = ()
) -> tuple[list[str], int, FinishReason | None]:
    """The texts as they came, the tokens counted and the reason."""
    detokenizer = Detokenizer(vocabulary, prompt, stops)
    texts, num_tokens = [], 0
    for delta in all_deltas:
        text = detokenizer.push(delta)
        texts.append(text.text)
        num_tokens += text.num_tokens
        if text.finish_reason is not None:
            return texts, num_tokens, text.finish_reason
    return texts, num_tokens, None


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("chunk", range(1, 9))
def test_byte_level_text_comes_whole(tokenizer: Tokenizer, text: str, chunk: int) -> None:
    token_ids = tokenizer.encode(text).ids
    texts, num_tokens, _ = play(Vocabulary(tokenizer), deltas(token_ids, chunk))
    assert "".join(texts) == text
    assert num_tokens == len(token_ids)
    assert not any("\ufffd" in part for part in texts)


@pytest.mark.parametrize("text", [text for text in HARD_TEXTS if not text.startswith(" ")])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_byte_fallback_text_comes_whole(text: str, chunk: int) -> None:
    tokenizer = byte_fallback_tokenizer()
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    texts, _, _ = play(Vocabulary(tokenizer), deltas(token_ids, chunk))
    assert "".join(texts) == text == tokenizer.decode(token_ids)
    assert not any("\ufffd" in part for part in texts)


def test_byte_fallback_keeps_the_space_after_a_prompt() -> None:
    tokenizer = byte_fallback_tokenizer()
    prompt, output = tokenizer.encode("hello").ids, tokenizer.encode("world").ids
    texts, _, _ = play(Vocabulary(tokenizer), deltas(output, 1), prompt=tuple(prompt))
    assert "".join(texts) == " world"


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40), chunk=st.integers(1, 8))
def test_any_text_survives_any_cut(byte_level: Tokenizer, text: str, chunk: int) -> None:
    texts, _, _ = play(Vocabulary(byte_level), deltas(byte_level.encode(text).ids, chunk))
    assert "".join(texts) == text


@settings(max_examples=150, deadline=None)
@given(data=st.data(), chunk=st.integers(1, 8))
def test_any_tokens_give_the_text_of_one_decode(byte_level: Tokenizer, data: st.DataObject, chunk: int) -> None:
    """Invalid bytes too. Only a character that the end cuts is left out.

    The first two bytes of an encoded surrogate, which is no character, are held like those of one; other decoders replace each of them.
    """
    token_ids = data.draw(st.lists(st.integers(0, byte_level.get_vocab_size() + 3), max_size=30))
    texts, _, _ = play(Vocabulary(byte_level), deltas(token_ids, chunk))
    whole, text = byte_level.decode(token_ids), "".join(texts)
    assert whole.startswith(text)
    end = b"".join(map(Vocabulary(byte_level).token_bytes, token_ids))[-2:]
    is_half_surrogate = len(end) == 2 and end[0] == 0xED and 0xA0 <= end[1] <= 0xBF
    assert whole[len(text) :] in (("\ufffd" * 2,) if is_half_surrogate else ("", "\ufffd"))


@pytest.fixture(scope="session")
def byte_level(tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer


def test_every_byte_level_token_has_its_bytes(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(tokenizer)
    for token_id in range(tokenizer.get_vocab_size()):
        assert vocabulary.token_bytes(token_id).decode(errors="replace") == tokenizer.decode([token_id])


def test_added_tokens_outside_the_alphabet_are_plain_text(tokenizer: Tokenizer) -> None:
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_tokens(["two words", "<think>", "漢字"])
    token_ids = extended.encode("x<think>two words漢字y").ids
    texts, _, _ = play(Vocabulary(extended), deltas(token_ids, 2))
    assert "".join(texts) == "x<think>two words漢字y" == extended.decode(token_ids)


def test_special_tokens_give_no_text_but_count(tokenizer: Tokenizer) -> None:
    token_ids = [1, *tokenizer.encode("a b").ids, 1, 0]
    texts, num_tokens, _ = play(Vocabulary(tokenizer), deltas(token_ids, 2))
    assert ("".join(texts), num_tokens) == ("a b", len(token_ids))


def test_the_text_of_a_stop_token_is_left_out(tokenizer: Tokenizer) -> None:
    """stop_token_ids may name an ordinary token: it counts, but does not show."""
    token_ids = tokenizer.encode("ab!").ids
    texts, num_tokens, reason = play(Vocabulary(tokenizer), deltas(token_ids, 8, FinishReason.STOP))
    assert ("".join(texts), num_tokens, reason) == ("ab", len(token_ids), FinishReason.STOP)


def test_an_end_without_tokens_flushes_what_was_held(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("abc").ids
    parts = [TokenDelta("r", tuple(token_ids)), TokenDelta("r", (), FinishReason.STOP)]
    assert "".join(play(Vocabulary(tokenizer), parts, stops=("cd",))[0]) == "abc"


def test_a_cut_character_at_the_end_is_left_out(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a😀").ids
    texts, num_tokens, _ = play(Vocabulary(tokenizer), deltas(token_ids[:-1], 1))
    assert ("".join(texts), num_tokens) == ("a", len(token_ids) - 1)


def test_endless_broken_bytes_cost_little_per_token() -> None:
    """Bytes that never become a character must neither be held forever nor be decoded again and again."""
    tokenizer = byte_fallback_tokenizer()
    token_id = tokenizer.token_to_id("<0xFF>")
    began_s = time.process_time()
    texts, _, _ = play(Vocabulary(tokenizer), deltas([token_id] * 4000, 1))
    assert time.process_time() - began_s < 5  # quadratic work takes minutes
    assert len("".join(texts)) > 3900


def reference_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab", max_size=24),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    cuts=st.lists(st.integers(1, 4), min_size=1),
)
def test_matcher_agrees_with_the_definition(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    matcher, certain, position, index, stopped_by = StopMatcher(stops), "", 0, 0, None
    while position < len(text) and stopped_by is None:
        piece = text[position : position + cuts[index % len(cuts)]]
        position, index = position + len(piece), index + 1
        out, stopped_by = matcher.push(piece)
        certain += out
        if stopped_by is None:
            held = text[len(certain) : position]
            assert text[:position].startswith(certain)
            longest = max((n for stop in stops for n in range(len(stop)) if text[:position].endswith(stop[:n])), default=0)
            assert len(held) == longest  # no more is held back than may still become a stop string
    expected = reference_stop(text, stops)
    if expected is None:
        assert (stopped_by, certain + matcher.flush()) == (None, text)
    else:
        assert certain == expected
        assert stopped_by in stops and text.startswith(expected + stopped_by)


@pytest.mark.parametrize("stop", ["fox", " ", "x j", "mps 😀 over the l", "😀", "quick brown", "the end", "n"])
def test_stop_strings_at_every_cut(tokenizer: Tokenizer, stop: str) -> None:
    """Every chunk size gives the same text, count and reason: those of the text alone."""
    text = "the quick brown fox jumps 😀 over the lazy dog; the end"
    token_ids = tokenizer.encode(text).ids
    vocabulary = Vocabulary(tokenizer)
    expected = text[: text.index(stop)]
    num_tokens = next(n for n in range(len(token_ids) + 1) if stop in tokenizer.decode(token_ids[:n]))
    for chunk in range(1, 9):
        texts, counted, reason = play(vocabulary, deltas(token_ids, chunk), (stop, "never there"))
        assert ("".join(texts), counted, reason) == (expected, num_tokens, FinishReason.STOP), chunk


def test_stop_wins_over_the_length_in_the_same_delta(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a b STOP x y").ids
    texts, num_tokens, reason = play(Vocabulary(tokenizer), deltas(token_ids, 99, FinishReason.LENGTH), ("STOP",))
    assert ("".join(texts), reason) == ("a b ", FinishReason.STOP)
    assert num_tokens < len(token_ids)


@pytest.mark.parametrize("chunk", [1, 3, 99])
def test_the_last_delta_names_the_stop_string(tokenizer: Tokenizer, chunk: int) -> None:
    """Of those complete at the same character the longest; none where a token or the length ended the answer."""
    token_ids = tokenizer.encode("the quick brown fox").ids

    def last_stop(stops: tuple[str, ...]) -> str | None:
        detokenizer = Detokenizer(Vocabulary(tokenizer), (), stops)
        return next(text.stop for delta in deltas(token_ids, chunk) if (text := detokenizer.push(delta)).finish_reason is not None)

    assert last_stop(("k", "quick", "fox", "ick")) == "quick"
    assert last_stop(("never there", "brown")) == "brown"
    assert last_stop(("never there",)) is None
    assert last_stop(()) is None


def test_hostile_stop_strings_cost_little() -> None:
    stops = tuple("a" * 1000 + chr(ord("b") + index) for index in range(16))
    matcher = StopMatcher(stops)
    began_s = time.process_time()
    for _ in range(50):
        matcher.push("a" * 200)
    assert time.process_time() - began_s < 5
    assert matcher.flush() == "a" * 1000


def test_other_decoders_go_the_general_way() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "play": 1, "##ing": 2, "now": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "removed")
    tokenizer.decoder = decoders.WordPiece()
    texts, _, _ = play(Vocabulary(tokenizer), deltas([1, 2, 3], 1))
    assert texts == ["play", "ing", " now"]
