"""What the engine learns once at start and reports upward. Frozen; the counterpart of the configuration."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of the start-up table: which implementation serves an op and why."""

    name: str
    implementation: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Sizes and limits that the scheduler and the server plan with."""

    model_name: str
    architecture: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int  # prompt + output tokens of one sequence
    num_pages: int
    page_size: int  # tokens
    target_page_bytes: int
    drafter_page_bytes: int  # 0 if the drafter keeps no KV
    target_weight_bytes: int
    drafter_weight_bytes: int
    drafter: str  # "none", "ngram" or "draft_model"
    drafter_max_len: int  # positions beyond which the drafter cannot propose; max_model_len if unlimited
    max_draft_length: int  # K
    eos_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]

    @property
    def drafter_keeps_kv(self) -> bool:
        return self.drafter_page_bytes > 0
