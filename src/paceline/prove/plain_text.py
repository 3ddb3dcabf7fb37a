"""Whether prompts are text that someone could have written, or tokens drawn at random. For `fairness.py`.

Random tokens overstate speculation (SPEED-Bench measured 23 %): models answer noise with set phrases. In every language few words make up
much of a text, so two words picked blindly from one prompt are the same with probability 0.005 to 0.03 (measured over public prompts in
eleven languages and in code); of decoded random tokens it is below 0.001. That needs no dictionary, and no script is a stranger to it.
"""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.prove.datasets.prompt import Prompt

MIN_COINCIDENCE = 0.002
LONG_TEXT_UNITS = 100  # from here on one text is judged by itself; shorter ones of a category together
MIN_WORD_PAIRS = 2_000  # fewer tell nothing: at 0.005, ten of them would be equal

# Scripts from Thai on, but for a few alphabets with spaces, are written without spaces or in syllables: each letter is a unit.
_FIRST_UNSPACED = 0x0E00
_SPACED_BEYOND = ((0x10A0, 0x10FF), (0x1E00, 0x1FFF))  # Georgian; Latin and Greek with more accents


@dataclass(frozen=True, slots=True)
class TextCheck:
    """Shares of a set's words that stand in texts that look random."""

    random_share: float
    random_categories: tuple[str, ...]  # where it is more than half


def check_text(prompts: Iterable[Prompt]) -> TextCheck:
    """Judge each long prompt by itself and the short ones of each category together, by coincidences within prompts."""
    num_units: Counter[str] = Counter()
    num_random: Counter[str] = Counter()
    short: dict[str, list[list[str]]] = defaultdict(list)
    for prompt in prompts:
        words = units("\n".join((prompt.system, *prompt.turns)))
        num_units[prompt.category] += len(words)
        if len(words) < LONG_TEXT_UNITS:
            short[prompt.category].append(words)
        elif looks_random([words]):
            num_random[prompt.category] += len(words)
    for category, texts in short.items():
        if looks_random(texts):
            num_random[category] += sum(len(words) for words in texts)
    return TextCheck(
        random_share=num_random.total() / max(num_units.total(), 1),
        random_categories=tuple(sorted(category for category in num_random if 2 * num_random[category] > num_units[category])),
    )


def looks_random(texts: Iterable[list[str]]) -> bool:
    """Whether words repeat too rarely within these texts. False where there is too little to tell."""
    num_equal = num_pairs = 0
    for words in texts:
        num_pairs += len(words) * (len(words) - 1) // 2
        num_equal += sum(count * (count - 1) // 2 for count in Counter(words).values())
    return num_pairs >= MIN_WORD_PAIRS and num_equal < MIN_COINCIDENCE * num_pairs


def units(text: str) -> list[str]:
    """Words in lower case, or letters where a script does not part its words by spaces."""
    found: list[str] = []
    word: list[str] = []
    for letter in text:
        if unicodedata.category(letter)[0] not in "LM":
            _end_word(word, found)
        elif _is_unspaced(ord(letter)):
            _end_word(word, found)
            found.append(letter)
        else:
            word.append(letter.lower())
    _end_word(word, found)
    return found


def _end_word(word: list[str], found: list[str]) -> None:
    if word:
        found.append("".join(word))
        word.clear()


def _is_unspaced(code: int) -> bool:
    return code >= _FIRST_UNSPACED and not any(low <= code <= high for low, high in _SPACED_BEYOND)
