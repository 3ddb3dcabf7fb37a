"""From the options of an HTTP body to those of the engine, with OpenAI's defaults. Called by `chat.py` for every prompt and choice."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from paceline.core.facts import EngineFacts
from paceline.core.request import SamplingParams
from paceline.errors import BadInputError
from paceline.server.openai.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest

_DEFAULT_TEMPERATURE = 1.0  # OpenAI's
_SEEDS = range(-(2**63), 2**64)  # signed and unsigned 64 bits are both in use


def check_options(body: GenerationRequest, facts: EngineFacts) -> None:
    """Raise BadInputError for options that do not go together or with this model."""
    if body.seed is not None and body.seed not in _SEEDS:
        raise BadInputError("seed: must have at most 64 bits", param="seed")
    if body.stream_options is not None and not body.stream:
        raise BadInputError("stream_options only goes with stream: true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise BadInputError("prompt_logprobs only goes without stream", param="prompt_logprobs")
    if isinstance(body, ChatCompletionRequest) and body.top_logprobs and not body.logprobs:
        raise BadInputError("top_logprobs only goes with logprobs: true", param="top_logprobs")
    check_token_ids(body.stop_token_ids or (), "stop_token_ids", facts)
    check_token_ids(body.biases, "logit_bias", facts)


def check_token_ids(token_ids: Collection[int], param: str, facts: EngineFacts) -> None:
    """Raise BadInputError for a token id that the model does not have."""
    highest = max(token_ids, default=0)
    if highest >= facts.vocab_size:
        raise BadInputError(f"token id {highest:,} is outside the vocabulary, 0 to {facts.vocab_size - 1:,}", param=param)


def sampling_params(
    body: GenerationRequest,
    facts: EngineFacts,
    seed: int,
    max_tokens: int,
    banned_sequences: tuple[tuple[int, ...], ...],
    grammar: str | None,
) -> SamplingParams:
    """The engine's options of a checked body for one prompt."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=tuple((token_id, value) for token_id, value in body.biases.items() if value),
        banned_sequences=banned_sequences,
        min_tokens=body.min_tokens or 0,
        num_logprobs=_num_logprobs(body),
        num_prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
    ).normalised(facts.vocab_size)


def for_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """The options of choice 0, 1, ... of one prompt: each but the first has a seed of its own, made from the request's."""
    if choice == 0 or sampling.seed is None:
        return sampling
    digest = hashlib.sha256(f"{sampling.seed}:{choice}".encode()).digest()
    return replace(sampling, seed=int.from_bytes(digest[:8], "big"))


def banned_sequences(bad_words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell `bad_words`, at the beginning of a text and behind a space."""
    texts = [spelling for word in bad_words for spelling in (word, f" {word.lstrip()}")]
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(encoding.ids) for encoding in encodings if encoding.ids))


def _num_logprobs(body: GenerationRequest) -> int | None:
    if isinstance(body, ChatCompletionRequest):
        return (body.top_logprobs or 0) if body.logprobs else None
    assert isinstance(body, CompletionRequest)
    if body.logprobs is True:
        raise BadInputError("logprobs: give the number of likeliest tokens to report, such as 1", param="logprobs")
    return None if body.logprobs is False else body.logprobs
