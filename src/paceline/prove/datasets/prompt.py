"""What a data set gives: conversations in a fixed order under a content hash. Loaders make them, the schedule takes them."""

import hashlib
import json
from dataclasses import dataclass

CATEGORIES = (
    "coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem", "summarization", "writing",
)  # fmt: skip
"""SPEED-Bench's category names (its `qualitative` split), in its order."""

ENTROPY_TIERS = ("low_entropy", "mixed", "high_entropy")
"""SPEED-Bench's category names in its throughput splits."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation: what the user says, turn by turn. The answers in between are the model's own."""

    question_id: str  # unique within a data set; 32 characters, as SPEED-Bench has it
    category: str
    turns: tuple[str, ...]  # at least one; user turns only
    system: str = ""  # the system message, if the data set has one
    source: str = ""  # where the text comes from


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prompts in the order in which they are asked."""

    label: str  # as every table names it, such as "speed-bench-like v1 (not SPEED-Bench), qualitative"
    split: str  # qualitative, throughput_1k, ...
    prompts: tuple[Prompt, ...]

    @property
    def sha256(self) -> str:
        """Over ids, categories and texts in order: two runs with one hash asked the same."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(json.dumps([prompt.question_id, prompt.category, prompt.system, *prompt.turns]).encode())
        return digest.hexdigest()
