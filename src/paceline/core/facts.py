"""What the engine learns once at start and reports upward. Frozen; the counterpart of the configuration."""

from dataclasses import dataclass

from paceline.errors import BadInputError


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of the start-up table: which implementation serves an op and why."""

    name: str
    implementation: str
    reason: str


@dataclass(frozen=True, slots=True)
class TargetCost:
    """One measured kind of decode step of the target, sampling included."""

    num_rows: int
    num_tokens: int  # all rows together
    num_context_tokens: int  # of each row
    ms: float


@dataclass(frozen=True, slots=True)
class DrafterCost:
    """One measured kind of proposal, by a drafter that has caught up."""

    num_rows: int
    num_drafts: int  # of each row
    ms: float


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What steps took at start, on a coarse grid; empty if nothing was measured. What is not in it is learned from live steps."""

    target: tuple[TargetCost, ...] = ()
    drafter: tuple[DrafterCost, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Sizes and limits that the scheduler and the server plan with."""

    model_name: str
    architecture: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int  # prompt + output tokens of one sequence
    max_position_embeddings: int  # the model's own limit, which max_model_len can be raised to
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
    step_costs: StepCosts = StepCosts()
    memory_bandwidth: float = 0.0  # bytes/s that all threads together read at start; 0 if that was not measured

    @property
    def drafter_keeps_kv(self) -> bool:
        return self.drafter_page_bytes > 0

    def check_prompt(self, num_tokens: int, param: str = "prompt") -> None:
        """Raise BadInputError for a prompt of so many tokens that no room is left for one output token."""
        if num_tokens < self.max_model_len:
            return
        raise BadInputError(
            f"prompt has {num_tokens:,} tokens, limit {self.max_model_len:,}, the answer included; "
            f"shorten it{self.or_longer_context(num_tokens + 1)}",
            param=param,
            code="context_length_exceeded",
        )

    def or_longer_context(self, num_tokens: int) -> str:
        """The end of a remedy: ` or start with --max-model-len N` for this many tokens, nothing if the model has fewer positions."""
        if num_tokens > self.max_position_embeddings:
            return ""
        length = min(1 << (num_tokens - 1).bit_length(), self.max_position_embeddings)
        memory = " and a larger --kv-cache-memory-bytes" if length > self.num_pages * self.page_size else ""
        return f" or start with --max-model-len {length}{memory}"
