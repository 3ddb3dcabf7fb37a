"""Which candidates are taken: few that resemble each other, of all lengths. SPEED-Bench minimises the sum of pairwise similarities of
embeddings (arXiv 2604.09557, section 3); here similarity is that of the sets of words, which needs no model and is the same everywhere.
"""

import hashlib
import re
from collections.abc import Sequence

NUM_STRATA = 4


def order_of(text: str) -> bytes:
    """A place in an order that is random, and the same on every machine."""
    return hashlib.sha256(text.encode()).digest()


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w{3,}", text.lower()))


def diverse(candidates: Sequence[str], num: int) -> list[str]:
    """`num` of the candidates: in turn from quarters by length, each time the one least like those that were taken.

    Similarity is the Jaccard index of the words; the sum over those taken decides, and a hash of the text where sums are equal.
    """
    if len(candidates) < num:
        raise SystemExit(f"{num} prompts wanted of {len(candidates)} candidates")
    ordered = sorted(candidates, key=lambda text: (len(text), order_of(text)))
    size = -(-len(ordered) // NUM_STRATA)
    strata = [sorted(ordered[start : start + size], key=order_of) for start in range(0, len(ordered), size)]
    bags = {text: words(text) for text in ordered}
    sums = dict.fromkeys(ordered, 0.0)
    taken: list[str] = []
    while len(taken) < num:
        stratum = strata[len(taken) % len(strata)]
        if not stratum:
            strata.remove(stratum)
            continue
        best = min(stratum, key=lambda text: sums[text])
        stratum.remove(best)
        taken.append(best)
        for text in (text for others in strata for text in others):
            num_shared = len(bags[text] & bags[best])
            if num_shared:
                sums[text] += num_shared / (len(bags[text]) + len(bags[best]) - num_shared)
    return taken
