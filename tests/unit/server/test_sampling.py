"""Options of a body on their way to the engine, choices of one prompt, and log-probabilities on their way back."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from paceline.core.request import SamplingParams
from tests.fakes.fake_engine import FakeEngine
from tests.unit.server.conftest import Site

MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


async def sampling_of(site: Site, path: str, **given: Any) -> SamplingParams:
    answer = await site.post(path, {"prompt": "x", "messages": MESSAGES, "seed": 3, "max_tokens": 9, **given})
    assert answer.status == 200, answer.body
    return site.engine.requests[-1].sampling


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_options_reach_the_engine(site: Site, path: str) -> None:
    assert await sampling_of(site, path) == SamplingParams(9, temperature=1.0, seed=3)
    given = {
        "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "presence_penalty": -1, "frequency_penalty": 0.5,
        "repetition_penalty": 1.5, "logit_bias": {"5": 1.5, "007": -100, "8": 0}, "min_tokens": 4, "stop_token_ids": [6],
        "ignore_eos": True, "prompt_logprobs": 2,
    }  # fmt: skip
    assert await sampling_of(site, path, **given) == SamplingParams(
        9, 0.5, 4, 0.9, 0.1, 3, (6,), True, -1.0, 0.5, 1.5, ((5, 1.5), (7, -100.0)), (), 4, None, 2
    )


async def test_logprobs_of_both_endpoints(site: Site) -> None:
    assert (await sampling_of(site, COMPLETIONS, logprobs=0)).num_logprobs == 0
    assert (await sampling_of(site, COMPLETIONS, logprobs=5)).num_logprobs == 5
    assert (await sampling_of(site, COMPLETIONS, logprobs=False)).num_logprobs is None
    assert (await sampling_of(site, CHAT, logprobs=True)).num_logprobs == 0
    assert (await sampling_of(site, CHAT, logprobs=True, top_logprobs=5)).num_logprobs == 5
    assert (await sampling_of(site, CHAT, logprobs=False)).num_logprobs is None


async def test_bad_words_are_banned_in_both_spellings(site: Site, tokenizer: Tokenizer) -> None:
    banned = (await sampling_of(site, COMPLETIONS, bad_words=["fox", "fox"])).banned_sequences
    spelled = [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in ("fox", " fox")]
    assert banned == tuple(dict.fromkeys(spelled))


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_of_each_prompt(site: Site, stream: bool) -> None:
    prompts = ["the fox", "a"]
    answer = await site.post(COMPLETIONS, {"prompt": prompts, "n": 3, "seed": 5, "stream": stream, "stream_options": None})
    bodies = answer.events()[:-1] if stream else [answer.json()]
    texts = dict.fromkeys(range(6), "")
    for choice in (choice for body in bodies for choice in body["choices"]):
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == ["the fox"] * 3 + ["a"] * 3
    seeds = [
        request.sampling.seed for request in sorted(site.engine.requests, key=lambda request: int(request.request_id.rsplit("-", 1)[1]))
    ]
    assert seeds[0] == seeds[3] == 5, "the first choice is what n = 1 gives"
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3
    if not stream:
        num_prompt = sum(len(request.prompt_token_ids) for request in site.engine.requests)
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == num_prompt // 3, "a prompt counts once, however many answers it has"
        assert usage["completion_tokens"] == num_prompt + 6


async def test_choices_without_a_seed_differ(site: Site) -> None:
    await site.post(CHAT, {"messages": MESSAGES, "n": 4})
    await site.post(CHAT, {"messages": MESSAGES, "n": 4})
    assert len({request.sampling.seed for request in site.engine.requests}) == 8


def joined_logprobs(bodies: list[Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for entry in (choice["logprobs"] for body in bodies for choice in body["choices"]):
        for name, values in (entry or {}).items():
            merged[name] = values if values is None else merged.get(name, []) + values
    return merged


@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(make_site: Any, tokenizer: Tokenizer, stream: bool, chunk: int) -> None:
    site = make_site(FakeEngine(chunk=chunk))
    text = "the quick brown fox"
    answer = await site.post(COMPLETIONS, {"prompt": text, "logprobs": 2, "stream": stream})
    got = joined_logprobs(answer.events()[:-1] if stream else [answer.json()])
    tokens = [tokenizer.decode([token]) for token in tokenizer.encode(text).ids]
    end = tokenizer.id_to_token(2)
    assert got["tokens"] == [*tokens, end]
    assert got["token_logprobs"] == [-0.5] * len(got["tokens"])
    assert got["text_offset"] == [sum(map(len, tokens[:index])) for index in range(len(tokens) + 1)]
    likeliest = {tokenizer.decode([10]): -0.1, tokenizer.decode([11]): -0.2}
    assert got["top_logprobs"] == [{**likeliest, token: -0.5} for token in got["tokens"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(make_site: Any, tokenizer: Tokenizer, stream: bool) -> None:
    """A character of several tokens shows its bytes, which no text can."""
    ids = tokenizer.encode("x😀", add_special_tokens=False).ids
    site = make_site(FakeEngine(answer=lambda request: (*ids, 2), chunk=2))
    answer = await site.post(CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "stream": stream})
    got = joined_logprobs(answer.events()[:-1] if stream else [answer.json()])["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in got[:-1]).decode() == "x😀"
    assert all(entry["logprob"] == -0.5 for entry in got)
    assert [entry["top_logprobs"][0]["logprob"] for entry in got] == [-0.1] * len(got)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_logprobs_with_the_text(make_site: Any, tokenizer: Tokenizer, stream: bool) -> None:
    site = make_site(FakeEngine(chunk=8))
    answer = await site.post(
        COMPLETIONS, {"prompt": "the quick brown fox", "logprobs": 0, "stop": "quick", "stream": stream, "max_tokens": 50}
    )
    bodies = answer.events()[:-1] if stream else [answer.json()]
    assert "".join(choice["text"] for body in bodies for choice in body["choices"]) == "the "
    tokens = joined_logprobs(bodies)["tokens"]
    assert "quick" in "".join(tokens)
    assert "quick" not in "".join(tokens[:-1]), "the token that completes the stop string is the last one"
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == len(tokens)


async def test_prompt_logprobs(site: Site, tokenizer: Tokenizer) -> None:
    first, second = [
        (await site.post(COMPLETIONS, {"prompt": prompt, "prompt_logprobs": 1})).json()["choices"][0]["prompt_logprobs"]
        for prompt in ("the fox", [5])
    ]
    ids = tokenizer.encode("the fox").ids
    assert first[0] is None
    for token_id, entry in zip(ids[1:], first[1:], strict=True):
        assert entry[str(token_id)]["logprob"] == (-0.1 if token_id == 10 else -0.5)
        assert entry["10"] == {"logprob": -0.1, "decoded_token": tokenizer.decode([10])}
    assert second == [None]


async def test_stop_strings_wait_for_min_tokens(site: Site, tokenizer: Tokenizer) -> None:
    text = "fox a fox"
    num_first = len(tokenizer.encode("fox", add_special_tokens=False).ids)
    given = {"prompt": text, "stop": "fox", "max_tokens": 40}
    assert (await site.post(COMPLETIONS, given)).json()["choices"][0]["text"] == ""
    later = (await site.post(COMPLETIONS, {**given, "min_tokens": num_first})).json()
    assert later["choices"][0]["text"] == "fox a "
    assert later["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("content", ["the fox", [{"type": "text", "text": "the"}, {"type": "text", "text": " fox"}]])
async def test_a_predicted_output_reaches_the_drafter(make_site: Any, tokenizer: Tokenizer, content: Any) -> None:
    site = make_site(FakeEngine(chunk=3))
    answer = await site.post(CHAT, {"messages": MESSAGES, "prediction": {"type": "content", "content": content}})
    (request,) = site.engine.requests
    assert request.prediction_token_ids == tuple(tokenizer.encode("the fox", add_special_tokens=False).ids)
    body = answer.json()
    spec = body["metrics"]["speculative_decoding"]
    assert body["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": spec["num_accepted_draft_tokens"],
        "rejected_prediction_tokens": spec["num_draft_tokens"] - spec["num_accepted_draft_tokens"],
    }
    plain = (await site.post(CHAT, {"messages": MESSAGES})).json()
    assert "completion_tokens_details" not in plain["usage"]


@pytest.mark.parametrize("prediction", ["x", {"type": "image", "content": "x"}, {"type": "content"}, {"type": "content", "content": 5}])
async def test_bad_predictions_are_refused(site: Site, prediction: Any) -> None:
    answer = await site.post(CHAT, {"messages": MESSAGES, "prediction": prediction})
    assert answer.status == 400
    assert answer.json()["error"]["param"].startswith("prediction")
