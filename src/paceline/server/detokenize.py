"""Token ids to text, one token at a time: whole characters only, and an end at stop strings. One `Detokenizer` per request.

Work per token is bounded, and the text does not depend on how the tokens were cut into deltas.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct, structs
from tokenizers import Tokenizer, decoders

from paceline.core.outcome import TokenDelta, TokenLogprobs
from paceline.core.request import FinishReason

_REPLACEMENT = "\ufffd"  # what decoders give for bytes that are not UTF-8
_MAX_HELD_TOKENS = 8  # a character has at most 4 bytes and a token at least one; more held tokens are no character any more
_NUM_CONTEXT_TOKENS = 6  # of the prompt: enough for a decoder to see that the output does not begin a text


@dataclass(frozen=True, slots=True)
class ReportedToken:
    """An output token with what the engine said of it."""

    token_id: int
    logprobs: TokenLogprobs


class TextDelta(Struct, frozen=True, gc=False):  # one a step and request: a frozen dataclass takes five times as long to make
    """What a token delta adds to the answer. `num_tokens` counts up to the end of a stop string, the stop token included."""

    text: str
    num_tokens: int
    finish_reason: FinishReason | None
    token_ids: tuple[int, ...] = ()  # the tokens counted
    tokens: tuple[ReportedToken, ...] = ()  # the tokens counted, if their log-probabilities were asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    stop: str | None = None  # the stop string that ended the answer, if one did


class _Decoder(Protocol):
    """Turns tokens into text; keeps back what is no whole character yet."""

    def push(self, token_id: int) -> str: ...


class Vocabulary:
    """A tokenizer's decoding side, shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._special = frozenset(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._bytes: dict[int, bytes] = {}  # filled as tokens are seen; at most the vocabulary
        self._texts: dict[int, str | None] = {}  # the same

    def decoder(self, prompt_token_ids: Sequence[int]) -> _Decoder:
        """A decoder for the output that follows `prompt_token_ids`. Special tokens give no text."""
        if self._is_byte_level:
            return _ByteLevelDecoder(self)
        context = [token_id for token_id in prompt_token_ids[-_NUM_CONTEXT_TOKENS:] if token_id not in self._special]
        return _WindowDecoder(self._tokenizer, self._special, context)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token of a byte-level vocabulary stands for; none for special tokens and unused ids."""
        found = self._bytes.get(token_id)
        if found is None:
            token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
            found = self._bytes[token_id] = _byte_level_bytes(token or "")
        return found

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token of a byte-level vocabulary that is whole characters; None for others."""
        try:
            return self._texts[token_id]
        except KeyError:
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
            self._texts[token_id] = text
            return text

    def shown_bytes(self, token_id: int) -> bytes:
        """The bytes a token is listed with: those it stands for, or the name of a special token."""
        if self._is_byte_level and token_id not in self._special:
            return self.token_bytes(token_id)
        name = self._tokenizer.id_to_token(token_id) or ""
        return (name if token_id in self._special else self._tokenizer.decode([token_id]) or name).encode()

    def token_text(self, token_id: int) -> str:
        """What a token is listed as; bytes that are no characters are replaced."""
        return self.shown_bytes(token_id).decode(errors="replace")


class _ByteLevelDecoder:
    """Each token has its bytes, so decoding is joining them: exact for any cut of the text."""

    __slots__ = ("_is_open", "_utf8", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_open = False  # in the middle of a character

    def push(self, token_id: int) -> str:
        if not self._is_open:  # nearly always: a look-up then, which is a fifth of the decoder's time
            text = self._vocabulary.whole_text(token_id)
            if text is not None:
                return text
        text = self._utf8.decode(self._vocabulary.token_bytes(token_id))
        self._is_open = bool(self._utf8.getstate()[0])
        return text


class _WindowDecoder:
    """Any other decoder: decodes a window of the last tokens twice, without and with the new ones, and takes the difference.

    Needed where a token's text depends on its neighbours (byte fallback, leading spaces, word pieces).
    """

    __slots__ = ("_ids", "_num_read", "_special", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int], context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._ids = context
        self._num_read = len(context)  # leading tokens of the window whose text is out

    def push(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        self._ids.append(token_id)
        known = self._tokenizer.decode(self._ids[: self._num_read])
        text = self._tokenizer.decode(self._ids)
        num_held = len(self._ids) - self._num_read
        is_open = text.endswith(_REPLACEMENT) or len(text) <= len(known)
        if is_open and num_held <= _MAX_HELD_TOKENS:
            return ""
        self._ids = self._ids[self._num_read :]
        self._num_read = num_held
        return text[len(known) :]


class StopMatcher:
    """Finds the stop string that is complete first, and holds back only text that may still become one.

    A Knuth-Morris-Pratt automaton per stop string: a fixed cost per character, whatever the text and the strings.
    """

    __slots__ = ("_failures", "_held", "_matched", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._failures = tuple(_failure_table(stop) for stop in stops)
        self._matched = [0] * len(self._stops)  # leading characters of each stop string that the text now ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is certain now, and the stop string (not part of that text) that was completed, if one was.

        If several are complete at the same character the longest one counts.
        """
        if not self._stops:
            return text, None
        for index, character in enumerate(text):
            longest = ""
            for which, stop in enumerate(self._stops):
                matched = self._matched[which]
                while matched and stop[matched] != character:
                    matched = self._failures[which][matched - 1]
                matched += stop[matched] == character
                if matched == len(stop) and matched > len(longest):
                    longest = stop
                self._matched[which] = matched
            if longest:
                return (self._held + text[: index + 1])[: -len(longest)], longest
        text = self._held + text
        num_certain = len(text) - max(self._matched)
        self._held = text[num_certain:]
        return text[:num_certain], None

    def flush(self) -> str:
        """The held text, once nothing can follow."""
        held, self._held = self._held, ""
        return held


class Detokenizer:
    """The text side of one running request."""

    def __init__(self, vocabulary: Vocabulary, prompt_token_ids: Sequence[int], stops: Sequence[str], min_tokens: int = 0) -> None:
        """Stop strings count from output token `min_tokens` on."""
        self._decoder = vocabulary.decoder(prompt_token_ids)
        self._matcher = StopMatcher(stops)
        self._has_stops = bool(stops)
        self._num_unstoppable = min_tokens

    def push(self, delta: TokenDelta) -> TextDelta:
        """The text of a delta. A finish reason that `delta` lacks means that a stop string ended the answer here.

        An incomplete character at the end of an answer is left out, and so is the text of a stop token.
        """
        num_tokens = len(delta.token_ids)
        if delta.finish_reason is None and not self._has_stops and not delta.logprobs and not delta.prompt_logprobs:
            push = self._decoder.push
            if num_tokens == 1:
                return TextDelta(push(delta.token_ids[0]), 1, None, delta.token_ids)
            return TextDelta("".join([push(token_id) for token_id in delta.token_ids]), num_tokens, None, delta.token_ids)
        num_text_tokens = num_tokens - (delta.finish_reason is FinishReason.STOP and num_tokens > 0)
        parts: list[str] = []
        for index in range(num_text_tokens):
            text, stop = self._decoder.push(delta.token_ids[index]), None
            if self._num_unstoppable > 0:
                self._num_unstoppable -= 1
            else:
                text, stop = self._matcher.push(text)
            parts.append(text)
            if stop is not None:
                return structs.replace(_text_delta("".join(parts), index + 1, FinishReason.STOP, delta), stop=stop)
        if delta.finish_reason is not None:
            parts.append(self._matcher.flush())
        return _text_delta("".join(parts), num_tokens, delta.finish_reason, delta)


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """Deltas that follow one another as one."""
    return TextDelta(
        "".join(delta.text for delta in deltas),
        sum(delta.num_tokens for delta in deltas),
        deltas[-1].finish_reason,
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        tuple(token for delta in deltas for token in delta.tokens),
        tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        deltas[-1].stop,
    )


def _text_delta(text: str, num_tokens: int, finish_reason: FinishReason | None, delta: TokenDelta) -> TextDelta:
    if not delta.logprobs and not delta.prompt_logprobs:
        return TextDelta(text, num_tokens, finish_reason, delta.token_ids[:num_tokens])
    reported = zip(delta.token_ids[:num_tokens], delta.logprobs, strict=False) if delta.logprobs else ()
    tokens = tuple(ReportedToken(token_id, logprobs) for token_id, logprobs in reported)
    return TextDelta(text, num_tokens, finish_reason, delta.token_ids[:num_tokens], tokens, delta.prompt_logprobs)


def _failure_table(stop: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table, matched = [0] * len(stop), 0
    for index in range(1, len(stop)):
        while matched and stop[matched] != stop[index]:
            matched = table[matched - 1]
        matched += stop[matched] == stop[index]
        table[index] = matched
    return tuple(table)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: visible Latin-1 characters are themselves, the others follow from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """A token written in the byte-level alphabet as bytes; added tokens with other characters are plain text."""
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()
