"""The default model over a real socket: what a newcomer's first client does, and the first promise through HTTP."""

import json
import math
import time
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.conftest import DEFAULT_MODEL, RunningServer

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
LIST = "1. red apple\n2. green pear\n3. yellow banana\n4. purple plum\n5. orange carrot\n"


@pytest.fixture(scope="module")
def client(real_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real_server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_lists_the_default(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [DEFAULT_MODEL]


def test_chat_answers_and_reports_acceptance(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens > 3
    report = (answer.model_extra or {})["metrics"]["speculative_decoding"]
    assert sum(report["acceptance_histogram"]) == report["num_spec_steps"]
    assert len(report["acceptance_histogram"]) == report["num_spec_tokens"] + 1


def test_streaming_gives_the_same_text_and_one_usage_chunk(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    chunks = list(
        client.chat.completions.create(
            model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=32, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == 1 and usages[0] == whole.usage.model_copy(update={"prompt_tokens_details": usages[0].prompt_tokens_details})


def test_token_id_prompt_and_stop(client: openai.OpenAI, real_server: RunningServer) -> None:
    plain = client.completions.create(model=DEFAULT_MODEL, prompt="One, two, three, four,", temperature=0, max_tokens=12)
    from tokenizers import Tokenizer

    from paceline.core.progress import SilentProgress
    from paceline.weights.resolve import resolve

    folder = resolve(DEFAULT_MODEL, progress=SilentProgress()).path
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("One, two, three, four,").ids
    by_ids = client.completions.create(model=DEFAULT_MODEL, prompt=ids, temperature=0, max_tokens=12)
    assert by_ids.choices[0].text == plain.choices[0].text
    stop = plain.choices[0].text.strip()[2:6]
    stopped = client.completions.create(model=DEFAULT_MODEL, prompt=ids, temperature=0, max_tokens=12, stop=[stop])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == plain.choices[0].text[: plain.choices[0].text.index(stop)]


OPTIONS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 42},
    "penalised": {"temperature": 0.5, "seed": 3, "frequency_penalty": 0.1, "presence_penalty": -0.1, "min_tokens": 40},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_same_tokens_with_and_without_speculation(real_server: RunningServer, options: dict[str, object]) -> None:
    prompt = f"Repeat this list exactly:\n{LIST}\nCopy:\n1. red apple\n"
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 48, **options}
    plain = real_server.post("/v1/completions", {**body, "max_draft_length": 0})
    drafted = real_server.post("/v1/completions", body)
    assert drafted["choices"] == plain["choices"]
    assert json.loads(json.dumps(plain))["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert json.loads(json.dumps(drafted))["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def test_logprobs_of_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=16, n=2, logprobs=True, top_logprobs=3, logit_bias={"42": -5}
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        *content, end = choice.logprobs.content
        assert "".join(entry.token for entry in content) == choice.message.content
        assert end.token == "<|im_end|>"
        for entry in (*content, end):
            assert entry.token == entry.top_logprobs[0].token, "at temperature 0 the likeliest token is taken"
            assert 0 < sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001


def test_a_predicted_output_is_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        prediction={"type": "content", "content": "The capital of France is Paris."},
    )
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens
    unaided = client.chat.completions.create(model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    assert answer.choices[0].message.content == unaided.choices[0].message.content


def test_a_tool_call_comes_in_pieces(tools_server: RunningServer) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    call = {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Berlin"}'}}
    with openai.OpenAI(base_url=tools_server.url + "/v1", api_key="none", max_retries=0) as client:
        chunks = list(
            client.chat.completions.create(
                model="tools",
                messages=[
                    {"role": "system", "content": "Call get_weather for every city."},
                    {"role": "user", "content": "What is the weather in Berlin?"},
                    {"role": "assistant", "tool_calls": [call]},
                    {"role": "user", "content": "What is the weather in Paris?"},
                ],
                tools=[{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}],
                temperature=0,
                max_tokens=40,
                stream=True,
            )
        )
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or []]
    assert [piece.function.name for piece in pieces if piece.function and piece.function.name] == ["get_weather"]
    assert json.loads("".join(piece.function.arguments or "" for piece in pieces if piece.function)) == {"city": "Paris"}
    assert len(pieces) > 2, "the arguments came as they were written"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_a_stream_of_several_choices_with_logprobs(client: openai.OpenAI) -> None:
    options = {"model": DEFAULT_MODEL, "prompt": "One, two, three,", "temperature": 0.7, "seed": 5, "max_tokens": 8, "n": 2, "logprobs": 2}
    whole = client.completions.create(**options)
    texts, tokens = ["", ""], [[], []]
    for chunk in client.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert texts[0] != texts[1], "each choice has a seed of its own"


def test_second_identical_prompt_hits_the_prefix_cache(real_server: RunningServer) -> None:
    body = {"model": DEFAULT_MODEL, "prompt": "A long shared beginning. " * 12, "max_tokens": 2, "temperature": 0}
    real_server.post("/v1/completions", body)
    time.sleep(0.5)  # let the first request's counters arrive
    hits = real_server.metric("vllm:prefix_cache_hits_total")
    again = real_server.post("/v1/completions", body)
    deadline_s = time.monotonic() + 5  # the engine reports its counters each 250 ms
    while real_server.metric("vllm:prefix_cache_hits_total") - hits < 48:
        assert time.monotonic() < deadline_s, "the second prompt did not hit the prefix cache"
        time.sleep(0.05)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48  # type: ignore[index]


def test_health_is_up(real_server: RunningServer) -> None:
    assert real_server.get("/health")[0] == 200


def test_cached_prefixes_are_shared_within_one_salt_only(real_server: RunningServer) -> None:
    body = {"model": DEFAULT_MODEL, "prompt": list(range(1000, 1100)), "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    salts = ("one", "one", "another", None, None)
    answers = [json.loads(json.dumps(real_server.post("/v1/completions", {**body, "cache_salt": salt}))) for salt in salts]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for answer in answers]
    assert cached == [False, True, False, False, True]
    assert {tuple(answer["choices"][0]["token_ids"]) for answer in answers} == {tuple(answers[0]["choices"][0]["token_ids"])}
    assert len(answers[0]["choices"][0]["token_ids"]) == 4
