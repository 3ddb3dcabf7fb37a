"""What users of such servers have reported of answers and counts, from HTTP down to the sampler, for every drafter (docs/cases.md)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from paceline.config import EngineConfig, ServerConfig
from paceline.speculative.drafter import DRAFTERS
from tests.fakes.loop_engine import LoopEngine
from tests.fakes.token_engine import FullDraftLength
from tests.fakes.toy_engine import TableForward, ToyEngine, ToyLimits, cycle_table
from tests.unit.server.conftest import Site

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "over the lazy dog"
VOCAB_SIZE = 320
every_drafter = pytest.mark.parametrize("draft", DRAFTERS)


@pytest.fixture(scope="module")
def table(tokenizer: Tokenizer) -> torch.Tensor:
    """A model that says " over the lazy dog" again and again, with something to say of every other token too."""
    torch.set_num_threads(1)
    order = tokenizer.encode(" " + TEXT).ids
    assert len(set(order)) == len(order), "a token that comes twice has two successors"
    noise = torch.randn((1, VOCAB_SIZE, VOCAB_SIZE), generator=torch.Generator().manual_seed(1))
    noise[:, :, tokenizer.get_vocab_size() :] = noise[:, :, :3] = -50.0  # neither padding nor special tokens
    return cycle_table(order, VOCAB_SIZE, strength=30.0) + noise


@pytest.fixture
def engine(draft: str, table: torch.Tensor) -> LoopEngine:
    model = TableForward(table)
    return LoopEngine(ToyEngine(model, model, draft, policy=FullDraftLength(0), limits=ToyLimits(num_rows=8, max_len=256)))


@pytest.fixture
def site(engine: LoopEngine, folder: Path) -> Site:
    return Site(engine, folder, ServerConfig(engine=EngineConfig(seed=7)))  # type: ignore[arg-type]


def body(**options: Any) -> dict[str, Any]:
    return {"prompt": f" {TEXT} {TEXT}", "max_tokens": 40, "temperature": 0, **options}


async def choice(site: Site, **options: Any) -> dict[str, Any]:
    answer = await site.post(COMPLETIONS, body(**options))
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]


async def samples(site: Site) -> dict[str, float]:
    """Counters of /metrics by name, summed over labels."""
    text = (await site.get("/metrics")).body.decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


@every_drafter
async def test_text_ids_and_logprobs_end_at_the_stop_string(site: Site, table: torch.Tensor, tokenizer: Tokenizer, draft: str) -> None:
    """It ends inside an accepted run and across the borders of tokens."""
    free = await choice(site, logprobs=2)
    assert free["text"].startswith(f" {TEXT} {TEXT}")
    stop = "azy dog ov"
    stopped = await site.post(COMPLETIONS, body(logprobs=2, stop=stop))
    (ended,) = stopped.json()["choices"]
    assert ended["finish_reason"] == "stop"
    assert ended["text"] == free["text"][: free["text"].index(stop)]
    num_tokens = len(ended["logprobs"]["tokens"])
    assert stopped.json()["usage"]["completion_tokens"] == num_tokens
    assert ended["logprobs"]["tokens"] == free["logprobs"]["tokens"][:num_tokens]
    assert ended["logprobs"]["token_logprobs"] == free["logprobs"]["token_logprobs"][:num_tokens]
    said = "".join(ended["logprobs"]["tokens"])
    assert stop in said
    assert stop not in "".join(ended["logprobs"]["tokens"][:-1]), "the last token is the one that completes the stop string"
    events = (await site.post(COMPLETIONS, body(logprobs=2, stop=stop, stream=True))).events()[:-1]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == ended["text"]


@every_drafter
@pytest.mark.parametrize("num_top", [0, 5])
async def test_logprobs_are_the_models_own(engine: LoopEngine, site: Site, table: torch.Tensor, draft: str, num_top: int) -> None:
    """Of its raw law, whatever the options make of it, and whatever was drafted."""
    given = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 30, "temperature": 0.7, "seed": 3}
    given |= {"frequency_penalty": 0.5, "top_k": 9, "logit_bias": {"20": 3}}
    answer = (await site.post(CHAT, {**given, "logprobs": True, "top_logprobs": num_top})).json()["choices"][0]
    request, output = engine.answers[-1]
    reported = answer["logprobs"]["content"]
    assert len(reported) == len(output) == 30
    law = table[0].double().log_softmax(-1)
    for entry, before, token in zip(reported, (request.prompt_token_ids[-1], *output), output, strict=False):
        assert entry["logprob"] == pytest.approx(float(law[before, token]), abs=1e-3)
        best = law[before].topk(num_top).values.tolist() if num_top else []
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(best, abs=1e-3)
    unasked = (await site.post(CHAT, given)).json()["choices"][0]
    assert unasked["message"] == answer["message"]


@every_drafter
async def test_tokens_are_counted_and_not_chunks(site: Site, draft: str) -> None:
    """With drafts a chunk holds several tokens; usage, the answer's metrics and /metrics count tokens."""
    answer = await site.post(COMPLETIONS, body(stream=True, stream_options={"include_usage": True}))
    *events, last, done = answer.events()
    assert done == "[DONE]"
    num_chunks = sum(bool(event["choices"] and event["choices"][0]["text"]) for event in events)
    assert last["usage"]["completion_tokens"] == 40
    assert (num_chunks < 30) == (draft != "none")
    report = last["metrics"]["speculative_decoding"]
    assert sum(report["acceptance_histogram"]) == report["num_spec_steps"]
    assert report["num_accepted_draft_tokens"] <= report["num_draft_tokens"]
    assert (report["num_accepted_draft_tokens"] > 0) == (draft != "none")
    counted = await samples(site)
    assert counted["vllm:generation_tokens_total"] == 40
    assert counted["vllm:inter_token_latency_seconds_count"] == 39, "one a token behind the first"
    assert counted["vllm:request_time_per_output_token_seconds_count"] == 1
    seconds = counted["vllm:request_time_per_output_token_seconds_sum"] * 39
    assert seconds == pytest.approx(counted["vllm:inter_token_latency_seconds_sum"], rel=1e-6)
    accepted, drafted = (counted[f"vllm:spec_decode_num_{kind}_tokens_total"] for kind in ("accepted", "draft"))
    assert (accepted, drafted) == (report["num_accepted_draft_tokens"], report["num_draft_tokens"])
    assert sum([counted.get("vllm:spec_decode_num_accepted_tokens_per_pos_total", 0.0)]) == accepted


@every_drafter
async def test_speculation_is_a_choice_of_each_request(site: Site, draft: str) -> None:
    lengths = (0, None, 2, 0)
    answers = await asyncio.gather(
        *(site.post(COMPLETIONS, body(**({} if length is None else {"max_draft_length": length}))) for length in lengths)
    )
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    for length, answer in zip(lengths, answers, strict=True):
        report = answer.json()["metrics"]["speculative_decoding"]
        assert (report["num_draft_tokens"] > 0) == (draft != "none" and length != 0)
        assert report["num_spec_tokens"] == (0 if draft == "none" else 5 if length is None else length)


@every_drafter
async def test_a_chat_is_the_same_with_and_without_drafts(site: Site, draft: str) -> None:
    messages = [{"role": "user", "content": TEXT}]
    given = {"messages": messages, "max_tokens": 24, "temperature": 0.8, "seed": 5, "presence_penalty": -0.5, "logprobs": True}
    drafted, plain = [(await site.post(CHAT, {**given, **extra})).json()["choices"] for extra in ({}, {"max_draft_length": 0})]
    assert drafted == plain
