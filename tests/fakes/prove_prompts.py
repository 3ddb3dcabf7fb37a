"""Small data sets for tests of what measures."""

from paceline.prove.datasets.prompt import CATEGORIES, Dataset, Prompt


def make_dataset(num_prompts: int = 11, every_multi: int = 5) -> Dataset:
    """Prompts over the categories in turn; every so many-th has two turns."""
    prompts = tuple(
        Prompt(f"{number:032d}", CATEGORIES[number % len(CATEGORIES)], _turns(number, 2 if number % every_multi == 0 else 1))
        for number in range(num_prompts)
    )
    return Dataset("words (made for a test)", "qualitative", prompts)


def _turns(number: int, num_turns: int) -> tuple[str, ...]:
    return tuple(f"what is {number}" if turn == 0 else f"and after {number}" for turn in range(num_turns))
