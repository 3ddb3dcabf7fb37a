"""The first promise under a grammar: any drafter gives the tokens of plain decoding, and those are in the language.

What plain decoding gives is checked against a slow sampler that asks a matcher of its own about every single token.
"""

import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from paceline.core.request import FinishReason, Request, SamplingParams
from paceline.executor import grammar, step
from paceline.executor.grammar import Grammars
from paceline.speculative import adjust
from paceline.speculative.drafters import draft_model, ngram
from paceline.speculative.noise import gumbel
from tests.fakes import token_engine
from tests.fakes.tiny_models import EOS_TOKEN_ID, make_tiny_model
from tests.fakes.token_engine import Engine, FullDraftLength, Models, RandomDraftLength, engine, make_models

DRAFTERS = ("none", "ngram", "draft_model")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "colour": {"enum": ["crimson", "ultramarine"]},
        "size": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
    },
    "required": ["name", "colour", "size"],
    "additionalProperties": False,
}
PATTERN = r"[a-e]{2,9}(, [0-9]{2,5}){1,3}\."
CALLS = 'start: call (" and " call){0,3}\ncall: ("open" | "close") "(" /[0-9]{1,2}/ ")"\n'
GREEDY = SamplingParams(60, temperature=0)
WARM = replace(GREEDY, temperature=0.9, seed=17)


def of_schema(schema: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": "[ ]{0,2}"})


GRAMMARS = {
    "schema": of_schema(SCHEMA),
    "pattern": LLMatcher.grammar_from_regex(PATTERN),
    "calls": LLMatcher.grammar_from_lark(CALLS),
}
OPTIONS = {
    "schema": replace(GREEDY, grammar=GRAMMARS["schema"]),
    "warm-schema": replace(WARM, grammar=GRAMMARS["schema"], top_p=0.95),
    "pattern": replace(WARM, grammar=GRAMMARS["pattern"], frequency_penalty=0.4),
    "calls": replace(GREEDY, grammar=GRAMMARS["calls"], repetition_penalty=1.2),
    "warm-calls": replace(WARM, grammar=GRAMMARS["calls"], top_k=40, min_tokens=20),
}

Outputs = dict[str, list[tuple[int, ...]]]


def requests(sampling: SamplingParams, max_draft_length: int | None = None) -> list[Request]:
    """Three kinds of prompts: grammars differ more than prompts do."""
    return token_engine.requests(sampling, max_draft_length)[1:4]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain(models: Models) -> Outputs:
    alone = Engine(models, engine("none", enable_prefix_caching=False))
    return {name: [alone.run([request])[0] for request in requests(sampling)] for name, sampling in OPTIONS.items()}


def text_of(models: Models, tokens: Sequence[int]) -> str:
    return Tokenizer.from_file(str(models.target / "tokenizer.json")).decode(list(tokens), skip_special_tokens=True)


@pytest.mark.parametrize("draft", DRAFTERS)
def test_answers_are_in_the_language(models: Models, draft: str) -> None:
    alone = Engine(models, engine(draft))
    for sampling in OPTIONS.values():
        for deltas in alone.deltas(requests(replace(sampling, max_tokens=200))):
            text = text_of(models, [token for delta in deltas for token in delta.token_ids])
            assert deltas[-1].finish_reason is FinishReason.STOP, text
            assert deltas[-1].token_ids[-1] == EOS_TOKEN_ID
            if sampling.grammar == GRAMMARS["schema"]:
                jsonschema.validate(json.loads(text), SCHEMA)
            elif sampling.grammar == GRAMMARS["pattern"]:
                assert re.fullmatch(PATTERN, text)
            else:
                assert re.fullmatch(r"(open|close)\(\d\d?\)( and (open|close)\(\d\d?\)){0,3}", text)


@pytest.mark.parametrize("draft", ["ngram", "draft_model"])
def test_any_drafter_and_draft_length(models: Models, plain: Outputs, draft: str) -> None:
    full = Engine(models, engine(draft, max_batch_size=1), FullDraftLength(0))
    for name, sampling in OPTIONS.items():
        for max_draft_length in (2, 7):
            assert full.run(requests(sampling, max_draft_length)) == plain[name], f"{name}, K={max_draft_length}"


@pytest.mark.parametrize("draft", DRAFTERS)
def test_batches_chunks_and_preemption(models: Models, plain: Outputs, draft: str) -> None:
    """All in one batch with requests that have no grammar; a matcher is made anew after preemption."""
    facts = Engine(models, engine(draft)).facts
    memory = 20 * (facts.target_page_bytes + facts.drafter_page_bytes)
    config = engine(draft, max_batch_size=9, max_model_len=128, kv_cache_memory_bytes=memory, max_num_batched_tokens=40)
    together = Engine(models, config, RandomDraftLength(len(draft)))
    free = {"free": [Engine(models, engine("none")).run([request])[0] for request in requests(WARM)]}
    mixed = [
        replace(request, request_id=f"{name}-{request.request_id}")
        for name, sampling in (OPTIONS | {"free": WARM}).items()
        for request in requests(sampling)
    ]
    expected = [tokens for outputs in (plain | free).values() for tokens in outputs]
    assert together.run(mixed) == expected
    assert together.stats().num_preemptions > 0, "the pool was not small enough to test preemption"


def slow_choice(raw: list[float], sampling: SamplingParams, index: int, matcher: LLMatcher) -> int:
    """The likeliest token of those that the matcher takes when it is asked about each by itself; forced text has its usual spelling."""
    best, best_score = -1, -float("inf")
    forced = matcher.compute_ff_tokens()[:1]
    for token, score in enumerate(raw):
        if forced and token != forced[0]:
            continue
        if not (matcher.is_accepting() if token == EOS_TOKEN_ID else matcher.validate_tokens([token])):
            continue
        if sampling.temperature > 0:
            assert sampling.seed is not None
            score /= sampling.temperature
            score += float(gumbel(torch.tensor([sampling.seed]), torch.tensor([index]), torch.tensor([token])))
        if score > best_score:
            best, best_score = token, score
    return best


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_plain_decoding_against_a_slow_sampler(
    models: Models, monkeypatch: pytest.MonkeyPatch, name: str, sampling: SamplingParams
) -> None:
    seen: list[torch.Tensor] = []
    honest = step.adjust
    monkeypatch.setattr(step, "adjust", lambda logits, rows: seen.append(logits[-1].clone()) or honest(logits, rows))
    tokenizer = LLTokenizer(str(models.target / "tokenizer.json"), n_vocab=320, eos_token=[EOS_TOKEN_ID])
    request = requests(replace(sampling, grammar=GRAMMARS[name]))[2]
    (tokens,) = Engine(models, engine("none")).run([request])
    matcher = LLMatcher(tokenizer, GRAMMARS[name])
    assert len(seen) == len(tokens)
    for index, (raw, token) in enumerate(zip(seen, tokens, strict=True)):
        assert token == slow_choice(raw.tolist(), request.sampling, index, matcher), f"token {index}"
        if token != EOS_TOKEN_ID:
            assert matcher.consume_token(token)


def no_mask_behind_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = adjust._mask
    monkeypatch.setattr(adjust, "_mask", lambda logits, masks: honest(logits, masks[:-1] if len(masks) > 1 else masks))


def one_mask_for_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = adjust._mask
    monkeypatch.setattr(adjust, "_mask", lambda logits, masks: honest(logits, [masks[0]] * len(masks)))


def drafts_stay_in_the_matcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking ahead without going back."""
    honest = grammar._SlotGrammar.masks

    def masks(self: grammar._SlotGrammar, drafts: Sequence[int], first: int, num_rows: int) -> list[bytes]:
        found = honest(self, drafts, first, num_rows)
        self._matcher.try_consume_tokens(list(drafts[:1]))
        return found

    monkeypatch.setattr(grammar._SlotGrammar, "masks", masks)


@pytest.mark.parametrize("mutation", [no_mask_behind_the_drafts, one_mask_for_all_positions, drafts_stay_in_the_matcher])
def test_planted_faults_are_noticed(
    models: Models, plain: Outputs, monkeypatch: pytest.MonkeyPatch, mutation: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mutation(monkeypatch)
    full = Engine(models, engine("draft_model"), FullDraftLength(0))
    assert any(full.run(requests(sampling)) != plain[name] for name, sampling in OPTIONS.items())


@pytest.mark.parametrize("draft", ["ngram", "draft_model"])
def test_drafts_that_know_the_grammar_are_accepted_more_often(
    models: Models, plain: Outputs, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    """On the same tokens: more of each step's drafts stand, so there are fewer steps."""

    def num_steps_and_accepted() -> tuple[int, float]:
        full = Engine(models, engine(draft, max_batch_size=1), FullDraftLength(0))
        for name, sampling in OPTIONS.items():
            assert full.run(requests(sampling, 4)) == plain[name]
        stats = full.stats()
        return stats.num_steps, stats.num_accepted_tokens / stats.num_draft_tokens

    num_steps, accepted = num_steps_and_accepted()
    monkeypatch.setattr(ngram, "within_grammar", lambda slot, found, budget: found)
    monkeypatch.setattr(draft_model, "adjust", lambda logits, rows: logits)
    monkeypatch.setattr(draft_model, "_force", lambda *_: None)
    unaware_steps, unaware_accepted = num_steps_and_accepted()
    assert num_steps < unaware_steps
    assert accepted > unaware_accepted


def test_options_never_break_the_grammar(models: Models) -> None:
    """Where bans and least lengths leave nothing that the grammar allows, the grammar is kept."""
    sampling = replace(GREEDY, grammar=LLMatcher.grammar_from_lark('start: "yes"\n'), min_tokens=30)
    all_banned = replace(sampling, banned_sequences=tuple((token,) for token in range(320)))
    biased = replace(WARM, grammar=sampling.grammar, logit_bias=tuple((token, -100.0) for token in range(320)))
    for draft in DRAFTERS:
        full = Engine(models, engine(draft), FullDraftLength(0))
        for each in (sampling, all_banned, biased):
            assert {text_of(models, tokens) for tokens in full.run(requests(each))} == {"yes"}


@pytest.mark.parametrize("draft", DRAFTERS)
def test_a_hundred_answers_with_a_field_that_may_be_null(models: Models, draft: str) -> None:
    schema = {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 9}, "note": {"anyOf": [{"enum": ["so"]}, {"type": "null"}]}},
        "required": ["id", "note"],
        "additionalProperties": False,
    }
    sampling = replace(WARM, grammar=of_schema(schema))
    many = [
        replace(requests(replace(sampling, seed=seed), 3)[0], request_id=str(seed), prompt_token_ids=(seed + 5, 9, 40))
        for seed in range(100)
    ]
    answers = [json.loads(text_of(models, tokens)) for tokens in Engine(models, engine(draft, max_batch_size=32)).run(many)]
    for answer in answers:
        jsonschema.validate(answer, schema)
    assert {answer["note"] for answer in answers} == {"so", None}, "both ways are taken"


@pytest.mark.parametrize("draft", DRAFTERS)
def test_a_thousand_requests_in_one_engine(models: Models, draft: str) -> None:
    together = Engine(models, engine(draft, max_batch_size=64))
    sampling = replace(WARM, grammar=LLMatcher.grammar_from_regex("[a-c]{1,3}"))
    many = [replace(requests(replace(sampling, seed=seed), 3)[0], request_id=str(seed), prompt_token_ids=(9,)) for seed in range(1000)]
    assert all(re.fullmatch("[a-c]{1,3}", text_of(models, tokens)) for tokens in together.run(many))


def failed(models: Models, text: str) -> tuple[list[str], list[tuple[int, ...]]]:
    """Requests with the grammar beside healthy ones: the first ones' errors and the others' tokens."""
    together = Engine(models, engine("ngram"))
    bad = [replace(request, request_id=f"bad{request.request_id}") for request in requests(replace(GREEDY, grammar=text))]
    deltas = together.deltas(bad + requests(WARM))
    ends = [each[-1] for each in deltas[: len(bad)]]
    assert all(end.finish_reason is FinishReason.ERROR and end.is_refusal for end in ends)
    return [end.error or "" for end in ends], [tuple(t for delta in each for t in delta.token_ids) for each in deltas[len(bad) :]]


def test_a_bad_grammar_ends_its_own_request_only(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = Engine(models, engine("none")).run(requests(WARM))
    errors, others = failed(models, "start: nowhere")
    assert all("grammar" in error for error in errors)
    assert others == healthy
    monkeypatch.setattr(grammar.limits, "STEP_MAX_ITEMS", 3)
    errors, others = failed(models, GRAMMARS["calls"])
    assert all("too complex" in error for error in errors)
    assert others == healthy


HUNGRY = LLMatcher.grammar_from_lark("start: /(.*[aeiou].{14})+/")
"""Each new letter makes new states of its lexer, which all matchers of the text share."""


def hungry_start(grammars: Grammars) -> grammar.TokenGrammar:
    return grammars.start(HUNGRY, [])


def go_on(slot: grammar.TokenGrammar, letters: Sequence[int]) -> str | None:
    for letter in letters:
        if slot.failure is None:
            slot.masks([], 0, 1)
            slot.commit([letter])
    return slot.failure


def test_a_request_that_meets_a_limit_leaves_others_with_its_grammar_alone(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar.limits, "MAX_LEXER_STATES", 300)
    grammars = Grammars(models.target / "tokenizer.json", 320, [EOS_TOKEN_ID])
    letters = [Tokenizer.from_file(str(models.target / "tokenizer.json")).token_to_id(letter) for letter in "abcdefghij"]
    mixed = [letters[(7 * i * i + i // 3) % 10] for i in range(400)]
    early = hungry_start(grammars)
    assert go_on(early, letters[:3]) is None
    assert "too complex" in (go_on(hungry_start(grammars), mixed) or "")
    assert go_on(early, letters[3:6]) is None
    late = hungry_start(grammars)
    late.masks([], 0, 1)
    assert "too complex" in (go_on(hungry_start(grammars), mixed) or "")
    late.commit(letters[:1])
    assert late.failure is None, "the limit was met between the mask and the token"
    assert go_on(hungry_start(grammars), letters[:6]) is None


def test_a_forced_token_that_the_draft_model_lacks(tmp_path: Path) -> None:
    """Tokens may be named by number, padding of the target's vocabulary too; the draft model's may be shorter."""
    models = Models(make_tiny_model(tmp_path / "target", vocab_size=352), make_tiny_model(tmp_path / "draft", vocab_size=320))
    (models.target / "tokenizer.json").write_bytes((models.draft / "tokenizer.json").read_bytes())
    sampling = replace(GREEDY, grammar=LLMatcher.grammar_from_lark('start: "ab" <[340]> "xyz"\n'))
    for draft in DRAFTERS:
        for tokens in Engine(models, engine(draft), FullDraftLength(0)).run(requests(sampling)):
            assert tokens[2] == 340


def test_compiled_grammars_are_bounded(tmp_path: Path, models: Models) -> None:
    grammars = Grammars(models.target / "tokenizer.json", 320, [EOS_TOKEN_ID])
    for number in range(200):
        assert grammars.start(LLMatcher.grammar_from_regex(f"a{{{number + 1}}}"), []).failure is None
    assert len(grammars._compiled) <= grammar._MAX_KEPT


def test_a_long_compilation_keeps_nobody_else_waiting(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, may_go_on = Grammars._new_matcher, threading.Event()

    def slow(self: Grammars, text: str) -> LLMatcher:
        assert may_go_on.wait(60)
        return honest(self, text)

    monkeypatch.setattr(Grammars, "_new_matcher", slow)
    together = Engine(models, engine("ngram"))
    bound = [replace(request, request_id=f"bound-{request.request_id}") for request in requests(OPTIONS["calls"])]
    for request in [*bound, *requests(WARM)]:
        together.loop.add(request)
    deltas = [delta for _ in range(200) for delta in together.loop.step()]
    assert {delta.request_id for delta in deltas if delta.finish_reason is not None} == {request.request_id for request in requests(WARM)}
    assert not any(delta.request_id.startswith("bound") for delta in deltas)
    assert [delta.finish_reason for delta in together.loop.abort(bound[0].request_id)] == [FinishReason.ABORT]
    may_go_on.set()
    ended: dict[str, FinishReason] = {}
    while together.loop.has_unfinished:
        ended |= {delta.request_id: delta.finish_reason for delta in together.loop.step() if delta.finish_reason is not None}
    assert ended == {request.request_id: FinishReason.STOP for request in bound[1:]}


def test_requests_whose_grammar_is_compiled_fail_with_the_others(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(Grammars, "_new_matcher", lambda self, text: may_go_on.wait(60))
    together = Engine(models, engine("none"))
    for request in requests(OPTIONS["calls"]):
        together.loop.add(request)
    failed_ids = {delta.request_id for delta in together.loop.fail_all("it is over") if delta.finish_reason is FinishReason.ERROR}
    assert failed_ids == {request.request_id for request in requests(GREEDY)}
    assert not together.loop.has_unfinished
    may_go_on.set()


@pytest.mark.parametrize("draft", DRAFTERS)
def test_what_came_before_a_failure_stands(models: Models, monkeypatch: pytest.MonkeyPatch, draft: str) -> None:
    """Whether drafts brought it in the same step or not; and an answer that had ended by then has ended well."""
    sampling = replace(GREEDY, grammar=LLMatcher.grammar_from_regex("abcdefgh+"), num_logprobs=1)
    request = requests(sampling)[0]
    (whole,) = Engine(models, engine("none")).run([request])
    honest = grammar._SlotGrammar._take
    monkeypatch.setattr(grammar._SlotGrammar, "_take", lambda self, token: len(self._taken) < 5 and honest(self, token))
    full = Engine(models, engine(draft), FullDraftLength(0))
    (deltas,) = full.deltas([request])
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole[:5]
    assert sum(len(delta.logprobs) for delta in deltas) == full.stats().num_generation_tokens == 5
    assert (deltas[-1].finish_reason, deltas[-1].is_refusal) == (FinishReason.ERROR, True)
    stopped = replace(request, sampling=replace(sampling, stop_token_ids=(whole[4],)))
    assert full.deltas([stopped])[0][-1].finish_reason is FinishReason.STOP
