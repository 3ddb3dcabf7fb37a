"""The device half's view of one running sequence. Owned and changed by `executor/slots.py`, read by drafters."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.grammar import TokenGrammar
from paceline.core.request import SamplingParams


@dataclass(slots=True)
class TokenCounts:
    """Which tokens have occurred; kept only for requests whose penalties ask."""

    prompt: frozenset[int]
    output: Counter[int]


@dataclass(slots=True)
class Slot:
    """True state of a slot after all steps run so far. `token_ids` holds committed tokens only."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    page_ids: list[int]
    num_computed_tokens: int
    stop_token_ids: tuple[int, ...] = ()  # every token that ends the sequence
    prediction_token_ids: tuple[int, ...] = ()  # output that the client expects
    grammar: TokenGrammar | None = None  # of a request that asks for one, behind `token_ids`
    counts: TokenCounts | None = field(init=False)

    def __post_init__(self) -> None:
        """After preemption `token_ids` holds output too, and the counts begin with it."""
        self.counts = None
        if self.sampling.has_penalties:
            prompt, output = self.token_ids[: self.num_prompt_tokens], self.token_ids[self.num_prompt_tokens :]
            self.counts = TokenCounts(frozenset(prompt), Counter(output))

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_ids: Sequence[int]) -> None:
        """Commit new output."""
        self.token_ids.extend(token_ids)
        if self.counts is not None:
            self.counts.output.update(token_ids)
        if self.grammar is not None:
            self.grammar.commit(token_ids)
