"""Grammars of the running requests: one matcher per slot, made by llguidance from the text that the request brought.

`executor/slots.py` asks for one at admission and commits to it; drafters and `speculative/adjust.py` read it. What a grammar may cost
is limited in `core/grammar.py`; the server checks each grammar under the same limits in a process of its own before it comes here.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core import grammar as limits
from paceline.core.grammar import TokenGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_KEPT = 32
"""Grammars whose compiled form is kept for the next request with the same text, and as many more that no request has taken yet; each has
been admitted at most as large as the limits."""
_MAX_RENEWALS = 4
"""Of one request, each as long as compiling: matchers of one grammar share the states of its lexer, and so share its limit."""
_LEXER_LIMIT = "lexer error"  # how llguidance begins to say so; once its lexer has met a limit, every matcher that shares it does
_GAVE_UP = "the grammar became too complex for its limits while the answer was written; simplify it"
_LEFT = (
    "the answer left the grammar, which became too complex for its limits or spells a special token of this model as text; "
    "simplify it, or use the token or another spelling"
)


class Grammars:
    """Makes the grammars of one model's requests. The tokenizer is read when the first request asks for one."""

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size`: the width of the target's logits. `eos_token_ids`: tokens that end a text, the usual one first."""
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._compiling: dict[str, Future[LLMatcher]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")  # the compiler lets other threads run

    def prepare(self, text: str) -> "Future[LLMatcher] | None":
        """Begin to compile beside the running steps; None if there is nothing to wait for. `start` takes what is done."""
        # What nobody took, since its requests were aborted, must not pile up.
        done = [other for other, compiling in self._compiling.items() if compiling.done()]
        for other in done[: max(len(done) - _MAX_KEPT, 0)]:
            del self._compiling[other]
        if text in self._compiled:
            self._compiled.move_to_end(text)
            return None
        compiling = self._compiling.get(text)
        if compiling is None or compiling.cancelled():
            compiling = self._compiling[text] = self._thread.submit(self._new_matcher, text)
        return compiling

    def close(self) -> None:
        """Begin to compile nothing more; what waits would otherwise be compiled before the process can end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def start(self, text: str, output_token_ids: Sequence[int]) -> TokenGrammar:
        """The grammar `text` behind output that is already there, after a preemption."""
        grammar = _SlotGrammar(self._compile(text).deep_copy(), lambda: self._compile_alone(text), self._eos_token_ids)
        grammar.commit(output_token_ids)
        return grammar

    def _compile(self, text: str) -> "LLMatcher":
        """The matcher that is kept for all requests with this text."""
        if text not in self._compiled:
            compiling = self._compiling.get(text)
            is_done = compiling is not None and compiling.done() and not compiling.cancelled()
            # If the kept one has gone in between, waiting for the thread would mean for all that stands before it.
            self._compiled[text] = self._compiling.pop(text).result() if is_done else self._new_matcher(text)
            if len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(text)
        return self._compiled[text]

    def _compile_alone(self, text: str) -> "LLMatcher":
        """A matcher that shares nothing, for a request that met a limit; the kept one has met it too and is of no use to anybody."""
        self._compiled.pop(text, None)
        return self._new_matcher(text)

    def _new_matcher(self, text: str) -> "LLMatcher":
        """Never fails: a matcher that could not be made says so itself."""
        if self._tokenizer is None:
            self._tokenizer = read_tokenizer(self._tokenizer_path, self._vocab_size, self._eos_token_ids)
        return compile_grammar(self._tokenizer, text)


def read_tokenizer(path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> "LLTokenizer":
    """A tokenizer.json as masks need it; takes seconds, in which no other thread runs."""
    # Imported here and below: an engine without structured output must run where llguidance is not installed.
    from llguidance import LLTokenizer

    return LLTokenizer(str(path), n_vocab=vocab_size, eos_token=list(eos_token_ids))


def compile_grammar(tokenizer: "LLTokenizer", text: str) -> "LLMatcher":
    """A grammar under the limits, which the engine and the check in front of it share. A matcher that could not be made says so itself."""
    from llguidance import LLMatcher, LLParserLimits

    parser_limits = LLParserLimits(
        max_items_in_row=limits.MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=limits.INITIAL_LEXER_FUEL,
        step_lexer_fuel=limits.STEP_LEXER_FUEL,
        step_max_items=limits.STEP_MAX_ITEMS,
        max_lexer_states=limits.MAX_LEXER_STATES,
        max_grammar_size=limits.MAX_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, text, log_level=0, limits=parser_limits)


class _SlotGrammar:
    """Wraps a matcher so that looking ahead leaves no trace, and a token that ends the text never enters it."""

    def __init__(self, matcher: "LLMatcher", compile_alone: "Callable[[], LLMatcher]", eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._compile_alone = compile_alone
        self._num_renewals = 0
        self._taken: list[int] = []  # what the matcher has consumed
        self._eos_token_ids = eos_token_ids
        self._is_over = False  # a token that ends the text has been committed
        self._blind_at: int | None = None  # how many drafts ahead no mask could be made
        self._failure: str | None = None
        self._num_followed = 0

    @property
    def failure(self) -> str | None:
        return _GAVE_UP if self._failure is None and self._matcher.is_error() else self._failure

    @property
    def num_followed(self) -> int:
        return self._num_followed

    def forced(self, max_tokens: int) -> list[int]:
        ahead = self._matcher.deep_copy()
        tokens = ahead.compute_ff_tokens()[:max_tokens]
        del tokens[self._advance(ahead, tokens) :]  # a text that the tokenizer spells with a special token cannot go on
        if len(tokens) < max_tokens and ahead.is_stopped():
            tokens += self._eos_token_ids[:1]
        return tokens

    def num_allowed(self, drafts: Sequence[int]) -> int:
        ahead = self._matcher.deep_copy()
        num_taken = self._advance(ahead, drafts)
        is_end = num_taken < len(drafts) and drafts[num_taken] in self._eos_token_ids and ahead.is_accepting()
        return num_taken + is_end

    def masks(self, drafts: Sequence[int], first: int, num_rows: int) -> list[bytes]:
        masks, self._blind_at = self._look_ahead(drafts, first, num_rows)
        if self._blind_at is not None and self._renew():
            masks, self._blind_at = self._look_ahead(drafts, first, num_rows)
        return masks

    def commit(self, token_ids: Sequence[int]) -> None:
        blind_at, self._blind_at = self._blind_at, None
        self._num_followed = len(token_ids)
        for index, token_id in enumerate(token_ids):
            if self._is_over:
                return
            if self.failure is not None:
                self._num_followed = index
                return
            if index == blind_at:
                self._failure = _GAVE_UP
            elif token_id in self._eos_token_ids:
                self._is_over = True
            elif not self._take(token_id):
                self._failure = _GAVE_UP if self._matcher.is_error() else _LEFT
            if self._failure is not None:
                self._num_followed = index
                return

    def _look_ahead(self, drafts: Sequence[int], first: int, num_rows: int) -> tuple[list[bytes], int | None]:
        """The masks, and how many drafts ahead a limit was met, if one was."""
        # On a copy, made in microseconds, so that the drafts leave no trace but states of the lexer.
        ahead = self._matcher.deep_copy()
        masks: list[bytes] = []
        blind_at: int | None = None
        is_reached = self.failure is None and self._advance(ahead, drafts[:first]) == first
        for position in range(first, first + num_rows):
            masks.append(ahead.compute_bitmask() if is_reached else b"")
            if is_reached and ahead.is_error():
                masks[-1], blind_at = b"", position
            draft = drafts[position : position + 1]
            is_reached = bool(masks[-1]) and self._advance(ahead, draft) == 1
            if draft and not is_reached and draft[0] not in self._eos_token_ids and _is_in(masks[-1], draft[0]):
                blind_at = position + 1  # allowed, and could not be consumed
        return masks, blind_at

    def _take(self, token_id: int) -> bool:
        is_taken = self._advance(self._matcher, (token_id,)) == 1
        if not is_taken and self._renew():
            is_taken = self._advance(self._matcher, (token_id,)) == 1
        if is_taken:
            self._taken.append(token_id)
        return is_taken

    def _renew(self) -> bool:
        """Go on with a matcher of one's own if another request, or a draft that was not taken, has used up the lexer's states."""
        probe = self._matcher.deep_copy()
        probe.compute_bitmask()
        if self._num_renewals == _MAX_RENEWALS or _LEXER_LIMIT not in probe.get_error():
            return False
        self._num_renewals += 1
        self._matcher = self._compile_alone()
        return self._advance(self._matcher, self._taken) == len(self._taken)

    def _advance(self, matcher: "LLMatcher", token_ids: Sequence[int]) -> int:
        """Take tokens as long as the grammar allows them and none ends the text; returns how many."""
        ends = [index for index, token_id in enumerate(token_ids) if token_id in self._eos_token_ids]
        wanted = list(token_ids[: ends[0]] if ends else token_ids)
        return matcher.try_consume_tokens(wanted) if wanted else 0


def _is_in(mask: bytes, token_id: int) -> bool:
    return token_id // 8 < len(mask) and mask[token_id // 8] >> token_id % 8 & 1 == 1
