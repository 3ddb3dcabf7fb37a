"""Grammars that are compiled beside the running steps: for requests that leave before they start, nothing is done or kept without end."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from llguidance import LLMatcher

from paceline.core.request import FinishReason, SamplingParams
from paceline.executor.grammar import Grammars
from tests.fakes.tiny_models import EOS_TOKEN_ID
from tests.fakes.token_engine import Engine, Models, engine, make_models, requests

FIRST, SECOND, THIRD = (LLMatcher.grammar_from_regex(pattern) for pattern in ("a{5}", "b{5}", "c{5}"))
GREEDY = SamplingParams(60, temperature=0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("grammar"))


def test_what_was_compiled_for_requests_that_left_is_bounded(models: Models) -> None:
    grammars = Grammars(Path(models.target) / "tokenizer.json", 320, [EOS_TOKEN_ID])
    for number in range(100):
        preparation = grammars.prepare(LLMatcher.grammar_from_regex(f"a{{{number + 1}}}"))
        assert preparation is not None
        preparation.result(60)
    assert len(grammars._compiled) + len(grammars._compiling) <= 64
    assert grammars.prepare(LLMatcher.grammar_from_regex("a{99}")) is None, "the latest are kept"


def test_nothing_is_compiled_for_requests_that_left(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, may_go_on, texts = Grammars._new_matcher, threading.Event(), list[str]()

    def slow(self: Grammars, text: str) -> LLMatcher:
        texts.append(text)
        assert may_go_on.wait(60)
        return honest(self, text)

    monkeypatch.setattr(Grammars, "_new_matcher", slow)
    loop = Engine(models, engine("none")).loop
    request = requests(GREEDY)[0]
    for name, text in {"first": FIRST, "second": SECOND, "third": THIRD}.items():
        for number in range(2):
            loop.add(replace(request, request_id=f"{name}-{number}", sampling=replace(GREEDY, grammar=text)))
    for request_id in ("second-0", "second-1", "third-0"):
        assert [delta.finish_reason for delta in loop.abort(request_id)] == [FinishReason.ABORT]
    may_go_on.set()
    ended: dict[str, FinishReason] = {}
    while loop.has_unfinished:
        ended |= {delta.request_id: delta.finish_reason for delta in loop.step() if delta.finish_reason is not None}
        if len(ended) == 3 and not loop.has_unfinished:
            assert texts == [FIRST, THIRD]
            loop.add(replace(request, request_id="again", sampling=replace(GREEDY, grammar=SECOND)))
    assert ended == dict.fromkeys(("first-0", "first-1", "third-1", "again"), FinishReason.STOP)
