"""What a server is and can: what it says of itself, and what a few small requests show. Called by `measure.py` before anything else.

A field that a server does not refuse may still be ignored; what the comparison stands on (`max_draft_length`, `cache_salt`) is tried out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from paceline.errors import BadInputError, MissingError
from paceline.prove.client import Answer, Ask, ChatClient
from paceline.prove.counters import NUM_DRAFTS, Meter, Scrape
from paceline.prove.plan import ServerFacts

CHUNK_USAGE = "continuous_usage_stats"  # stands in stream_options
_FIELDS: dict[str, object] = {  # beyond OpenAI's, with values that fit a probe
    "max_draft_length": 0,
    "cache_salt": "a",
    "ignore_eos": False,
    "min_tokens": 1,
    "return_token_ids": True,  # vLLM's
    "return_spec_tokens_details": True,  # SGLang's account of drafts
    "cache_prompt": False,  # llama.cpp's prefix cache
}
_KINDS = {
    "paceline": "paceline",
    "me": "llama-cpp-python",
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama.cpp",
    "llama.cpp": "llama.cpp",
}
_REFUSED = (400, 422)
_PROBE_TOKENS = 24
# Long enough for a page or two of any prefix cache, and easy to draft for.
_PROBE = "Repeat these words again and again, exactly as they are:\n" + " ".join(["one two three four five six seven eight nine ten"] * 12)
_SGLANG_FACTS = (
    "dtype", "quantization", "kv_cache_dtype", "attention_backend", "version",
    "device", "tp_size", "pp_size", "dp_size", "enable_dp_attention",
)  # fmt: skip
_EOS_PROBE, _EOS_TOKENS = "Say only the word yes.", 48


async def examine(client: ChatClient, meter: Meter, model: str | None, probes_eos: bool = False) -> ServerFacts:
    """Ask a server what it is, and try out what it can.

    Raises MissingError if there is no server, BadInputError if it is no OpenAI server, wants a key, or lacks the model.
    """
    facts = await _introduction(client, model)
    scrape = await meter.find()
    facts = replace(facts, counters=frozenset(scrape.counters))
    optional = await _accepted_fields(client, facts.model)
    facts = replace(facts, optional_fields=optional)
    before = await meter.settled(scrape, 1)
    plain = await _probe(client, facts, {"cache_salt": "a", "max_draft_length": 0})
    between = await meter.settled(before, plain.num_output_tokens)
    drafted = await _probe(client, facts, {"cache_salt": "a"})
    after = await meter.settled(between, drafted.num_output_tokens)
    other = await _probe(client, facts, {"cache_salt": "b"})
    is_honoured = _is_honoured(plain, drafted, _num_drafts(before, between), _num_drafts(between, after))
    facts = replace(
        facts,
        has_stream_usage=drafted.has_usage,
        has_chunk_usage=drafted.has_chunk_usage and bool(drafted.chunk_tokens),
        gives_token_ids=bool(drafted.token_ids),
        gives_acceptance=drafted.acceptance is not None,
        honours_draft_length=is_honoured if "max_draft_length" in optional else False,
        separates_salts=_is_separate(drafted, other) if "cache_salt" in optional else False,
    )
    if probes_eos and "ignore_eos" in optional and not await _goes_on(client, facts, {"ignore_eos": True}):
        raise BadInputError(f"{client.base_url} does not honour ignore_eos; measure without it")
    return facts


def request_fields(facts: ServerFacts, wanted: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """(fields of the body, stream options) for one request: of those `wanted` what the server takes, and what makes it say more."""
    always: dict[str, object] = {"return_spec_tokens_details": True, "cache_prompt": False}
    if not facts.has_chunk_usage:
        always["return_token_ids"] = True  # for the counts alone
    fields = {name: value for name, value in {**always, **wanted}.items() if name in facts.optional_fields}
    if "cache_prompt" in fields and facts.kind != "llama.cpp":
        del fields["cache_prompt"]
    return fields, {CHUNK_USAGE: True} if CHUNK_USAGE in facts.optional_fields else {}


def length_fields(num_tokens: int) -> dict[str, object]:
    """What, beside `max_tokens`, makes an answer exactly so long. Either would do where both are honoured."""
    return {"ignore_eos": True, "min_tokens": num_tokens}


async def _introduction(client: ChatClient, model: str | None) -> ServerFacts:
    status, body = await client.get("/v1/models")
    if status in (401, 403):
        raise BadInputError(f"{client.base_url} wants an API key: give it with --api-key or in PACELINE_API_KEY")
    listed = _object(body).get("data") if status == 200 else None
    if not isinstance(listed, list) or not listed:
        raise BadInputError(f"{client.base_url}/v1/models is no list of models (HTTP {status}); give the --url of an OpenAI server")
    entries = [cast("dict[str, object]", entry) for entry in cast("list[object]", listed) if isinstance(entry, dict)]
    names = [str(entry.get("id")) for entry in entries]
    if model is not None and model not in names:
        raise BadInputError(f"{client.base_url} has no model {model!r}; it has {', '.join(names[:20])}")
    entry = entries[0 if model is None else names.index(model)]
    kind = str(entry.get("owned_by", "unknown"))
    told = {name: value for name, value in entry.items() if name not in ("object", "created", "permission")} | await _more_facts(client)
    max_model_len, is_lossless, version, dtype = (told.get(name) for name in ("max_model_len", "lossless", "version", "dtype"))
    return ServerFacts(
        base_url=client.base_url,
        kind=_KINDS.get(kind.lower(), kind),
        model=str(entry.get("id")),
        version=None if version is None else str(version),
        max_model_len=max_model_len if isinstance(max_model_len, int) else None,
        is_lossless=is_lossless if isinstance(is_lossless, bool) else None,
        dtype=None if dtype is None else str(dtype),
        num_gpus=num_gpus_of(told),
        facts=told,
    )


def num_gpus_of(told: Mapping[str, object]) -> int | None:
    """GPUs that a server computes on: as it says, or as SGLang's parallel sizes multiply. None where neither is told, or on a CPU."""
    if _positive(told.get("num_gpus")) is not None:
        return _positive(told["num_gpus"])
    per_replica = _positive(told.get("tp_size"))
    if per_replica is None or str(told.get("device", "")).startswith("cpu"):
        return None
    # Data-parallel attention shares out the GPUs of the tensor parallel group; plain data parallelism brings its own.
    num_replicas = 1 if told.get("enable_dp_attention") is True else _positive(told.get("dp_size")) or 1
    return per_replica * (_positive(told.get("pp_size")) or 1) * num_replicas


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


async def _more_facts(client: ChatClient) -> dict[str, object]:
    """What servers of several kinds tell on routes of their own."""
    facts: dict[str, object] = {}
    version = await _optional(client, "/version")
    if "version" in version:
        facts["version"] = version["version"]
    info = await _optional(client, "/server_info")
    facts |= {name: info[name] for name in _SGLANG_FACTS if name in info}
    facts |= {name: value for name, value in info.items() if name.startswith("speculative_") and isinstance(value, str | int | float)}
    properties = await _optional(client, "/props")
    if "build_info" in properties:
        facts |= {"version": properties["build_info"], "model_path": properties.get("model_path")}
    return facts


async def _optional(client: ChatClient, path: str) -> dict[str, object]:
    try:
        status, body = await client.get(path)
    except MissingError:
        return {}
    return _object(body) if status == 200 else {}


def _object(body: bytes) -> dict[str, Any]:
    try:
        told: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return cast("dict[str, Any]", told) if isinstance(told, dict) else {}


async def _accepted_fields(client: ChatClient, model: str) -> frozenset[str]:
    """Which optional fields do not make the server refuse a request: all at once, and one by one if that is refused."""
    if await _is_accepted(client, model, [*_FIELDS, CHUNK_USAGE]):
        return frozenset((*_FIELDS, CHUNK_USAGE))
    if not await _is_accepted(client, model, []):
        answer = await client.complete(_ask(model, {}, is_chunk_usage=False, max_tokens=1))
        raise BadInputError(f"{client.base_url} does not answer a plain chat completion: {answer.error}")
    return frozenset([name for name in (*_FIELDS, CHUNK_USAGE) if await _is_accepted(client, model, [name])])


async def _is_accepted(client: ChatClient, model: str, names: Sequence[str]) -> bool:
    """Raises BadInputError for an answer that is neither a success nor a refusal of the request's form."""
    fields = {name: _FIELDS[name] for name in names if name in _FIELDS}
    answer = await client.complete(_ask(model, fields, CHUNK_USAGE in names, max_tokens=1))
    if answer.status == 200 or answer.status in _REFUSED:
        return answer.status == 200
    raise BadInputError(f"{client.base_url} does not answer a chat completion: {answer.error}")


def _ask(model: str, fields: Mapping[str, object], is_chunk_usage: bool, max_tokens: int, text: str = _PROBE) -> Ask:
    options = {CHUNK_USAGE: True} if is_chunk_usage else None
    return Ask(model, [{"role": "user", "content": text}], max_tokens, fields=fields, stream_options=options)


async def _probe(client: ChatClient, facts: ServerFacts, wanted: Mapping[str, object]) -> Answer:
    fields, _ = request_fields(facts, {"return_token_ids": True, **wanted})
    answer = await client.complete(_ask(facts.model, fields, CHUNK_USAGE in facts.optional_fields, _PROBE_TOKENS))
    if answer.status != 200 or (answer.error is not None and answer.has_usage):
        raise BadInputError(f"{client.base_url} does not answer a chat completion: {answer.error}")
    return answer


def _num_drafts(before: Scrape, after: Scrape) -> float:
    return after.counters.get(NUM_DRAFTS, 0.0) - before.counters.get(NUM_DRAFTS, 0.0)


def _is_honoured(plain: Answer, drafted: Answer, num_plain_drafts: float, num_drafts: float) -> bool | None:
    """Whether drafts stop with `max_draft_length: 0`; None if none came without it either, or nobody counts them."""
    if plain.acceptance is not None and drafted.acceptance is not None:  # else by the counters of the whole server
        num_plain_drafts, num_drafts = plain.acceptance.num_spec_steps, drafted.acceptance.num_spec_steps
    if num_plain_drafts > 0:
        return False
    return True if num_drafts > 0 else None


def _is_separate(again: Answer, other: Answer) -> bool | None:
    """`again` had the salt of a request before it, `other` one of its own."""
    if not again.tells_cached_tokens or again.num_cached_tokens == 0:
        return None
    return other.num_cached_tokens < again.num_cached_tokens


async def gives_length(client: ChatClient, facts: ServerFacts) -> bool:
    """Whether the server can be asked for answers of a given length, neither shorter nor longer."""
    wanted = length_fields(_EOS_TOKENS)
    return not facts.optional_fields.isdisjoint(wanted) and await _goes_on(client, facts, wanted)


async def _goes_on(client: ChatClient, facts: ServerFacts, wanted: Mapping[str, object]) -> bool:
    """Whether an answer goes on to its limit with the fields `wanted`. One that does so by itself proves nothing, and passes."""
    fields, _ = request_fields(facts, wanted)
    answer = await client.complete(_ask(facts.model, fields, CHUNK_USAGE in facts.optional_fields, _EOS_TOKENS, _EOS_PROBE))
    return answer.finish_reason == "length"
