"""Grammars of requests: their text as the engine takes it, checked in a process of its own before any engine sees it.

Called by `chat.py`. Where in a body a grammar can stand is `openai/structured.py`'s; how a mask is made, `executor/grammar.py`'s.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from paceline.core.facts import EngineFacts
from paceline.errors import BadInputError, PacelineError
from paceline.server.parsing.grammar import CallableFunction
from paceline.server.worker import Worker, WorkerError, WorkerLimits, WorkerTimeoutError, WorkerUnavailableError

COMPILE_LIMIT_S = 2.0
"""For one grammar. Common schemas take some milliseconds; the engine compiles it again, beside its steps."""
MAX_GRAMMAR_BYTES = 256 * 1024  # as the engine gets it, the schemas of all tools included
WHITE_SPACE = r"[ \t\r\n]{0,24}"
"""Between the parts of a JSON text. Bounded, because small models like nothing better than to go on with blanks."""

_START_LIMIT_S = 60.0  # reading the tokenizer takes seconds on a busy machine
_NO_PARAMETERS: dict[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
_CHILD = "paceline.server.grammar_child"
_INVALID = "InvalidGrammarError"  # the child's; to import it would import the compiler
_UNPREPARED = "UnpreparedError"  # likewise: the child is a new one
_MAX_ATTEMPTS = 3  # with a child that somebody else's grammar may end in between
_LIMITS = WorkerLimits(memory_bytes=1 << 30, max_answer_bytes=1024)
_MAX_VERDICTS = 4096  # kept, of at most _MAX_MESSAGE_CHARS each
_MAX_MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as a request has it. `param` is the field that it stands in."""

    kind: Literal["json_schema", "lark"]
    text: str
    param: str
    is_lenient: bool = False  # of a schema: keywords that nobody can enforce are passed over

    def part(self) -> dict[str, object]:
        """llguidance's object for it. Raises BadInputError for a schema that is not one."""
        if self.kind == "lark":
            return {"lark_grammar": self.text}
        return {"json_schema": guided_schema(self.text, self.param, self.is_lenient)}


def guided_schema(text: str, param: str, is_lenient: bool) -> dict[str, object]:
    """A JSON schema with the compiler's options in it. Raises BadInputError."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{param}: is not valid JSON: {error}", param=param) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise BadInputError(f"{param}: a JSON schema must be an object", param=param)
    return _guided(cast(dict[str, object], schema), is_lenient)


def callable_functions(tools: Sequence[Mapping[str, object]], names: Collection[str]) -> list[CallableFunction]:
    """Those of OpenAI's tool objects that have one of `names`. One without parameters takes an empty object."""
    functions: list[CallableFunction] = []
    for tool in tools:
        function = cast(Mapping[str, object], tool["function"])
        name, schema = cast(str, function["name"]), cast(dict[str, object], function.get("parameters", _NO_PARAMETERS))
        if name in names:
            functions.append(CallableFunction(name, json.dumps(_guided(schema, is_lenient=True), ensure_ascii=False)))
    return functions


def _guided(schema: dict[str, object], is_lenient: bool) -> dict[str, object]:
    return {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE, "lenient": is_lenient}}


class _UndecidedError(PacelineError):
    """The check of a grammar did not come to its end, which may be the machine's fault: no verdict to be remembered."""


class GrammarCheck:
    """Has grammars compiled, and remembers the verdicts. From one event loop; `close` ends the process."""

    def __init__(self, folder: Path, facts: EngineFacts) -> None:
        self._fields = {
            "tokenizer": str(folder / "tokenizer.json"),
            "vocab_size": facts.vocab_size,
            "eos_token_ids": facts.eos_token_ids,
        }
        self._worker = Worker(_CHILD, _LIMITS)
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()  # digest -> what is wrong; None: nothing

    @property
    def num_verdicts(self) -> int:
        return len(self._verdicts)

    async def close(self) -> None:
        await self._worker.close()

    async def check(self, grammar: str, param: str) -> None:
        """Raises BadInputError for a grammar that cannot be followed; `param` is the field to name."""
        try:
            encoded = grammar.encode()
        except UnicodeEncodeError:
            raise BadInputError(f"{param}: has half of a surrogate pair, which is no character; remove it", param=param) from None
        if len(encoded) > MAX_GRAMMAR_BYTES:
            raise BadInputError(f"{param}: makes {len(encoded):,} bytes, limit {MAX_GRAMMAR_BYTES:,}; shorten it", param=param)
        digest = hashlib.sha256(encoded).digest()
        if digest not in self._verdicts:
            try:
                self._verdicts[digest] = await self._compile(grammar)
            except _UndecidedError as error:
                raise BadInputError(f"{param}: {error}", param=param, code="invalid_grammar") from None
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(digest)
        fault = self._verdicts[digest]
        if fault is not None:
            raise BadInputError(f"{param}: {fault}", param=param, code="invalid_grammar")

    async def _compile(self, grammar: str) -> str | None:
        """What is wrong with a grammar; None: nothing. Raises _UndecidedError, WorkerUnavailableError."""
        for _ in range(_MAX_ATTEMPTS):
            fault = await self._prepare()
            if fault is not None:
                return fault
            try:
                await self._worker.call(self._request(grammar), COMPILE_LIMIT_S)
                return None
            except WorkerTimeoutError:
                raise _UndecidedError(f"took more than {COMPILE_LIMIT_S:g} s to compile; simplify it") from None
            except WorkerError as error:
                if error.kind == _INVALID:
                    return f"cannot be followed: {str(error)[:_MAX_MESSAGE_CHARS]}"
                if error.kind != _UNPREPARED:
                    raise _UndecidedError("takes more memory to compile than there is for it; simplify it") from None
        raise WorkerUnavailableError("other requests' grammars kept ending the process that checks them; send the request again later")

    async def _prepare(self) -> str | None:
        """Have the tokenizer read, in a time of its own; returns why this model's cannot be used."""
        try:
            await self._worker.call(self._request(None), _START_LIMIT_S)
        except WorkerError as error:
            if error.kind == WorkerError.DIED or isinstance(error, WorkerTimeoutError):
                raise WorkerUnavailableError(
                    "the tokenizer could not be read for structured output; the server's log may say why"
                ) from None
            return f"structured output cannot be had from this model's tokenizer: {str(error)[:_MAX_MESSAGE_CHARS]}"
        return None

    def _request(self, grammar: str | None) -> bytes:
        return json.dumps({**self._fields, "grammar": grammar}).encode()
