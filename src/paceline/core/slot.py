"""The device half's view of one running sequence. Owned and changed by `executor/slots.py`, read by drafters."""

from dataclasses import dataclass

from paceline.core.request import SamplingParams


@dataclass(slots=True)
class Slot:
    """True state of a slot after all steps run so far. `token_ids` holds committed tokens only."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    page_ids: list[int]
    num_computed_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens
