"""What a grammar says about one slot's next tokens, and how large a grammar may grow. Host half; knows no library.

Made by `executor/grammar.py`, read by the drafters and by `speculative/adjust.py`, which asks for every draft position.
"""

from collections.abc import Sequence
from typing import Protocol

MAX_ITEMS_IN_ROW = 2000
STEP_LEXER_FUEL = 200_000  # with the next, what a hostile grammar may cost the others in each step: 60 ms for a mask, more for wide unions
STEP_MAX_ITEMS = 20_000  # enough for a union of 1,000 objects; with 50,000 an ambiguous grammar of 40 bytes takes 500 ms for each mask
INITIAL_LEXER_FUEL = 1_000_000
MAX_LEXER_STATES = 50_000  # 1-2 KB each
MAX_GRAMMAR_SYMBOLS = 200_000


class TokenGrammar(Protocol):
    """The state of one grammar behind the committed output of one slot."""

    @property
    def failure(self) -> str | None:
        """Why the grammar cannot be followed any more; the request has to end. None: all is well."""
        ...

    @property
    def num_followed(self) -> int:
        """Of the tokens of the last `commit`, how many came before the failure; all of them without one."""
        ...

    def forced(self, max_tokens: int) -> list[int]:
        """The only tokens that can come next, in their usual spelling; at most `max_tokens`, empty where there is a choice."""
        ...

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """How many leading drafts the grammar allows."""
        ...

    def masks(self, drafts: Sequence[int], first: int, num_rows: int) -> list[bytes]:
        """The tokens that may follow `drafts[: first + i]` for each i below `num_rows`: bit `id % 8` of byte `id // 8` is set.

        Empty for a row that is never reached, since a draft before it is not allowed or ends the text.
        """
        ...

    def commit(self, token_ids: Sequence[int]) -> None:
        """Go on behind new output. What follows a token that ends the text is no output."""
        ...
