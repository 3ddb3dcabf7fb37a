"""The servers of a measurement, one for each arm, and what has to be known of the two together. For `measure.py`."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import BadInputError
from paceline.prove.client import ChatClient
from paceline.prove.counters import Meter
from paceline.prove.plan import Plan, ServerFacts
from paceline.prove.record import Arm
from paceline.prove.tokens import TokenCounter


@dataclass(slots=True)
class Side:
    """One arm's server."""

    client: ChatClient
    meter: Meter
    facts: ServerFacts
    tokens: TokenCounter | None = None  # for a server that does not count


def check_comparable(plan: Plan, sides: dict[Arm, Side]) -> None:
    """Raise BadInputError where one server has both arms and does not show that it can tell them apart."""
    if len(plan.arms) < 2 or plan.baseline_url is not None:
        return
    facts = sides[Arm.BASELINE].facts
    if facts.honours_draft_length or (facts.honours_draft_length is None and facts.kind == "paceline"):
        return
    raise BadInputError(
        f"{facts.base_url} does not show that it can decode without drafts when a request asks for it (max_draft_length: 0); "
        "start a second server without a drafter and give its URL as --baseline-url"
    )


def of_shared_cache(plan: Plan, sides: dict[Arm, Side]) -> list[str]:
    """A warning where both arms ask one server and nothing shows that its cache keeps their prompts apart."""
    if plan.baseline_url is not None or len(sides) < 2:
        return []
    facts = sides[Arm.BASELINE].facts
    if facts.separates_salts:
        return []
    seen = "does not keep" if facts.separates_salts is False else "does not show whether it keeps"
    return [
        f"{facts.base_url} {seen} requests with another cache_salt apart in its prefix cache, and both arms ask it: the arm that comes "
        "second may find the first one's prompts there; start the server without prefix caching, or look at the cached tokens"
    ]


def uncertain_caches(plan: Plan, sides: Mapping[Arm, Side]) -> str | None:
    """What may favour the plain arm of a replay: from the second turn on it is given what it said itself, and may have it in its cache."""
    unknown = sorted({side.facts.base_url for side in sides.values() if side.facts.separates_salts is not True})
    if plan.baseline_url is None or not unknown or all(len(prompt.turns) == 1 for prompt in plan.dataset.prompts):
        return None
    return (
        f"{' and '.join(unknown)} may answer replayed turns from a prefix cache that holds the plain arm's own answers: a cache_salt "
        "was not seen to keep them apart; start the servers without prefix caching, or look at the cached tokens"
    )


def told(plan: Plan) -> dict[str, object]:
    """The plan as a journal keeps it: without the key, and of the data set the hash."""
    return {
        "base_url": plan.base_url,
        "baseline_url": plan.baseline_url,
        "model": plan.model,
        "dataset": plan.dataset.label,
        "split": plan.dataset.split,
        "dataset_sha256": plan.dataset.sha256,
        "num_prompts": len(plan.dataset.prompts),
        "concurrencies": plan.concurrencies,
        "rates_per_s": plan.rates_per_s,
        "num_blocks": plan.num_blocks,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "draft_lengths": plan.draft_lengths,
        "arms": plan.arms,
        "timeout_s": plan.timeout_s,
        "ignore_eos": plan.ignore_eos,
        "warm_up_tokens": plan.warm_up_tokens,
        "replay": plan.replay,
    }
