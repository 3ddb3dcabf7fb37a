"""The only defaults. Flags, `PACELINE_*` variables and config files are generated from these fields; nobody mutates them.

A field's help and range stand beside it, its choices in its type. `check_engine` and `settle_server` judge a whole configuration.
Facts learned at start (pages, vocabulary, choices) live in `core.facts.EngineFacts`.
"""

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from typing import Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from paceline.errors import BadInputError

T = TypeVar("T")

MAX_INT = 2**63 - 1  # the most that every part of the program can carry


def _setting(default: T, help: str, *, low: float | None = None, above: float | None = None, high: float | None = None) -> T:
    """A field with its help text and its range: from `low`, or from anything `above`, up to and with `high`.

    Typed as its default, as `dataclasses.field` is. Every number has both ends, which keeps infinity out.
    """
    return field(default=default, metadata={"help": help, "low": low, "above": above, "high": high})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine process needs. Everything has a meaning without a server, so `llm.py` takes the same object."""

    model: str = _setting("smollm2-135m-instruct", "A name from `paceline models list`, a folder, or a .gguf file.")
    model_dir: str | None = _setting(None, "The model as a folder; wins over the model's name.")
    device: Literal["auto", "cpu"] = _setting("auto", "Where the model runs.")
    dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto", "Number format of weights that are not quantised: auto is bfloat16; another one turns quantization auto into none."
    )
    quantization: Literal["auto", "none", "int8", "int4"] = _setting(
        "auto", "Weights as integers with scales, for the native CPU step: auto decides by the checkpoint, its size and the memory's speed."
    )
    draft: str = _setting("ngram", "Who proposes tokens: none, ngram, or a model (name, folder or .gguf file).")
    max_draft_length: int = _setting(5, "Most tokens proposed per step (K).", low=0, high=64)
    speculation: Literal["auto", "on", "off"] = _setting("auto", "auto drafts where it pays, on always, off loads no drafter.")
    measure_steps: bool = _setting(True, "With auto: measure at start, once per model and machine, what steps cost.")
    control_share: float = _setting(
        0.02, "Share of the time in which no request drafts, to measure what drafting gains; 0 measures nothing.", low=0, high=0.5
    )
    verification: Literal["coupled", "ratio"] = _setting("coupled", "Rule that accepts drafts; coupled gives the tokens of plain decoding.")
    max_model_len: int | None = _setting(
        None, "Prompt and output tokens of one request; unset: the model's limit, cut to what the KV memory holds.", low=2, high=2**27
    )
    max_num_batched_tokens: int = _setting(512, "Tokens per step over all requests.", low=1, high=2**20)
    min_batch_size: int = _setting(1, "Requests that an idle engine waits for, up to batch-wait-ms.", low=1, high=4096)
    max_batch_size: int = _setting(256, "Requests that run at once.", low=1, high=4096)
    batch_wait_ms: float = _setting(0.0, "Longest wait of an idle engine for min-batch-size requests.", low=0, high=60000)
    kv_cache_memory_bytes: int | None = _setting(
        None, "Memory for KV pages; unset: 1/4 of the free memory, at most 4 GiB.", low=1, high=2**50
    )
    block_size: int = _setting(16, "Tokens per KV page.", low=1, high=1024)
    enable_prefix_caching: bool = _setting(True, "Reuse the KV of prompts that begin alike.")
    seed: int | None = _setting(None, "Seeds the seeds of requests that bring none.", low=0, high=2**64 - 1)
    threads: int | None = _setting(None, "CPU threads of the engine; unset: physical cores.", low=1, high=1024)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`paceline serve`."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = _setting("127.0.0.1", "Address to listen on; one that other machines reach needs --insecure.")
    port: int = _setting(8000, "Port to listen on; 0 picks a free one.", low=0, high=65535)
    served_model_name: str | None = _setting(None, "Model name in the API; unset: the model's own.")
    batch_size: str = _setting("dynamic", "dynamic: between min-batch-size and max-batch-size; a number sets both.")
    insecure: bool = _setting(False, "Allow an address that other machines reach although the server asks for no key.")
    allowed_hosts: str | None = _setting(
        None, "On a loopback address: names, separated by commas, that requests may have as Host or Origin besides localhost."
    )
    max_concurrent_requests: int | None = _setting(
        None, "Requests that are answered at once, those that wait included; others get 503. Unset: no limit.", low=1, high=2**20
    )
    request_timeout: float | None = _setting(None, "Seconds from a request's arrival to its end; unset: no limit.", above=0, high=86400)
    responses_memory_bytes: int = _setting(
        64 * 1024**2,
        "Memory for stored responses, of which the oldest make room for new ones; 0 stores none.",
        low=0,
        high=2**50,
    )
    shutdown_timeout: float = _setting(30.0, "Seconds that running requests get after SIGTERM.", low=0, high=86400)
    log_format: Literal["console", "json"] = _setting("console", "Shape of log lines.")
    warmup: bool = _setting(True, "Run one request before the first user's.")


@dataclass(frozen=True, slots=True)
class DraftServerConfig(ServerConfig):
    """`paceline draft-server`: the same, on a port that leaves the usual one to the server that it drafts for."""

    port: int = _setting(8100, "Port to listen on; 0 picks a free one.", low=0, high=65535)


@dataclass(frozen=True, slots=True)
class AnswerConfig:
    """How text is asked for: the flags of `paceline generate` and `paceline chat`, and the same fields of an HTTP request.

    The defaults are the command line's; OpenAI's interface has others.
    """

    max_tokens: int = _setting(256, "Most tokens of an answer.", low=1, high=MAX_INT)
    temperature: float = _setting(0.0, "0 always takes the likeliest token.", low=0, high=100)
    top_p: float = _setting(1.0, "Sample from the likeliest tokens that together have this probability; 1 is off.", above=0, high=1)
    top_k: int = _setting(0, "Sample from this many likeliest tokens; 0 and -1 are off.", low=-1, high=MAX_INT)
    min_p: float = _setting(0.0, "Drop tokens below this share of the likeliest one's probability; 0 is off.", low=0, high=1)
    presence_penalty: float = _setting(0.0, "Taken off the logit of tokens that the answer holds.", low=-2, high=2)
    frequency_penalty: float = _setting(0.0, "Taken off the logit of a token for each time that the answer holds it.", low=-2, high=2)
    repetition_penalty: float = _setting(1.0, "Above 1 makes tokens of prompt and answer less likely; 1 is off.", above=0, high=100)
    min_tokens: int = _setting(0, "Tokens of an answer before it may end by itself.", low=0, high=MAX_INT)


Config = EngineConfig | ServerConfig | AnswerConfig
Scalar = str | int | float | bool | None


def settings(kind: type[Config]) -> Iterator[tuple[Field[object], object]]:
    """The fields of a configuration with their types, those of the engine inside a server's included."""
    types = get_type_hints(kind)
    for item in fields(kind):
        if is_dataclass(types[item.name]):
            yield from settings(types[item.name])
        else:
            yield item, types[item.name]


def values(config: Config) -> dict[str, Scalar]:
    """Every setting by name, flat."""
    flat = asdict(config)
    return flat.pop("engine", {}) | flat


def flag(name: str) -> str:
    """`max_batch_size` -> `--max-batch-size`."""
    return "--" + name.replace("_", "-")


def schema() -> dict[str, object]:
    """The JSON schema of a `--config` file."""
    properties: dict[str, object] = {}
    for item, kind in settings(ServerConfig):
        entry: dict[str, object] = {"description": item.metadata["help"], "default": item.default}
        options = [option for option in get_args(kind) if option is not type(None)]
        if get_origin(kind) is Literal:
            entry |= {"type": "string", "enum": options}
        else:
            name = {bool: "boolean", int: "integer", float: "number", str: "string"}[cast(type, options[0] if options else kind)]
            entry["type"] = [name, "null"] if options else name
        bounds = (("minimum", "low"), ("exclusiveMinimum", "above"), ("maximum", "high"))
        entry |= {key: item.metadata[bound] for key, bound in bounds if item.metadata[bound] is not None}
        properties[item.name] = entry
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Paceline configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def check_ranges(config: Config, spell: Callable[[str], str] = flag) -> None:
    """Raise BadInputError for the first value outside its field's choices or range; `spell` writes a field's name in the message."""
    given = values(config)
    for item, kind in settings(type(config)):
        value = given[item.name]
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise BadInputError(f"{spell(item.name)} {value} is not in this build; it has: {', '.join(get_args(kind))}", param=item.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_range(item.name, spell(item.name), value, item.metadata)


def _check_range(name: str, spelling: str, value: float, metadata: Mapping[str, float | None]) -> None:
    low, above, high = metadata["low"], metadata["above"], metadata["high"]
    # Written so that NaN, which is neither above nor below anything, is outside.
    if (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high):
        return
    allowed = f"between {low} and {high}" if above is None else f"above {above} and at most {high}"
    raise BadInputError(f"{spelling} is {value}; it must be {allowed}", param=name)


def check_engine(config: EngineConfig) -> None:
    """Raise BadInputError for settings that cannot work, alone or together."""
    check_ranges(config)
    check_weights(config)
    if config.min_batch_size > config.max_batch_size:
        raise BadInputError(
            f"--min-batch-size {config.min_batch_size} is above --max-batch-size {config.max_batch_size}; "
            "lower the first or raise the second"
        )
    if config.max_num_batched_tokens < config.max_batch_size:
        raise BadInputError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is below --max-batch-size {config.max_batch_size}, so a full batch "
            f"would not fit a step; raise the first or start with --max-batch-size {config.max_num_batched_tokens}"
        )


def check_weights(config: EngineConfig) -> None:
    """Raise BadInputError for two number formats of the weights at once."""
    if config.quantization in ("int8", "int4") and config.dtype != "auto":
        raise BadInputError(
            f"--quantization {config.quantization} and --dtype {config.dtype} contradict each other: leave one of them out",
            param="quantization",
        )


def settle_server(config: ServerConfig) -> ServerConfig:
    """Check a server's settings and resolve the ones that stand for others (`batch_size`). Raises BadInputError."""
    if config.batch_size != "dynamic":
        config = replace(config, engine=_fixed_batch(config.engine, config.batch_size))
    if not config.warmup:
        config = replace(config, engine=replace(config.engine, measure_steps=False))
    check_ranges(config)
    check_engine(config.engine)
    if not config.insecure and not is_loopback(config.host):
        raise BadInputError(
            f"--host {config.host} lets other machines in, and this build asks for no key; "
            "listen on 127.0.0.1 behind a proxy that checks keys, or add --insecure"
        )
    return config


def settle_draft_server(config: DraftServerConfig) -> ServerConfig:
    """`settle_server` for a server that only drafts, and decodes plainly. Raises BadInputError for settings that say otherwise."""
    usual = EngineConfig()
    for name, value, unset in (
        ("draft", config.engine.draft, (usual.draft, "none")),
        ("max_draft_length", config.engine.max_draft_length, (usual.max_draft_length,)),
        ("speculation", config.engine.speculation, (usual.speculation, "off")),
    ):
        if value not in unset:
            raise BadInputError(
                f"{flag(name)} {value} has no effect on a draft server: each of its requests says how far to draft, and the drafting "
                "itself is plain decoding; leave it out",
                param=name,
            )
    return settle_server(replace(config, engine=replace(config.engine, draft="none", speculation="off")))


def _fixed_batch(engine: EngineConfig, batch_size: str) -> EngineConfig:
    if not batch_size.isdecimal() or int(batch_size) < 1:
        raise BadInputError(f"--batch-size {batch_size} is neither dynamic nor a number of requests of at least 1")
    size, default = int(batch_size), EngineConfig()
    for name, given, usual in (
        ("min_batch_size", engine.min_batch_size, default.min_batch_size),
        ("max_batch_size", engine.max_batch_size, default.max_batch_size),
    ):
        if given not in (usual, size):
            raise BadInputError(f"--batch-size {size} contradicts {flag(name)} {given}; give one of them")
    return replace(engine, min_batch_size=size, max_batch_size=size)


@lru_cache(maxsize=64)  # each request names its host
def is_loopback(host: str) -> bool:
    """Whether a host name or address, an IPv6 one with or without its brackets, is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
