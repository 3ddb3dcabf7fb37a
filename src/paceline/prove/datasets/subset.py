"""Which prompts of a data set are asked, and in which order: by category, a number of requests per category, mixed evenly.

Called by `paceline prove` after `load.py`. Everything here is a function of the data and a seed: no generator, no clock.
"""

import hashlib
import math
from collections.abc import Sequence

from paceline.errors import BadInputError
from paceline.prove.datasets.prompt import Dataset, Prompt

MAX_PER_CATEGORY = 10_000


def categories(dataset: Dataset) -> tuple[str, ...]:
    """The categories that the data has, in the order in which they first come."""
    return tuple(dict.fromkeys(prompt.category for prompt in dataset.prompts))


def only(dataset: Dataset, names: Sequence[str]) -> Dataset:
    """The prompts of some categories, in the data's order.

    Raises:
        BadInputError: no name, or one that the data has not.
    """
    known = categories(dataset)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise BadInputError(f"no category {', '.join(unknown) or 'is named'}; {dataset.label} has {', '.join(known)}")
    prompts = tuple(prompt for prompt in dataset.prompts if prompt.category in names)
    return Dataset(f"{dataset.label}, only {', '.join(dict.fromkeys(names))}", dataset.split, prompts)


def take(dataset: Dataset, num_per_category: int, seed: int = 0) -> Dataset:
    """Exactly `num_per_category` requests of every category, mixed evenly: every turn of a conversation is a request.

    Conversations are whole. Each category that has one of several turns gets at least one such, if two requests or more are asked for;
    beyond it the conversations come as they fall in the seeded order, so their mix is the data's.

    Raises:
        BadInputError: out of range; more than a category has; or its conversations cannot add up to that number.
    """
    if not 1 <= num_per_category <= MAX_PER_CATEGORY:
        raise BadInputError(f"{num_per_category} requests per category is out of range; between 1 and {MAX_PER_CATEGORY:,}")
    chosen = [
        prompt
        for name in categories(dataset)
        for prompt in _exactly(num_per_category, [prompt for prompt in dataset.prompts if prompt.category == name], seed)
    ]
    label = f"{dataset.label}, {num_per_category} request{'s' if num_per_category > 1 else ''} per category"
    return interleave(Dataset(label, dataset.split, tuple(chosen)), seed)


def shortest(dataset: Dataset, num_per_category: int) -> Dataset:
    """The shortest quarter of every category, by the characters of what is sent; those of one, of two and of more turns each by themselves.

    So every category stays and keeps its share of conversations. At least `num_per_category` of each are kept, where there are as many:
    `take` finds that many requests among them whenever it would in the whole. A function of the texts alone: the data's order plays no
    part, and ties go by id.
    """
    groups: dict[tuple[str, int], list[Prompt]] = {}
    for prompt in dataset.prompts:
        groups.setdefault((prompt.category, len(prompt.turns)), []).append(prompt)
    kept: set[str] = set()
    for group in groups.values():
        ordered = sorted(group, key=lambda prompt: (_num_chars(prompt), prompt.question_id))
        kept.update(prompt.question_id for prompt in ordered[: max(math.ceil(len(group) / 4), num_per_category)])
    prompts = tuple(prompt for prompt in dataset.prompts if prompt.question_id in kept)
    return Dataset(f"{dataset.label}, the shortest quarter of each category", dataset.split, prompts)


def _num_chars(prompt: Prompt) -> int:
    return len(prompt.system) + sum(map(len, prompt.turns))


def interleave(dataset: Dataset, seed: int = 0) -> Dataset:
    """The same prompts with every category spread evenly over the order, so that each stretch of it holds the mix of the whole."""
    names = sorted(categories(dataset), key=lambda name: _place(seed, name))
    places: list[tuple[float, int, Prompt]] = []
    for number, name in enumerate(names):
        prompts = _in_seeded_order([prompt for prompt in dataset.prompts if prompt.category == name], seed)
        places += [((rank + 0.5) / len(prompts), number, prompt) for rank, prompt in enumerate(prompts)]
    places.sort(key=lambda place: place[:2])
    return Dataset(dataset.label, dataset.split, tuple(prompt for _, _, prompt in places))


def _place(seed: int, name: str) -> bytes:
    """A place in an order that is random and the same on every machine and version of Python."""
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


def _in_seeded_order(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    return sorted(prompts, key=lambda prompt: _place(seed, prompt.question_id))


def _exactly(num: int, prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """Conversations of one category whose turns add up to `num`."""
    name, total = prompts[0].category, sum(len(prompt.turns) for prompt in prompts)
    if total < num:
        raise BadInputError(f"{name} has {total} requests, asked for {num} per category; ask for at most {total}, or name other categories")
    ordered = _in_seeded_order(prompts, seed)[: max(64, 2 * num)]
    # Half of the requests at most: the first conversation must not be all that a category asks.
    first = [prompt for prompt in ordered if 2 <= len(prompt.turns) <= max(2, num // 2)]
    for lead in [*first[:8], None]:
        rest = [prompt for prompt in ordered if prompt is not lead]
        missing = num - (len(lead.turns) if lead else 0)
        found = _adding_up(missing, rest) if missing >= 0 else None
        if found is not None:
            return [lead, *found] if lead else found
    turns = sorted({len(prompt.turns) for prompt in prompts})
    raise BadInputError(
        f"{name} has no conversations that add up to {num} requests: theirs have {', '.join(map(str, turns))} turns; "
        f"ask for a multiple of {turns[0]} per category"
    )


def _adding_up(num: int, prompts: Sequence[Prompt]) -> list[Prompt] | None:
    """The first prompts in their order whose turns add up to `num`, or None. Bit s of `reach[i]`: the prompts from i on can make s."""
    mask, reach = (1 << (num + 1)) - 1, [1]
    for prompt in reversed(prompts):
        reach.append((reach[-1] | reach[-1] << len(prompt.turns)) & mask)
    reach.reverse()
    if not reach[0] >> num & 1:
        return None
    found: list[Prompt] = []
    for prompt, after in zip(prompts, reach[1:], strict=True):
        left = num - len(prompt.turns)
        if left >= 0 and after >> left & 1:
            found.append(prompt)
            num = left
    return found
