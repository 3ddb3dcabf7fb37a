"""The law of the next token under sampling options, from the likeliest tokens' log-probabilities. Pure; called by `law_tests.py`.

A server gives some twenty log-probabilities of its unaltered law. Under many options that is enough: the law is then exact, with one
bin for all other tokens. Where it is not enough, or where a token sits so near to a cut that rounding decides, there is no answer.

Order of the options, as in vLLM and here: penalties and biases, bans, temperature, top-k, top-p, min-p.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

CUT_MARGIN = 0.05
"""Nats. Tokens nearer than this to a cut may fall on either side of it in low precision."""
_MASS_MARGIN = 0.01
"""The same for the mass that top-p counts."""


@dataclass(frozen=True, slots=True)
class Options:
    """Sampling options as a law sees them. Tokens are named by their text, as log-probabilities name them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    biases: Mapping[str, float] = field(default_factory=dict[str, float])
    banned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Law:
    """Probabilities of tokens; `rest` is that of all others together, 0 where none of them can come."""

    probs: Mapping[str, float]
    rest: float


def law_of(logprobs: Mapping[str, float], output: Sequence[str], options: Options) -> Law | None:
    """The law of the token behind `output`, the answer so far; None if these log-probabilities do not determine it.

    `logprobs`: of the likeliest tokens, without any option.
    """
    if not logprobs:
        return None
    floor = min(logprobs.values())  # no other token is likelier
    adjusted = adjusted_logprobs(logprobs, output, options)
    if adjusted is None:
        return None
    if options.top_k:
        kept = _top_k(adjusted, floor, options)
        if kept is None:
            return None
        weights, rest = kept, 0.0
    elif options.temperature != 1:
        return None  # the others' share depends on each of them
    else:
        weights = {token: math.exp(value) for token, value in adjusted.items()}
        rest = max(0.0, 1 - sum(math.exp(value) for value in logprobs.values()))
    total = sum(weights.values()) + rest
    probs = dict(sorted(((token, weight / total) for token, weight in weights.items()), key=lambda item: -item[1]))
    law: Law | None = Law(probs, rest / total)
    if options.top_p < 1:
        law = _top_p(law, options.top_p)
    if law is not None and options.min_p > 0:
        law = _min_p(law, math.exp(floor) / total, options.min_p)
    return law


def adjusted_logprobs(logprobs: Mapping[str, float], output: Sequence[str], options: Options) -> dict[str, float] | None:
    """With penalties, biases and bans, not normalised; None if one of them raises a token that is not among these."""
    counts = {token: output.count(token) for token in output}
    shifts: dict[str, float] = {}
    if options.presence_penalty or options.frequency_penalty:
        shifts = {token: -options.presence_penalty - options.frequency_penalty * count for token, count in counts.items()}
    for token, bias in options.biases.items():
        shifts[token] = shifts.get(token, 0.0) + bias
    if any(shift > 0 and token not in logprobs for token, shift in shifts.items()):
        return None  # raised from nobody knows where
    return {token: value + shifts.get(token, 0.0) for token, value in logprobs.items() if token not in options.banned}


def _top_k(adjusted: Mapping[str, float], floor: float, options: Options) -> dict[str, float] | None:
    """Weights of the k likeliest; None if the k-th is not known for sure."""
    ranked = sorted(adjusted.items(), key=lambda item: -item[1])
    if len(ranked) < options.top_k:
        return None
    last = ranked[options.top_k - 1][1]
    after = max(floor, ranked[options.top_k][1]) if len(ranked) > options.top_k else floor
    if last - after < CUT_MARGIN:
        return None
    top = ranked[0][1]
    return {token: math.exp((value - top) / options.temperature) for token, value in ranked[: options.top_k]}


def _top_p(law: Law, top_p: float) -> Law | None:
    """The smallest set of likeliest tokens with mass `top_p`."""
    kept: dict[str, float] = {}
    mass = 0.0
    ranked = list(law.probs.items())
    for index, (token, prob) in enumerate(ranked):
        kept[token] = prob
        mass += prob
        if abs(mass - top_p) < _MASS_MARGIN:
            return None
        if mass > top_p:
            is_open = index + 1 < len(ranked) and math.log(prob / max(ranked[index + 1][1], 1e-300)) < CUT_MARGIN
            return None if is_open else Law({token: prob / mass for token, prob in kept.items()}, 0.0)
    return None


def _min_p(law: Law, rest_prob: float, min_p: float) -> Law | None:
    """Tokens of at least `min_p` times the top probability; `rest_prob`: the most that any other token has."""
    least = min_p * max(law.probs.values())
    if law.rest > 0 and rest_prob >= least * math.exp(-CUT_MARGIN):
        return None
    if any(prob > 0 and abs(math.log(prob / least)) < CUT_MARGIN for prob in law.probs.values()):
        return None
    kept = {token: prob for token, prob in law.probs.items() if prob >= least}
    mass = sum(kept.values())
    return Law({token: prob / mass for token, prob in kept.items()}, 0.0)
