"""What a client asks for, and how an answer ends.

Made at the HTTP edge or by `llm.py`, carried unchanged to the scheduler. Frozen: nothing downstream edits a request.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

_GREEDY_TEMPERATURE = 1e-5  # below this the law is greedy to any float, and dividing by it overflows
_SEED_MASK = 2**64 - 1


class FinishReason(StrEnum):
    """Why a request ended; the values of OpenAI's `finish_reason`, plus the ways a server can end one."""

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Validated at the edge; the engine trusts the ranges given here."""

    max_tokens: int
    temperature: float = 1.0  # >= 0; 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # (0, 1]; 1 is off
    min_p: float = 0.0  # [0, 1]; 0 is off
    seed: int | None = None  # 64 bits unsigned; where it is None, the edge draws one for a request that samples
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0  # taken off a token's logit if the output holds it
    frequency_penalty: float = 0.0  # taken off for each time that the output holds it
    repetition_penalty: float = 1.0  # > 0; divides a positive logit, multiplies a negative one, of a token in prompt or output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit), ids distinct
    banned_sequences: tuple[tuple[int, ...], ...] = ()  # never appear in the output; none is empty
    min_tokens: int = 0  # before this many output tokens no token ends the answer
    num_logprobs: int | None = None  # likeliest tokens whose log-probability is reported beside the chosen one's; None: report nothing
    num_prompt_logprobs: int | None = None  # the same for each prompt token from the second on
    grammar: str | None = None  # llguidance's text, checked at the edge; the output is in its language unless cut short

    @property
    def adjusts_logits(self) -> bool:
        """Whether the target's logits are changed before temperature and cuts."""
        return self.has_penalties or bool(self.logit_bias or self.banned_sequences) or self.min_tokens > 0 or self.grammar is not None

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on how often tokens have occurred."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def normalised(self, vocab_size: int) -> "SamplingParams":
        """Values that mean the same become the same: the edge takes any `top_k`, any temperature and signed seeds; the engine these."""
        temperature = 0.0 if self.temperature < _GREEDY_TEMPERATURE else self.temperature
        top_k = self.top_k if 0 < self.top_k < vocab_size else 0
        seed = None if self.seed is None else self.seed & _SEED_MASK
        if (temperature, top_k, seed) == (self.temperature, self.top_k, self.seed):
            return self  # nearly always, and a copy of this many fields costs a short request more than making the first
        return replace(self, temperature=temperature, top_k=top_k, seed=seed)


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to run. `prompt_token_ids` is never empty and fits the model's context with room for one token."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float  # time.monotonic(), which Linux shares between processes
    max_draft_length: int | None = None  # None: the engine's own limit; 0: no speculation for this request
    cache_salt: str = ""  # requests share cached prefixes only within one salt
    prediction_token_ids: tuple[int, ...] = ()  # what the client expects of the output; drafts may come from it, and nothing else does
