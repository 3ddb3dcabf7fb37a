"""A validated body becomes engine requests: template, tokenizer, limits of the model, seeds. Hop 3 of a request's path.

Templates and the tokenizer run in worker threads: a long prompt takes seconds, and the event loop serves everyone else.
"""

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from paceline.core.facts import EngineFacts
from paceline.core.request import Request, SamplingParams
from paceline.errors import BadInputError, NotFoundError
from paceline.server.detokenize import Vocabulary
from paceline.server.openai.requests import MAX_PROMPTS, ChatCompletionRequest, CompletionRequest, GenerationRequest, Message
from paceline.server.openai.unsupported import refuse_unsupported
from paceline.server.template import load_chat_template

T = TypeVar("T")

_NUM_THREADS = 2
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_GREEDY_TEMPERATURE = 1e-5  # below this the law is greedy to any float, and dividing by it overflows
_SEED_MASK = 2**64 - 1
_TOO_LONG = "context_length_exceeded"
_EMPTY = "the prompt is empty; give at least one token"


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of the engine: one engine request for each prompt, all with the same options."""

    answer_id: str
    requests: tuple[Request, ...]
    stops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _OutputLimit:
    """The most output tokens a request asks for, the field that says so, and what holds if it says nothing (None: the context)."""

    num_tokens: int | None
    param: str
    default: int | None = None


class Preparation:
    """Turns bodies into jobs. Owns the tokenizer, the chat template and the generator of seeds."""

    def __init__(self, folder: Path, facts: EngineFacts, model_name: str, seed: int | None) -> None:
        """`seed` seeds the seeds of requests that bring none; None is a random one."""
        self._facts = facts
        self._model_name = model_name
        self._template = load_chat_template(folder)
        self._tokenizer = _load_tokenizer(folder / "tokenizer.json")
        self._tokenizer.no_truncation()  # some files ask for it, and a cut prompt is a wrong answer
        self._tokenizer.no_padding()
        self.vocabulary = Vocabulary(self._tokenizer)
        self._max_token_chars = max((len(token) for token in self._tokenizer.get_vocab()), default=1)
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)  # noqa: S311 - seeds are no secrets
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    async def chat(self, body: ChatCompletionRequest) -> Job:
        """The job of a chat completion. Raises BadInputError for what this model or version cannot do."""
        arrival_s = time.monotonic()
        self._check(body)
        for index, message in enumerate(body.messages):
            refuse_unsupported(message.model_extra or {}, f"messages.{index}")
        self._check_num_chars(sum(len(message.text) for message in body.messages), "messages")
        prompt = await self._in_thread(lambda: self._encode_chat(body.messages))
        if body.max_completion_tokens is not None:
            limit = _OutputLimit(body.max_completion_tokens, "max_completion_tokens")
        else:
            limit = _OutputLimit(body.max_tokens, "max_tokens")
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        sampling = self._sampling(body, self._max_tokens(len(prompt), "messages", limit))
        return Job(answer_id, (self._request(answer_id, 0, prompt, sampling, body, arrival_s),), body.stops)

    async def completion(self, body: CompletionRequest) -> Job:
        """The job of a completion. Raises BadInputError for what this model or version cannot do."""
        arrival_s = time.monotonic()
        self._check(body)
        texts, prompts = _split_prompt(body.prompt)
        if texts:
            for text in texts:
                self._check_num_chars(len(text), "prompt")
            prompts = await self._in_thread(lambda: self._encode_texts(texts))
        for prompt in prompts:
            if not prompt:
                raise BadInputError(_EMPTY, param="prompt")
            self._check_token_ids(prompt, "prompt")
        limit = _OutputLimit(body.max_tokens, "max_tokens", _DEFAULT_COMPLETION_TOKENS)
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        requests = [
            self._request(answer_id, index, prompt, self._sampling(body, self._max_tokens(len(prompt), "prompt", limit)), body, arrival_s)
            for index, prompt in enumerate(prompts)
        ]
        return Job(answer_id, tuple(requests), body.stops)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _check(self, body: GenerationRequest) -> None:
        if body.model is not None and body.model != self._model_name:
            raise NotFoundError(
                f"the model {body.model[:100]!r} does not exist here; this server has {self._model_name!r}",
                param="model",
                code="model_not_found",
            )
        refuse_unsupported(body.unknown_fields)
        if body.stream_options is not None and not body.stream:
            raise BadInputError("stream_options only goes with stream: true", param="stream_options")
        self._check_token_ids(body.stop_token_ids or (), "stop_token_ids")

    def _check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        highest = max(token_ids, default=0)
        if highest >= self._facts.vocab_size:
            raise BadInputError(f"token id {highest:,} is outside the vocabulary, 0 to {self._facts.vocab_size - 1:,}", param=param)

    def _check_num_chars(self, num_chars: int, param: str) -> None:
        """Refuse before tokenising what cannot fit: tokenisers are slower than linear on some text."""
        limit = self._facts.max_model_len * self._max_token_chars
        if num_chars > limit:
            raise BadInputError(
                f"prompt has {num_chars:,} characters, more than {self._facts.max_model_len:,} tokens can hold "
                f"(at most {self._max_token_chars} characters each); shorten it",
                param=param,
                code=_TOO_LONG,
            )

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if self._template is None:
            raise BadInputError(
                "this model has no chat template; use /v1/completions, or put a chat_template.jinja into the model folder",
                code="no_chat_template",
            )
        text = self._template.render([_template_message(message) for message in messages])
        self._check_num_chars(len(text), "messages")
        # The template writes its special tokens itself. encode_batch_fast: unlike encode it lets other threads run.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=True)]

    def _request(
        self, answer_id: str, index: int, prompt: list[int], sampling: SamplingParams, body: GenerationRequest, arrival_s: float
    ) -> Request:
        limit = body.max_draft_length
        max_draft_length = None if limit is None else min(limit, self._facts.max_draft_length)
        return Request(f"{answer_id}-{index}", tuple(prompt), sampling, arrival_s, max_draft_length)

    def _max_tokens(self, num_prompt_tokens: int, prompt_param: str, limit: _OutputLimit) -> int:
        """Output tokens of a prompt: those asked for, else the default. Raises BadInputError if they do not fit the context."""
        max_model_len = self._facts.max_model_len
        room = max_model_len - num_prompt_tokens
        if room < 1:
            raise BadInputError(
                f"prompt has {num_prompt_tokens:,} tokens, limit {max_model_len:,}, the answer included; "
                f"shorten it or start with --max-model-len {_next_size(num_prompt_tokens + 1)}",
                param=prompt_param,
                code=_TOO_LONG,
            )
        if limit.num_tokens is None:
            return room if limit.default is None else min(room, limit.default)
        if limit.num_tokens > room:
            raise BadInputError(
                f"prompt has {num_prompt_tokens:,} tokens and {limit.param} is {limit.num_tokens:,}, limit {max_model_len:,} together; "
                f"ask for at most {room:,}, shorten the prompt or start with a larger --max-model-len",
                param=limit.param,
                code=_TOO_LONG,
            )
        return limit.num_tokens

    def _sampling(self, body: GenerationRequest, max_tokens: int) -> SamplingParams:
        temperature = 1.0 if body.temperature is None else body.temperature
        top_k = 0 if body.top_k is None or body.top_k < 0 or body.top_k >= self._facts.vocab_size else body.top_k
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if temperature < _GREEDY_TEMPERATURE else temperature,
            top_k=top_k,
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=0.0 if body.min_p is None else body.min_p,
            seed=self._seeds.getrandbits(64) if body.seed is None else body.seed & _SEED_MASK,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
        )


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise BadInputError(f"{path} cannot be read as a tokenizer: {error}; convert or fetch the model again") from error


def _split_prompt(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[list[str], list[list[int]]]:
    """The texts of a prompt, or else its token ids; one of the two lists is empty."""
    items = [prompt] if isinstance(prompt, str) else prompt
    texts = [item for item in items if isinstance(item, str)]
    token_ids = [item for item in items if isinstance(item, list)]
    if flat := [item for item in items if isinstance(item, int)]:
        token_ids = [flat]
    num_prompts = len(texts) + len(token_ids)
    if num_prompts == 0 or "" in texts:
        raise BadInputError(_EMPTY, param="prompt")
    if num_prompts > MAX_PROMPTS:
        raise BadInputError(f"the request has {num_prompts:,} prompts, limit {MAX_PROMPTS}; send several requests", param="prompt")
    return texts, token_ids


def _template_message(message: Message) -> dict[str, str]:
    """What a template sees of a message. OpenAI's `developer` is the newer name of `system`, which templates know."""
    role = "system" if message.role == "developer" else message.role
    fields = {"role": role, "content": message.text}
    return fields if message.name is None else {**fields, "name": message.name}


def _next_size(num_tokens: int) -> int:
    """The power of two that holds this many tokens."""
    return 1 << (num_tokens - 1).bit_length()
