"""How many blocks a bound still needs. A plan from what was seen, not a promise: it takes the estimate and its spread as they are."""

import math

from paceline.prove.statistics.student import normal_quantile, student_quantile

POWER = 0.8
MAX_BLOCKS = 1_000_000


def blocks_needed(distance: float, standard_error: float, num_blocks: int, alpha: float) -> int | None:
    """Blocks in all until a one-sided bound at `alpha` clears a threshold with 80 %; None where no number would do.

    `distance`: log ratio less the log of the threshold, in the direction of the claim. `standard_error`: at `num_blocks` blocks.
    """
    if distance <= 0 or not math.isfinite(standard_error):
        return None
    per_block = standard_error * math.sqrt(num_blocks)
    wanted = (normal_quantile(alpha) + normal_quantile(1 - POWER)) * per_block / distance
    needed = max(3, math.ceil(wanted * wanted))
    while needed < MAX_BLOCKS:  # Student's wider tails at few blocks
        quantiles = student_quantile(alpha, needed - 2) + normal_quantile(1 - POWER)
        if quantiles * per_block / math.sqrt(needed) <= distance:
            return needed
        needed += max(1, needed // 50)
    return None
