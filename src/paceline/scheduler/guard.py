"""The solvent guard: what speculation may still lose before it has to stop, whatever the drafter does and whatever was estimated.

The account compares the time that plain decoding would have needed for the emitted tokens with the time that was spent; the drafter's
time counts in every step, prompt chunks included. Whatever costs more than a call with nothing to do is asked for first, so
total <= 1.01 x plain + 50 plain steps of whatever batch is at hand, plus by how much the slowest single drafter call exceeds what was
expected of it. For that the 50 are steps of one row at the highest speed seen, than which no step that may follow is shorter. The plain
time is an estimate, from plain steps of the same range of batch and context. Plain arithmetic; the policy owns one.
"""

MAX_LOST_STEPS = 50
"""Plain steps that may be lost, at any time; the constant of the bound."""
MAX_LOST_SHARE = 0.01 / 1.01
"""Share of all decoding time that may be lost, once that is more: 1 % of what plain decoding would have taken."""
DRAFTING_SHARE = 0.8
"""Of what may be lost, the part that ordinary drafting may use; the rest is for trials, without which nothing would come back."""


class Account:
    """A balance that is never above 0: what was gained is the users' and pays for no later loss beyond the same limit.

    So not only the whole but every stretch of the traffic loses at most the limit that holds at its end.
    """

    def __init__(self) -> None:
        self.balance_ms = 0.0
        self.elapsed_ms = 0.0

    def spend(self, duration_ms: float) -> None:
        """Counts a step's time; alone, it changes the balance by nothing."""
        self.elapsed_ms += duration_ms

    def credit(self, gained_ms: float) -> None:
        """Books what a step gained against plain decoding; a loss is negative."""
        self.balance_ms = min(self.balance_ms + gained_ms, 0.0)

    def limit_ms(self, least_plain_ms: float) -> float:
        """What may be lost at most, where no plain step to come is shorter than `least_plain_ms`."""
        return max(MAX_LOST_STEPS * least_plain_ms, MAX_LOST_SHARE * self.elapsed_ms)

    def can_lose(self, worst_ms: float, least_plain_ms: float, share: float = 1.0) -> bool:
        """Whether the balance stays within `share` of the limit if the step to come loses `worst_ms`."""
        return self.balance_ms - worst_ms >= -share * self.limit_ms(least_plain_ms)
