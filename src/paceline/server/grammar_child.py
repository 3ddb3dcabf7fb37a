"""Compiles grammars as the engine will. Run as a worker's child by `grammar.py`: a grammar is a stranger's program for a compiler."""

import json
from functools import lru_cache
from pathlib import Path

from llguidance import LLTokenizer

from paceline.executor.grammar import compile_grammar, read_tokenizer
from paceline.server.worker_child import serve


class InvalidGrammarError(Exception):
    """The grammar cannot be compiled within the limits, or allows no text."""


class UnpreparedError(Exception):
    """The tokenizer has not been read yet, which takes longer than a grammar may."""


def run(request: bytes) -> bytes:
    """Check the grammar of a request of `grammar.py`: an object of `tokenizer`, `vocab_size`, `eos_token_ids`, `grammar`.

    Without `grammar` only the tokenizer is read. Raises InvalidGrammarError, UnpreparedError.
    """
    fields = json.loads(request)
    if fields["grammar"] is not None and _tokenizer.cache_info().currsize == 0:
        raise UnpreparedError
    tokenizer = _tokenizer(fields["tokenizer"], fields["vocab_size"], tuple(fields["eos_token_ids"]))
    if fields["grammar"] is None:
        return b""
    matcher = compile_grammar(tokenizer, fields["grammar"])
    if matcher.is_error():
        raise InvalidGrammarError(_reason(matcher.get_error()))
    matcher.compute_bitmask()
    if not matcher.is_accepting() and (matcher.is_error() or matcher.is_stopped()):
        raise InvalidGrammarError("it allows no text at all, or its first token takes more work than the limits allow")
    return b""


@lru_cache(maxsize=1)  # a server has one
def _tokenizer(path: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    return read_tokenizer(Path(path), vocab_size, eos_token_ids)


def _reason(error: str) -> str:
    """What the compiler says, without the excerpts of the text that it was given."""
    first, *others = error.strip().split("\n")
    return " ".join([first, *(line for line in others if line.startswith("error:"))])


if __name__ == "__main__":
    serve(run)
