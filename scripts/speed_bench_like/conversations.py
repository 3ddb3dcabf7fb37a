"""Conversations of the set as rows, and the shares of single and several turns that every category has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.prove.datasets.rows import text_id

NUM_PER_CATEGORY = 80
CHAINS = (2, 3, 3, 4, 4, 5)
"""Turns of the conversations that chain questions, beside MT-Bench's ten of two turns."""
LONE_CHAINS = (2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5)
"""The same where MT-Bench has none. Each way a fifth of the 80 has several turns, as in SPEED-Bench (167 of 880)."""
NUM_SINGLE = NUM_PER_CATEGORY - len(LONE_CHAINS)


@dataclass(frozen=True)
class Conversation:
    category: str
    source: str
    turns: tuple[str, ...]

    def row(self) -> dict[str, object]:
        return {
            "question_id": text_id(self.category, "", self.turns),
            "category": self.category,
            "turns": list(self.turns),
            "source": self.source,
        }


def singles(category: str, source: str, texts: Sequence[str]) -> Iterator[Conversation]:
    for text in texts:
        yield Conversation(category, source, (text,))


def chained(category: str, source: str, texts: Sequence[str], lengths: Sequence[int] = CHAINS) -> Iterator[Conversation]:
    """Questions of one category one after the other, as SPEED-Bench chains MMLU-Pro's; uses `sum(lengths)` texts."""
    assert len(texts) == sum(lengths), (len(texts), sum(lengths))
    rest = iter(texts)
    for length in lengths:
        yield Conversation(category, source, tuple(next(rest) for _ in range(length)))


def followed(category: str, source: str, texts: Sequence[str], requests: Sequence[tuple[str, ...]]) -> Iterator[Conversation]:
    """Texts with requests that follow on the answer, in turn."""
    for number, text in enumerate(texts):
        yield Conversation(category, source, (text, *requests[number % len(requests)]))
