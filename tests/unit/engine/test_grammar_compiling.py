"""Grammars are compiled beside the running steps: what waits for that, what is given up, and what the engine says of itself meanwhile."""

import threading
import time
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from paceline.core.request import Request, SamplingParams
from paceline.errors import BadInputError
from paceline.executor import grammar
from paceline.executor.grammar import Grammars
from tests.fakes import token_engine
from tests.fakes.token_engine import Engine, Models, engine, make_models

GREEDY = SamplingParams(40, temperature=0)
TEXTS = [LLMatcher.grammar_from_regex(pattern) for pattern in ("[a-e]{2,9}", "[0-9]{2,9}", "(so|or){2,9}")]


def bound(text: str, request_id: str) -> Request:
    return replace(token_engine.requests(replace(GREEDY, grammar=text))[1], request_id=request_id)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


class Gate:
    """Holds compilation up until `may_go_on`, and lists what was begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on, self.has_begun, self.begun = threading.Event(), threading.Event(), list[str]()
        honest = Grammars._new_matcher

        def slow(grammars: Grammars, text: str) -> LLMatcher:
            self.begun.append(text)
            self.has_begun.set()
            assert self.may_go_on.wait(60)
            return honest(grammars, text)

        monkeypatch.setattr(Grammars, "_new_matcher", slow)


def test_grammars_that_no_request_takes_do_not_pile_up(models: Models) -> None:
    together = Engine(models, engine("none"))
    grammars = together.loop._executor._slots.grammars
    for number in range(100):
        text = LLMatcher.grammar_from_regex(f"a{{{number + 1}}}")
        together.loop.add(bound(text, str(number)))
        grammars._compiling[text].result(60)
        together.loop.abort(str(number))
    assert len(grammars._compiling) <= grammar._MAX_KEPT + 1
    assert len(grammars._thread._threads) == 1
    with pytest.raises(BadInputError):
        together.loop.add(replace(bound("of a refused request", "refused"), prompt_token_ids=()))
    assert "of a refused request" not in grammars._compiling


def test_what_is_aborted_before_it_is_compiled_is_not_compiled(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, together = Gate(monkeypatch), Engine(models, engine("none"))
    first, second, third = (bound(text, text) for text in TEXTS)
    twin = bound(TEXTS[2], "twin")
    for request in (first, second, third, twin):
        together.loop.add(request)
    assert gate.has_begun.wait(60)
    for request in (second, twin):
        together.loop.abort(request.request_id)
    gate.may_go_on.set()
    while together.loop.has_unfinished:
        together.loop.step()
    assert gate.begun == [TEXTS[0], TEXTS[2]]
    assert together.run([second]), "one that comes later has it compiled after all"


def test_an_engine_that_closes_compiles_nothing_more(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter waits for the thread at its end, and the thread for all that has been submitted."""
    gate, together = Gate(monkeypatch), Engine(models, engine("none"))
    for text in TEXTS:
        together.loop.add(bound(text, text))
    assert gate.has_begun.wait(60)
    together.loop.close()
    gate.may_go_on.set()
    together.loop._executor._slots.grammars._thread.shutdown(wait=True)
    assert len(gate.begun) == 1


def test_the_engine_looks_alive_while_there_are_only_grammars_to_compile(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, together = Gate(monkeypatch), Engine(models, engine("none", min_batch_size=8, batch_wait_ms=60_000))
    free = replace(token_engine.requests(GREEDY)[1], arrival_s=time.monotonic())
    together.loop.add(bound(TEXTS[0], "bound"))
    began_s = time.monotonic()
    assert together.loop.step() == []
    assert together.stats().num_waiting == 1
    assert together.stats().last_step_s >= began_s
    with pytest.raises(BadInputError):
        together.loop.add(replace(free, request_id="bound"))
    together.loop.add(free)
    assert together.loop.step() == []
    assert 0 < together.loop.idle_s() <= 0.05, "neither a busy loop nor late for the grammar"
    gate.may_go_on.set()
