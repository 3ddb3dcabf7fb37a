"""Responses through their routes: whole and streamed alike at any cut, conversations that go on, and who may see what."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.fakes.openai_types import check_items, put_together
from tests.unit.server.responses.conftest import CALL, PATH, TOOL, Speak, ask, plain, stream

BROKEN = '<tool_call>\n{"name": "fox", "arguments": {"over": 1} oh'


async def test_a_whole_response(speak: Speak) -> None:
    body = await ask(
        speak(), max_output_tokens=50, temperature=0, metadata={"a": "b"}, instructions="be brief", user="ann", truncation="disabled"
    )
    assert (body["object"], body["status"], body["error"], body["incomplete_details"]) == ("response", "completed", None, None)
    assert (body["metadata"], body["instructions"], body["user"], body["temperature"]) == ({"a": "b"}, "be brief", "ann", 0)
    assert (body["model"], body["max_output_tokens"], body["store"]) == ("fake", 50, True)
    assert body["completed_at"] >= body["created_at"]
    assert plain(body["output"]) == [("message", "completed", None, None, ["the quick brown fox"])]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0
    assert sum(body["metrics"]["speculative_decoding"]["acceptance_histogram"]) == body["metrics"]["speculative_decoding"]["num_spec_steps"]


async def test_options_reach_the_engine(speak: Speak, shown: Callable[..., str]) -> None:
    site = speak()
    await ask(site, instructions="be brief", seed=3, top_k=5, min_p=0.1, max_draft_length=2, stop=["zz"], temperature=0.5, top_p=0.9)
    request = site.engine.requests[0]
    sampling = request.sampling
    assert (sampling.seed, sampling.top_k, sampling.min_p, sampling.temperature, sampling.top_p) == (3, 5, 0.1, 0.5, 0.9)
    assert request.max_draft_length == 2
    assert "system\nbe brief" in shown(site)


async def test_the_length_cap_makes_it_incomplete(speak: Speak) -> None:
    body = await ask(speak(), max_output_tokens=3)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert body["usage"]["output_tokens"] == 3
    events = await stream(speak(), max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
    assert plain(put_together(events)) == plain(body["output"]) == plain(events[-1]["response"]["output"])


TEXTS = {
    "plain": "the quick brown fox 😀 over 日本",
    "nothing": "",
    "call": CALL,
    "two calls": f"{CALL}\n{CALL}",
    "text and call": f"the dog\n{CALL}",
    "thought": "<think>\nhm, the dog\n</think>\n\nthe fox",
    "thought and call": f"<think>\nhm\n</think>\n\n{CALL}",
    "thought, text, call": f"<think>\nhm\n</think>\n\nthe fox\n{CALL}\n",
    "broken call": f"the dog {BROKEN}",
    "broken call at the end": "the dog <tool_call>\n" + '{"name": "fox", "arguments": {"over',
    "broken, then whole": f"{BROKEN} {CALL}",
    "no call": "<tool_call> is a tag",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
async def test_any_cut_gives_the_same_response(think: Speak, text: str) -> None:
    expected = None
    site = think(text)
    for chunk in (1, 3, 8):
        site.engine.chunk = chunk
        body = await ask(site, tools=[TOOL], max_output_tokens=500)
        expected = expected or plain(body["output"])
        assert plain(body["output"]) == expected, chunk
        events = await stream(site, tools=[TOOL], max_output_tokens=500)
        last = events[-1]
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        assert last["type"] == "response.completed"
        assert put_together(events) == last["response"]["output"], "deltas and the end say the same"
        assert plain(last["response"]["output"]) == expected
        assert last["response"]["usage"] == body["usage"]
        assert last["response"]["metrics"]["speculative_decoding"] == body["metrics"]["speculative_decoding"]


async def test_what_stands_in_the_items(think: Speak) -> None:
    body = await ask(think(TEXTS["thought, text, call"]), tools=[TOOL], max_output_tokens=500)
    thought, message, call = body["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "the fox"
    assert (call["name"], call["arguments"]) == ("fox", '{"over": "dog"}')
    assert call["call_id"].startswith("call_")
    assert 0 < body["usage"]["output_tokens_details"]["reasoning_tokens"] < body["usage"]["output_tokens"]
    assert (body["tools"][0]["name"], body["tool_choice"]) == ("fox", "auto")
    broken = await ask(think(TEXTS["broken call"]), tools=[TOOL], max_output_tokens=500)
    assert "".join(item["content"][0]["text"] for item in broken["output"]) == TEXTS["broken call"]


async def test_reasoning_tokens_are_counted(think: Speak, tokenizer: Tokenizer) -> None:
    text = "<think>hm, the quick dog</think>the fox"
    num_reasoning = len(tokenizer.encode(text[: text.index("</think>")], add_special_tokens=False).ids)
    for chunk in (1, 3):
        counted = (await ask(think(text, chunk), max_output_tokens=500))["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert abs(counted - num_reasoning) <= chunk


@pytest.mark.parametrize("chunk", [1, 4])
async def test_logprobs(speak: Speak, chunk: int) -> None:
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 50}
    body = await ask(speak(chunk=chunk), **options)
    entries = body["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries) == "the quick brown fox<|im_end|>"
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    events = await stream(speak(chunk=chunk), **options)
    deltas = [entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
    assert deltas == entries[: len(deltas)]
    assert len(entries) - len(deltas) <= 1, "all but the end of the text comes with the text"
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries


async def test_logprobs_are_the_messages_alone(think: Speak) -> None:
    text = "<think>hm, the quick dog</think>the fox"
    body = await ask(think(text), include=["message.output_text.logprobs"], max_output_tokens=500)
    entries = body["output"][1]["content"][0]["logprobs"]
    told = "".join(entry["token"] for entry in entries)
    assert told.removesuffix("<|im_end|>").endswith("the fox")
    assert "quick" not in told


async def test_a_conversation_goes_on(speak: Speak, shown: Callable[..., str]) -> None:
    site = speak()
    first = await ask(site, "one", instructions="be brief", max_output_tokens=50)
    second = await ask(site, [{"role": "user", "content": "two"}], previous_response_id=first["id"], max_output_tokens=50)
    third = (await stream(site, "three", previous_response_id=second["id"], instructions="be loud", max_output_tokens=50))[-1]["response"]
    said = "the quick brown fox"
    prompt = shown(site)
    places = [prompt.index(text) for text in ("be loud", "one", said, "two", "three")]
    assert places == sorted(places)
    assert prompt.count(said) == 2
    assert "be brief" not in prompt, "instructions are those of one request"
    assert third["previous_response_id"] == second["id"]
    spelt_out = [
        {"role": "developer", "content": "be loud"}, {"role": "user", "content": "one"}, {"role": "assistant", "content": said},
        {"role": "user", "content": "two"}, *second["output"], {"role": "user", "content": "three"},
    ]  # fmt: skip
    await ask(site, spelt_out, store=False)
    assert shown(site) == prompt


async def test_results_of_calls_go_back(think: Speak, shown: Callable[..., str]) -> None:
    site = think(f"<think>\nhm\n</think>\n\n{CALL}")
    first = await ask(site, tools=[TOOL], max_output_tokens=500)
    call = first["output"][1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
    await ask(site, [result], previous_response_id=first["id"], tools=[TOOL])
    linked = shown(site)
    assert '{"name": "fox", "arguments": {"over": "dog"}}' in linked
    assert "<tool_response>\n42\n</tool_response>" in linked
    await ask(site, [{"role": "user", "content": "hi"}, *first["output"], result], tools=[TOOL])
    assert shown(site) == linked


async def test_one_call_if_more_are_not_wanted(think: Speak) -> None:
    text = f"the dog {BROKEN} {CALL}\n{CALL} and more"
    kinds = ["message", "message", "function_call"]
    site = think(text)
    for chunk in (1, 3, 8):
        site.engine.chunk = chunk
        both = await ask(site, tools=[TOOL], max_output_tokens=500)
        assert [item["type"] for item in both["output"]] == [*kinds, "function_call", "message"]
        one = await ask(site, tools=[TOOL], max_output_tokens=500, parallel_tool_calls=False)
        assert plain(one["output"]) == plain(both["output"][:3])
        assert (one["parallel_tool_calls"], both["parallel_tool_calls"]) == (False, True)
        events = await stream(site, tools=[TOOL], max_output_tokens=500, parallel_tool_calls=False)
        assert plain(events[-1]["response"]["output"]) == plain(one["output"])
    none = await ask(think("the dog <tool_call> and more"), tools=[TOOL], max_output_tokens=500, parallel_tool_calls=False)
    assert none["output"][0]["content"][0]["text"] == "the dog <tool_call> and more"


async def test_the_form_of_the_text(speak: Speak) -> None:
    """With the real compiler of grammars beside the server."""
    site = speak("{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    try:
        body = await ask(site, text={"format": form}, max_output_tokens=50)
        assert body["text"]["format"] == {**form, "description": None}
        assert '"a"' in (site.engine.requests[-1].sampling.grammar or "")
        assert (await ask(site, text={"format": {"type": "json_object"}}))["text"]["format"] == {"type": "json_object"}
        assert site.engine.requests[-1].sampling.grammar
        await ask(site, text={"format": {"type": "text"}})
        assert site.engine.requests[-1].sampling.grammar is None
        bad = await site.post(PATH, {"input": "hi", "text": {"format": {**form, "schema": {"type": "nonsense"}}}})
        assert (bad.status, bad.json()["error"]["param"]) == (400, "text.format.schema")
    finally:
        await site.server.close()


async def test_truncation_leaves_out_the_oldest_turns(think: Speak, shown: Callable[..., str]) -> None:
    site = think("x")
    call = {"type": "function_call", "call_id": "c1", "name": "fox", "arguments": "{}"}
    turns: list[dict[str, Any]] = [{"role": "developer", "content": "be kind"}]
    for index in range(30):
        turns += [{"role": "user", "content": f"turn {index} " + "x" * 300}, {**call, "call_id": f"c{index}"}]
        turns += [{"type": "function_call_output", "call_id": f"c{index}", "output": "42"}, {"role": "assistant", "content": "y"}]
    turns.append({"role": "user", "content": "last"})
    refused = await site.post(PATH, {"input": turns, "max_output_tokens": 50})
    assert (refused.status, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    body = await ask(site, turns, instructions="be brief", truncation="auto", max_output_tokens=50)
    assert body["truncation"] == "auto"
    prompt = shown(site)
    assert "be brief" in prompt
    assert "be kind" in prompt
    kept = [index for index in range(30) if f"turn {index} " in prompt]
    assert kept == list(range(30 - len(kept), 30))
    assert 0 < len(kept) < 30
    room = 4096 - len(site.engine.requests[-1].prompt_token_ids) - 50
    assert 0 <= room < 500, "not one turn more would fit"
    go_on = await ask(site, "more", previous_response_id=body["id"], truncation="auto", max_output_tokens=50)
    assert go_on["status"] == "completed"
    alone = await site.post(PATH, {"input": "x" * 6000, "truncation": "auto"})
    assert (alone.status, alone.json()["error"]["param"]) == (400, "input")
    before = len(site.engine.requests)
    assert (await site.post(PATH, {"input": "hi", "truncation": "auto", "top_k": -5})).status == 400
    assert len(site.engine.requests) == before
    await ask(site, "short", truncation="auto")
    assert "short" in shown(site)


async def test_a_stored_response_can_be_fetched_and_deleted(speak: Speak) -> None:
    site = speak()
    body = await ask(site)
    path = f"{PATH}/{body['id']}"
    assert (await site.get(path)).json() == body
    streamed = (await stream(site))[-1]["response"]
    assert (await site.get(f"{PATH}/{streamed['id']}")).json() == streamed
    deleted = await site.post(path, method="DELETE")
    assert deleted.json() == {"id": body["id"], "object": "response", "deleted": True}
    for answer in (await site.get(path), await site.post(path, method="DELETE"), await site.post(f"{path}/cancel")):
        assert answer.status == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["param"] == "response_id"


async def test_what_is_not_to_be_stored_is_not(speak: Speak) -> None:
    site = speak()
    body = await ask(site, store=False)
    assert body["store"] is False
    assert (await site.get(f"{PATH}/{body['id']}")).status == 404


async def test_another_key_sees_nothing(speak: Speak) -> None:
    site = speak()
    mine, other = {"authorization": "Bearer sk-1"}, {"authorization": "Bearer sk-2"}
    answer = await site.post(PATH, {"input": "hi"}, headers=mine)
    path = f"{PATH}/{answer.json()['id']}"
    for headers in (other, {}):
        for method, suffix in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            assert (await site.post(path + suffix, method=method, headers=headers)).status == 404
        refused = await site.post(PATH, {"input": "hi", "previous_response_id": answer.json()["id"]}, headers=headers)
        assert refused.status == 400
        assert refused.json()["error"]["code"] == "previous_response_not_found"
        assert refused.json()["error"]["param"] == "previous_response_id"
    assert (await site.get(path, headers=mine)).status == 200


async def test_input_items(speak: Speak) -> None:
    site = speak()
    first = await ask(site, "one")
    second = await ask(site, [{"role": "user", "content": "two"}, {"role": "user", "content": "three"}], previous_response_id=first["id"])
    path = f"{PATH}/{second['id']}/input_items"
    body = (await site.get(path)).json()
    check_items(body)
    texts = [item["content"][0]["text"] for item in body["data"]]
    assert texts == ["three", "two", "the quick brown fox", "one"]
    assert (body["has_more"], body["first_id"], body["last_id"]) == (False, body["data"][0]["id"], body["data"][-1]["id"])
    page = (await site.get(f"{path}?order=asc&limit=1")).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == ([body["last_id"]], True)
    rest = (await site.get(f"{path}?order=asc&after={page['last_id']}")).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == texts[2::-1]
    for query, param in (("order=up", "order"), ("limit=0", "limit"), ("limit=x", "limit"), ("limit=101", "limit"), ("after=no", "after")):
        answer = await site.get(f"{path}?{query}")
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)
