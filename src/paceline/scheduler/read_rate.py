"""How much memory decode steps must read per second, whatever they draft: the target's weights once and the KV of all rows' tokens.

Over the machine's bandwidth this tells how close decoding is to what the memory allows. The scheduler reports each committed step.
"""

from paceline.core.facts import EngineFacts
from paceline.scheduler.observation import StepObservation

_MEMORY = 1 - 1 / 256  # of the mean, per step


class ReadRate:
    """A recent mean over steps without prompt chunks: bytes by seconds, both fading alike."""

    def __init__(self, facts: EngineFacts) -> None:
        self._weight_bytes = facts.target_weight_bytes
        self._token_bytes = facts.target_page_bytes / facts.page_size
        self._bytes = 0.0
        self._s = 0.0

    def observe_step(self, step: StepObservation) -> None:
        if not step.has_prefill:
            self._bytes = _MEMORY * self._bytes + self._weight_bytes + step.num_context_tokens * self._token_bytes
            self._s = _MEMORY * self._s + step.duration_ms / 1e3

    def bytes_per_s(self) -> float:
        """0 before the first step."""
        return self._bytes / self._s if self._s else 0.0
