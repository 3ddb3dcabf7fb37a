"""The law from twenty log-probabilities is the law of the toy's own sampler, for every option; where it cannot be known there is none."""

import math

import numpy as np
import pytest

from paceline.prove.certificate.law import Law, Options, law_of
from tests.fakes.toy_completions import ID, VOCABULARY, WORDS, ToyCompletions, _Decoding

CONTEXT = [ID[" red"], ID[","], ID[" green"], ID[","]]


def top_logprobs(num_top: int = 20) -> dict[str, float]:
    return ToyCompletions()._logprobs(CONTEXT, [0], num_top)["top_logprobs"][0]


def sampler_law(options: Options, output: list[int]) -> dict[str, float]:
    body = {
        "temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p,
        "presence_penalty": options.presence_penalty, "frequency_penalty": options.frequency_penalty,
        "logit_bias": {str(ID[name]): value for name, value in options.biases.items()}, "bad_words": [],
    }  # fmt: skip
    toy = ToyCompletions()
    raw = toy.table[CONTEXT[-1]].copy()
    raw[[ID[name] for name in options.banned]] = -np.inf
    logits = _Decoding(toy, CONTEXT, body, 0)._processed(raw, output, is_drafted=False)
    probs = np.exp(logits - logits.max())
    return dict(zip(VOCABULARY, probs / probs.sum(), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(temperature=0.7, top_k=6),
        Options(temperature=1.5, top_k=5),
        Options(top_k=2),
        Options(top_p=0.5),
        Options(top_k=5, top_p=0.8),
        Options(temperature=0.5, top_k=6, top_p=0.7, min_p=0.1),
        Options(min_p=0.2),
        Options(presence_penalty=1.5, top_k=6),
        Options(frequency_penalty=0.7, presence_penalty=0.2, top_k=6),
        Options(biases={" black": 2.0, " red": -1.0}),
        Options(biases={" black": 2.0}, temperature=0.8, top_k=5),
        Options(banned=frozenset({" red"})),
        Options(banned=frozenset({" red"}), top_k=4),
    ],
)
def test_it_is_the_samplers(options: Options) -> None:
    output = [ID[" red"], ID[","], ID[" red"], ID[","]]
    law = law_of(top_logprobs(), [VOCABULARY[token_id] for token_id in output], options)
    truth = sampler_law(options, output)
    assert law is not None
    assert law.probs == pytest.approx({token: truth[token] for token in law.probs}, abs=1e-4)
    assert law.rest == pytest.approx(1 - sum(truth[token] for token in law.probs), abs=1e-4)
    if options != Options():
        usual = law_of(top_logprobs(), [], Options())
        assert usual is not None and usual.probs != pytest.approx(dict(law.probs), abs=1e-3), "the option does something here"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (Options(temperature=0.7), "the other tokens' share depends on each of them"),
        (Options(top_k=1), "red and blue are too near: rounding may decide"),
        (Options(top_k=30), "more than are told"),
        (Options(top_p=0.7), "the cut is at the border of a token"),
        (Options(top_p=0.999), "beyond what is told"),
        (Options(min_p=0.5), "the cut goes through a token"),
        (Options(min_p=1e-6), "beyond what is told"),
        (Options(biases={"no such token": 1.0}), "raised from nobody knows where"),
    ],
)
def test_what_cannot_be_known_is_not_guessed(options: Options, why: str) -> None:
    logprobs = {"a": math.log(0.45), "b": math.log(0.44), "c": math.log(0.06)}
    if options.top_p == 0.7:
        logprobs = {"a": math.log(0.45), "b": math.log(0.252), "c": math.log(0.06)}
    if options.min_p == 0.5:
        logprobs = {"a": math.log(0.4), "b": math.log(0.2), "c": math.log(0.06)}
    assert law_of(logprobs, [], options) is None, why
    assert law_of({}, [], Options()) is None


def test_words_are_kept_whole() -> None:
    assert law_of({"a": math.log(0.75), "b": math.log(0.25)}, [], Options()) == Law({"a": 0.75, "b": 0.25}, 0.0)
    assert set(WORDS) <= set(top_logprobs(6))
