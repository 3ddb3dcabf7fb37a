"""The prompt of the law tests and what is tested on it: every sampling option, cut where rounding does not decide.

The prompt is a list of a few words in random order. Prompt lookup and every model that has learned to copy draft the next word with
confidence, and the next word is open: a draft is verified where the law has something to say.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.prove.certificate.law import Options, adjusted_logprobs
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
    without: Options = field(default_factory=Options)  # the law of a server that takes no notice of the option


def list_text(seed: int) -> str:
    """The prompt: words in random order, the last one without what would follow it."""
    rng = random.Random(seed)  # noqa: S311 - a test, no secret
    return "Colours:" + ",".join(rng.choice(WORDS) for _ in range(_NUM_WORDS))


def page_aligned(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The end of the prompt, and its first token, in whole pages and one token."""
    num_pages = (len(token_ids) - 1) // _PAGE
    return token_ids[:1] + token_ids[len(token_ids) - num_pages * _PAGE :] if num_pages else token_ids


def cases(logprobs: Mapping[str, float], context: Sequence[str], word_id: int | None) -> list[Case]:
    """Every option, cut for the law behind `context`, the first one that is tested, whose likeliest tokens have these `logprobs`.

    `word_id`: the token of the first word; None, if no route tells, leaves logit_bias out. Most cases keep the likeliest tokens only,
    which makes a sample cheap and the law exact.
    """
    few = _widest_gap(logprobs, _FEW)
    ranked = sorted(logprobs.values(), reverse=True)
    min_p = round(math.exp((ranked[few - 1] + ranked[few]) / 2 - ranked[0]), 4) if len(ranked) > few else 0.3

    def wide(name: str, fields: Fields, options: Options, num_tokens: int = _SHORT) -> Case:
        top_k = _widest_gap(adjusted_logprobs(logprobs, context, options) or logprobs, _MANY)
        return Case(name, {**fields, "top_k": top_k}, replace(options, top_k=top_k), num_tokens, Options(top_k=top_k))

    top_p = _top_p(ranked)
    found = [
        Case("sampling", {}, Options()),
        wide("temperature", {"temperature": 0.7}, Options(temperature=0.7)),
        Case("top_k", {"top_k": few}, Options(top_k=few)),
        Case("top_p", {"top_p": top_p}, Options(top_p=top_p)),
        wide("min_p", {"min_p": min_p}, Options(min_p=min_p)),
        wide("presence_penalty", {"presence_penalty": 1.5}, Options(presence_penalty=1.5), _LONG),
        wide("frequency_penalty", {"frequency_penalty": 2.0}, Options(frequency_penalty=2.0), _LONG),
        Case("repetition_penalty", {"repetition_penalty": 1.1, "top_k": _MANY.start}, None, _LONG),
        wide("bad_words", {"bad_words": [WORDS[1].strip()]}, Options(banned=frozenset({WORDS[1], WORDS[1].strip()}))),
    ]
    if word_id is not None:
        found.append(wide("logit_bias", {"logit_bias": {str(word_id): 1.5}}, Options(biases={WORDS[0]: 1.5})))
    return found


def _widest_gap(logprobs: Mapping[str, float], counts: range) -> int:
    """How many tokens to keep, so that the last one kept is far from the next."""
    ranked = sorted(logprobs.values(), reverse=True)
    known = [count for count in counts if count < len(ranked)]
    return max(known, key=lambda count: ranked[count - 1] - ranked[count], default=counts.start)


def _top_p(ranked: Sequence[float]) -> float:
    """The cut goes through the middle of a likely token, not of the first."""
    probs = [math.exp(value) for value in ranked]
    if len(probs) < _FEW.stop:
        return 0.6
    middle = max(range(1, _FEW.stop), key=lambda index: probs[index])
    return round(sum(probs[:middle]) + probs[middle] / 2, 4)
