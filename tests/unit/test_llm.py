"""The engine without a server: what a script sees."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config import EngineConfig
from paceline.core.request import FinishReason, SamplingParams
from paceline.errors import BadInputError
from paceline.llm import LLM
from tests.fakes.tiny_models import make_tiny_model

GREEDY = SamplingParams(16, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama", vocab_size=320)
    return LLM(EngineConfig(model=str(folder), dtype="float32", threads=1, kv_cache_memory_bytes=16 << 20))


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["the quick brown fox", [5, 6, 7], "one two three"]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert all(output.finish_reason is FinishReason.LENGTH and len(output.token_ids) == 16 for output in together)
    assert together[0].text == llm.tokenizer.decode(list(together[0].token_ids))


def test_closing_a_stream_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream("the lazy dog", GREEDY)
    next(stream)
    stream.close()
    llm.generate(["x"], GREEDY)  # the abort takes effect with the next step at the latest
    assert llm.stats().num_free_pages == llm.stats().num_pages


@pytest.mark.parametrize("prompt", ["", [], [320], [-1], [5] * 512])
def test_bad_prompts_are_refused(llm: LLM, prompt: str | list[int]) -> None:
    with pytest.raises(BadInputError):
        llm.generate([prompt], GREEDY)
    assert not llm.stats().num_waiting


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", -0.1),
        ("max_tokens", 0),
    ],
)
def test_values_out_of_range_are_refused(llm: LLM, field: str, value: float) -> None:
    with pytest.raises(BadInputError, match=f"^{field} is {value}; it must be ") as caught:
        llm.generate(["x"], replace(GREEDY, **{field: value}))
    assert caught.value.param == field
    with pytest.raises(BadInputError, match="max_draft_length"):
        llm.generate(["x"], GREEDY, max_draft_length=-1)


def test_a_tiny_temperature_is_greedy(llm: LLM) -> None:
    assert llm.generate(["one two"], replace(GREEDY, temperature=1e-40))[0].token_ids == llm.generate(["one two"], GREEDY)[0].token_ids


def test_a_fixed_seed_repeats_and_another_differs(llm: LLM) -> None:
    first, again, other = (
        llm.generate(["one two"], SamplingParams(24, temperature=1.0, seed=seed, ignore_eos=True))[0].token_ids for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError):
        LLM(EngineConfig(model=str(tmp_path)))


def test_a_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(BadInputError):
        llm.generate(["the quick", [5] * 600], GREEDY)
    assert llm.generate(["the quick"], GREEDY)[0].finish_reason is FinishReason.LENGTH
    assert llm.stats().num_free_pages == llm.stats().num_pages


def test_streams_read_in_turn_lose_nothing(llm: LLM) -> None:
    alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in ("one two", "the lazy dog")]
    streams = [llm.stream(prompt, GREEDY) for prompt in ("one two", "the lazy dog")]
    tokens: list[list[int]] = [[], []]
    running = [0, 1]
    while running:
        for index in tuple(running):
            delta = next(streams[index], None)
            if delta is None:
                running.remove(index)
            else:
                tokens[index].extend(delta.token_ids)
    assert [tuple(each) for each in tokens] == alone


def test_requests_without_a_seed_differ(llm: LLM) -> None:
    sampled = SamplingParams(24, temperature=1.0, ignore_eos=True)
    outputs = [output.token_ids for output in llm.generate(["one two"] * 4, sampled)]
    assert len(set(outputs)) == 4


def test_settings_that_cannot_work_are_refused_before_loading() -> None:
    with pytest.raises(BadInputError, match="max-num-batched-tokens"):
        LLM(EngineConfig(max_num_batched_tokens=0))
