"""What a client asks for, and how an answer ends.

Made at the HTTP edge or by `llm.py`, carried unchanged to the scheduler. Frozen: nothing downstream edits a request.
"""

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended; the values of OpenAI's `finish_reason`, plus the ways a server can end one."""

    STOP = "stop"
    LENGTH = "length"
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


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to run. `prompt_token_ids` is never empty and fits the model's context with room for one token."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float  # time.monotonic(), which Linux shares between processes
    max_draft_length: int | None = None  # None: the engine's own limit; 0: no speculation for this request
    cache_salt: str = ""  # requests share cached prefixes only within one salt
