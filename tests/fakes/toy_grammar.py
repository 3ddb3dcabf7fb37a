"""A grammar over three tokens that says what may follow what: small enough to write its law down."""

from collections.abc import Sequence

ALLOWED: dict[int | None, tuple[int, ...]] = {None: (0, 1, 2), 0: (0, 1), 1: (2,), 2: (0, 1)}
"""By the token before, None at the start. Behind 1 there is no choice."""


class ToyGrammar:
    """Has the shape of `core.grammar.TokenGrammar`."""

    failure = None

    def __init__(self, output: Sequence[int]) -> None:
        self.num_followed = 0
        self._last = output[-1] if output else None

    def forced(self, max_tokens: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < max_tokens and len(allowed := ALLOWED[tokens[-1] if tokens else self._last]) == 1:
            tokens += allowed
        return tokens

    def num_allowed(self, drafts: Sequence[int]) -> int:
        pairs = zip((self._last, *drafts), drafts, strict=False)
        return next((i for i, (before, token) in enumerate(pairs) if token not in ALLOWED[before]), len(drafts))

    def masks(self, drafts: Sequence[int], first: int, num_rows: int) -> list[bytes]:
        before, num_reached = (self._last, *drafts), self.num_allowed(drafts)
        return [
            bytes([sum(1 << token for token in ALLOWED[before[position]])]) if position <= num_reached else b""
            for position in range(first, first + num_rows)
        ]

    def commit(self, token_ids: Sequence[int]) -> None:
        self.num_followed = len(token_ids)
        self._last = (self._last, *token_ids)[-1]
