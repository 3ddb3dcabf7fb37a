"""The prompt of the law tests and what is tested on it: every sampling option, cut where rounding does not decide.

The prompt is a list of a few words in random order. Prompt lookup and every model that has learned to copy draft the next word with
confidence, and the next word is open: a draft is verified where the law has something to say.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.prove.certificate.law import Options
from paceline.prove.certificate.server import Fields

NEUTRAL: Fields = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Sent with every sample: servers have defaults of their own, such as llama.cpp's top_k of 40."""
WORDS = (" red", " blue", " green", " black", " white")
_NUM_WORDS = 56
_PAGE = 16  # tokens: prompts of whole pages and one token cost one token each where prefixes are cached
_SHORT, _LONG = 3, 5  # tokens of a sample; a draft can be verified at every one but the first and the last
_FEW, _MANY = range(2, 6), range(8, 15)  # how many tokens a narrow and a wide top-k keep


@dataclass(frozen=True, slots=True)
class Case:
    """One option as it is sent and as a law sees it. `options` None: no law can be computed, so the plain arm is sampled too."""

    name: str
    fields: Fields
    options: Options | None
    num_tokens: int = _SHORT


@dataclass(frozen=True, slots=True)
class Cuts:
    """Values of the options that cut a law, far from any token."""

    few: int = 3
    many: int = 10
    top_p: float = 0.6
    min_p: float = 0.3


def list_text(seed: int) -> str:
    """The prompt: words in random order, the last one without what would follow it."""
    rng = random.Random(seed)  # noqa: S311 - a test, no secret
    return "Colours:" + ",".join(rng.choice(WORDS) for _ in range(_NUM_WORDS))


def page_aligned(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The end of the prompt, and its first token, in whole pages and one token."""
    num_pages = (len(token_ids) - 1) // _PAGE
    return token_ids[:1] + token_ids[len(token_ids) - num_pages * _PAGE :] if num_pages else token_ids


def cuts_for(logprobs: Mapping[str, float]) -> Cuts:
    """Cuts for the law with these likeliest tokens; the usual ones if there are too few."""
    ranked = sorted(logprobs.values(), reverse=True)
    if len(ranked) <= _MANY.stop:
        return Cuts()
    few, many = (max(counts, key=lambda count: ranked[count - 1] - ranked[count]) for counts in (_FEW, _MANY))
    probs = [math.exp(value) for value in ranked]
    widest = max(range(1, _FEW.stop), key=lambda index: probs[index])  # the token that the cut goes through; never the first
    top_p = sum(probs[:widest]) + probs[widest] / 2
    min_p = math.exp((ranked[few - 1] + ranked[few]) / 2 - ranked[0])
    return Cuts(few, many, round(top_p, 4), round(min_p, 4))


def cases(cuts: Cuts, word_id: int | None) -> list[Case]:
    """Every option. `word_id`: the token of the first word; None, if no route tells, leaves logit_bias out.

    Most keep the likeliest tokens only, which makes a sample cheap and the law exact.
    """
    many = {"top_k": cuts.many}
    found = [
        Case("sampling", {}, Options()),
        Case("temperature", {"temperature": 0.7, **many}, Options(temperature=0.7, top_k=cuts.many)),
        Case("top_k", {"top_k": cuts.few}, Options(top_k=cuts.few)),
        Case("top_p", {"top_p": cuts.top_p}, Options(top_p=cuts.top_p)),
        Case("min_p", {"min_p": cuts.min_p, **many}, Options(min_p=cuts.min_p, top_k=cuts.many)),
        Case("presence_penalty", {"presence_penalty": 1.5, **many}, Options(presence_penalty=1.5, top_k=cuts.many), _LONG),
        Case("frequency_penalty", {"frequency_penalty": 1.5, **many}, Options(frequency_penalty=1.5, top_k=cuts.many), _LONG),
        Case("repetition_penalty", {"repetition_penalty": 1.3, **many}, None, _LONG),
    ]
    banned = frozenset({WORDS[1], WORDS[1].strip()})
    found.append(Case("bad_words", {"bad_words": [WORDS[1].strip()], **many}, Options(banned=banned, top_k=cuts.many)))
    if word_id is not None:
        biased = Options(biases={WORDS[0]: 1.5}, top_k=cuts.many)
        found.append(Case("logit_bias", {"logit_bias": {str(word_id): 1.5}, **many}, biased))
    return found
