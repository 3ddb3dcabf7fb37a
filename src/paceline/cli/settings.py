"""Where a setting's value comes from: flag over `PACELINE_*` variable over `--config` file over the default in `config.py`.

`main.py` hands these sources to the argument parser; the verbs see finished configuration objects only.
"""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, cast, get_args

import yaml
from cyclopts import App, ArgumentCollection, Parameter
from cyclopts.config import Dict, Env

from paceline.config import AnswerConfig, DraftServerConfig, EngineConfig, ServerConfig, flag, settings
from paceline.errors import BadInputError
from paceline.prove.options import ProveConfig

# Flags of the interface that this build does not have yet, each with what stands in its place.
ABSENT = {
    "api_key": "no keys; it listens on this machine only",
    "api_keys_file": "no keys; it listens on this machine only",
    "gpu_memory_utilization": "CPU memory, set by --kv-cache-memory-bytes",
    "kv_cache_dtype": "KV in float32, in float16 where weights are quantised",
    "metrics_port": "/metrics on --port",
    "rate_limit": "no rate limit",
    "speculative_config": "--draft, --max-draft-length and --verification",
    "ssl_certfile": "HTTP; a proxy in front can add TLS",
    "ssl_keyfile": "HTTP; a proxy in front can add TLS",
    "store": "no conversation store",
    "tensor_parallel_size": "one CPU device",
}
_ALIASES = {"max_num_seqs": "max_batch_size"}
_OTHER_VARIABLES = ("cache", "config", "debug")
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
_ON_OFF = {"on": "true", "off": "false"}  # YAML's other words for a boolean
_UNSET = ("", "~", "null")  # how YAML writes "nothing"

# Flatten the dataclasses into flags; `config.py` itself stays free of the parser.
Parameter(name="*", group="Engine")(EngineConfig)
Parameter(name="*", group="Server")(ServerConfig)
Parameter(name="*", group="Server")(DraftServerConfig)
Parameter(name="*", group="Answer")(AnswerConfig)

ConfigFile = Annotated[Path | None, Parameter(help="YAML file of settings (or PACELINE_CONFIG).", group="Every command")]


class Origins:
    """The last source in the parser's chain: changes nothing, notes where each value came from, and refuses fractions for whole numbers."""

    def __init__(self) -> None:
        self.by_name: dict[str, str] = {}

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Called by the parser with every argument; one that some source gave has tokens."""
        for argument in arguments:
            if argument.tokens:
                token = argument.tokens[0]
                origin = {"cli": "flag", "env": f"variable {token.keyword}"}.get(token.source, token.source)
                if int in (argument.hint, *get_args(argument.hint)) and not _WHOLE_NUMBER.fullmatch(token.value):
                    raise BadInputError(f"{argument.name} {token.value} ({origin}) is not a whole number")  # the parser would round it
                self.by_name[argument.name.lstrip("-").lower().replace("-", "_").removeprefix("no_")] = origin


def own_names(tokens: Sequence[str]) -> frozenset[str]:
    """Settings of this command's own that only `serve` lacks: the key that `prove` shows to another server."""
    return frozenset({"api_key"}) if tokens[:1] in (["prove"], ("prove",)) else frozenset()


def sources(config_file: Path | None, origins: Origins, own: frozenset[str] = frozenset()) -> tuple[Dict | Env | Origins, ...]:
    """The parser's chain, strongest first; flags come before all of them. `own`: what is not absent for this command."""
    _refuse_absent(os.environ, own)
    chain: list[Dict | Env | Origins] = [Env("PACELINE_", command=False)]
    chain += [_source({name: value}, f"variable {variable}") for variable, name, value in _alias_variables(os.environ)]
    if config_file is not None:
        chain.append(_source(read_file(config_file), f"file {config_file}"))
    return (*chain, origins)


def _source(values: dict[str, str], label: str) -> Dict:
    return Dict(values, allow_unknown=True, use_commands_as_keys=False, source=label)


def _alias_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(variable, field, value) of each variable that has another name of a field. Raises BadInputError for both names at once."""
    for alias, name in _ALIASES.items():
        variable, canonical_variable = f"PACELINE_{alias.upper()}", f"PACELINE_{name.upper()}"
        if variable not in environment:
            continue
        if canonical_variable in environment:
            raise BadInputError(f"{variable} and {canonical_variable} are one setting, and both are set; unset one of them")
        yield variable, name, environment[variable]


def read_file(path: Path) -> dict[str, str]:
    """A `--config` file as field name -> text, for the parser to convert as it converts flags. Raises BadInputError."""
    try:
        # BaseLoader keeps every scalar as text, so that `speculation: off` is not a boolean. It builds no objects.
        data: object = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506
    except OSError as error:
        raise BadInputError(f"--config {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInputError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if data in (None, ""):
        return {}
    if not isinstance(data, Mapping):
        raise BadInputError(f"--config {path} must hold lines of `name: value`")
    known = {item.name: kind for item, kind in settings(ServerConfig)}
    values: dict[str, str] = {}
    for key, value in cast(Mapping[str, object], data).items():  # BaseLoader: keys are text
        name = _ALIASES.get(key.replace("-", "_"), key.replace("-", "_"))
        if name in ABSENT:
            raise BadInputError(f"--config {path}: {absent(name)}")
        if name not in known:
            raise BadInputError(f"--config {path} has the unknown name {key}{did_you_mean(name, known)}")
        if not isinstance(value, str):
            raise BadInputError(f"--config {path}: {key} must be one value, not a list or a mapping")
        if value not in _UNSET:
            values[name] = _ON_OFF.get(value.lower(), value) if known[name] is bool else value
    return values


def canonical(tokens: Sequence[str], own: frozenset[str] = frozenset()) -> list[str]:
    """Replace the aliases among the flags: `--max-num-seqs 8` is `--max-batch-size 8`. Raises BadInputError for flags that are absent."""
    end = tokens.index("--") if "--" in tokens else len(tokens)
    return [*(_canonical(token, own) for token in tokens[:end]), *tokens[end:]]


def _canonical(token: str, own: frozenset[str]) -> str:
    head, equals, value = token.partition("=")
    name = head.removeprefix("--").replace("-", "_")
    if not head.startswith("--"):
        return token
    if name in ABSENT and name not in own:
        raise BadInputError(absent(name))
    return (flag(_ALIASES[name]) + equals + value) if name in _ALIASES else token


def absent(name: str) -> str:
    """What to say of a flag that this build lacks."""
    return f"{flag(name)} is not in this build; it has {ABSENT[name]}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _refuse_absent(environment: Mapping[str, str], own: frozenset[str]) -> None:
    """A variable that would have no effect must not seem to have one: an API key above all."""
    for name in ABSENT.keys() - own:
        variable = f"PACELINE_{name.upper()}"
        if environment.get(variable):
            raise BadInputError(f"{variable} is set, but {absent(name)}; unset it")


def misspelt_variables(environment: Mapping[str, str]) -> list[str]:
    """A warning for each `PACELINE_*` variable that nothing reads but that looks like one that is read."""
    known = [item.name for kind in (ServerConfig, AnswerConfig) for item, _ in settings(kind)]
    known += [*_OTHER_VARIABLES, *ABSENT, *_ALIASES, *(item.name for item in fields(ProveConfig))]
    given = [name.removeprefix("PACELINE_").lower() for name in sorted(environment) if name.startswith("PACELINE_")]
    near = {name: difflib.get_close_matches(name, known, n=1) for name in given if name not in known}
    return [
        f"the variable PACELINE_{name.upper()} has no effect; did you mean PACELINE_{match[0].upper()}?"
        for name, match in near.items()
        if match
    ]
