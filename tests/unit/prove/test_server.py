"""What servers are and can is found out, not believed."""

import pytest

from paceline.errors import BadInputError, MissingError
from paceline.prove.client import ChatClient
from paceline.prove.counters import Meter
from paceline.prove.plan import ServerFacts
from paceline.prove.server import CHUNK_USAGE, examine, num_gpus_of, request_fields
from tests.fakes.mock_openai import MODEL, Behaviour, MockOpenAi


async def facts_of(behaviour: Behaviour, model: str | None = None, probes_eos: bool = False) -> ServerFacts:
    async with MockOpenAi(behaviour) as server, ChatClient(server.url, behaviour.api_key) as client:
        return await examine(client, Meter(client), model, probes_eos)


async def test_a_server_that_can_everything() -> None:
    facts = await facts_of(Behaviour(api_key="k"), MODEL)
    assert (facts.kind, facts.model, facts.max_model_len, facts.is_lossless) == ("paceline", MODEL, 4096, True)
    assert {"max_draft_length", "cache_salt", "ignore_eos", "return_token_ids", CHUNK_USAGE} <= facts.optional_fields
    assert (facts.has_stream_usage, facts.has_chunk_usage, facts.gives_token_ids, facts.gives_acceptance) == (True,) * 4
    assert (facts.honours_draft_length, facts.separates_salts) == (True, True)
    assert "vllm:spec_decode_num_drafts_total" in facts.counters


@pytest.mark.parametrize("gives_acceptance", [True, False])
async def test_a_draft_length_that_is_taken_and_ignored_is_noticed(gives_acceptance: bool) -> None:
    """By the answers, and where they tell nothing by the server's counters."""
    assert (await facts_of(Behaviour(honours_draft_length=False, gives_acceptance=gives_acceptance))).honours_draft_length is False
    assert (await facts_of(Behaviour(gives_acceptance=gives_acceptance))).honours_draft_length is True


async def test_what_cannot_be_told_is_not_claimed() -> None:
    """No drafts at all, or nobody who counts them."""
    assert (await facts_of(Behaviour(draft_length=0))).honours_draft_length is None
    assert (await facts_of(Behaviour(gives_acceptance=False, has_counters=False))).honours_draft_length is None


async def test_a_salt_that_is_taken_and_ignored_is_noticed() -> None:
    assert (await facts_of(Behaviour(keeps_salts_apart=False))).separates_salts is False


async def test_a_server_that_refuses_what_it_does_not_know_is_asked_for_less() -> None:
    facts = await facts_of(Behaviour(owner="strict corp", refuses_unknown=True))
    assert facts.optional_fields == {CHUNK_USAGE}
    assert (facts.kind, facts.honours_draft_length, facts.separates_salts) == ("strict corp", False, False)
    assert request_fields(facts, {"max_draft_length": 0, "cache_salt": "x"}) == ({}, {CHUNK_USAGE: True})


@pytest.mark.parametrize(
    ("told", "num_gpus"),
    [
        ({}, None),
        ({"num_gpus": 4}, 4),
        ({"num_gpus": 0}, None),
        ({"num_gpus": True}, None),
        ({"num_gpus": "4"}, None),
        ({"tp_size": 2}, 2),
        ({"tp_size": 2, "pp_size": 3, "dp_size": 2}, 12),
        ({"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 8),
        ({"tp_size": 1, "device": "cpu"}, None),
        ({"tp_size": 1, "device": "cuda"}, 1),
    ],
)
def test_gpus_are_counted_only_where_they_are_told(told: dict[str, object], num_gpus: int | None) -> None:
    assert num_gpus_of(told) == num_gpus


async def test_ways_to_count_tokens() -> None:
    assert not (await facts_of(Behaviour(has_usage=False))).has_stream_usage
    facts = await facts_of(Behaviour(has_chunk_usage=False))
    assert (facts.has_chunk_usage, facts.gives_token_ids) == (False, True)
    fields, _ = request_fields(facts, {"max_draft_length": 0})
    assert fields["return_token_ids"] is True, "where usage does not come with each chunk, ids tell the counts"
    assert "return_token_ids" not in request_fields(await facts_of(Behaviour()), {})[0]


async def test_what_is_no_server_says_what_to_do() -> None:
    async with ChatClient("http://127.0.0.1:1") as client:
        with pytest.raises(MissingError, match="paceline serve"):
            await examine(client, Meter(client), None)
    with pytest.raises(BadInputError, match=f"no model 'other'; it has {MODEL}"):
        await facts_of(Behaviour(), "other")
    async with MockOpenAi(Behaviour(api_key="k")) as server, ChatClient(server.url) as client:
        with pytest.raises(BadInputError, match="PACELINE_API_KEY"):
            await examine(client, Meter(client), None)
    async with MockOpenAi() as server, ChatClient(server.url + "/nowhere") as client:
        with pytest.raises(BadInputError, match="no list of models"):
            await examine(client, Meter(client), None)
    with pytest.raises(BadInputError, match="the engine is on fire"):
        await facts_of(Behaviour(faults={"Repeat": "http_500"}))


async def test_whether_ignore_eos_is_honoured_is_tried_out() -> None:
    with pytest.raises(BadInputError, match="ignore_eos"):
        await facts_of(Behaviour(num_answer_tokens=5), probes_eos=True)
    assert await facts_of(Behaviour(num_answer_tokens=60), probes_eos=True), "an answer that does not end early proves nothing"
