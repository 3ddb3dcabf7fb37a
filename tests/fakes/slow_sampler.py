"""The sampling options as they are written down, one token and one row after the other, in Python's floats and nothing of the engine's.

What plain decoding must choose (`slow_choice`) and the law that it must have (`slow_law`). The tests of equality and of the law use it.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch

from paceline.core.request import SamplingParams
from paceline.speculative.noise import gumbel


def adjusted(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams, stops: Sequence[int]
) -> list[float]:
    """Penalties, then bias, then bans on the logits of the token after `output`. `stops`: all tokens that end the answer."""
    bias, counts, row = dict(sampling.logit_bias), Counter(output), list[float]()
    for token, score in enumerate(logits):
        if token in counts or token in prompt:
            score = score / sampling.repetition_penalty if score > 0 else score * sampling.repetition_penalty
        score -= sampling.frequency_penalty * counts[token]
        score -= sampling.presence_penalty * (token in output)
        score += bias.get(token, 0.0)
        is_early_stop = token in stops and len(output) < sampling.min_tokens
        is_banned = any(banned[-1] == token and (*output, token)[-len(banned) :] == banned for banned in sampling.banned_sequences)
        row.append(-math.inf if is_early_stop or is_banned else score)
    return row


def survivors(row: Sequence[float], sampling: SamplingParams) -> dict[int, float]:
    """Tokens that temperature, then top-k, top-p and min-p leave, with weights relative to the likeliest; equals rank by rising id."""
    scaled = [score / _f32(sampling.temperature) for score in row]
    ranked = sorted(range(len(row)), key=lambda token: (-scaled[token], token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    weights = {token: math.exp(scaled[token] - scaled[ranked[0]]) for token in ranked}
    if sampling.top_p < 1:
        wanted, mass = _f32(sampling.top_p) * math.fsum(weights.values()), 0.0
        for place, token in enumerate(ranked):
            mass += weights[token]
            if mass >= wanted:
                ranked = ranked[: place + 1]
                break
    return {token: weights[token] for token in ranked if weights[token] > 0 and weights[token] >= _f32(sampling.min_p)}


def slow_law(row: Sequence[float], sampling: SamplingParams) -> list[float]:
    """Probability of every token, from adjusted logits; temperature 0 puts all of it on the first of the greatest."""
    if sampling.temperature == 0:
        return [float(token == row.index(max(row))) for token in range(len(row))]
    left = survivors(row, sampling)
    total = math.fsum(left.values())
    return [left.get(token, 0.0) / total for token in range(len(row))]


def slow_choice(row: Sequence[float], output: Sequence[int], sampling: SamplingParams) -> int:
    """The token that rule `coupled` takes after `output`, from adjusted logits: the greatest of logit and noise, the first among equals."""
    if sampling.temperature == 0:
        return row.index(max(row))
    assert sampling.seed is not None
    left = survivors(row, sampling)
    noise = gumbel(*(torch.tensor([number] * len(left)) for number in (sampling.seed, len(output))), torch.tensor(list(left)))
    scores = {token: math.log(weight) + float(own) for (token, weight), own in zip(left.items(), noise, strict=True)}
    return min(scores, key=lambda token: (-scores[token], token))


def _f32(value: float) -> float:
    """The engine keeps these options in single precision."""
    return float(torch.tensor(value, dtype=torch.float32))
