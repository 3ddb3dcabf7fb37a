"""A validated body becomes engine requests: template, tokenizer, limits of the model, seeds. Hop 3 of a request's path.

The tokenizer runs in worker threads, the template in a process: a long prompt takes seconds, and the event loop serves everyone else.
"""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from paceline.core.facts import EngineFacts
from paceline.core.request import Request, SamplingParams
from paceline.errors import BadInputError, NotFoundError
from paceline.server.continuation import mark_end, up_to_mark
from paceline.server.detokenize import Vocabulary
from paceline.server.grammar import GrammarCheck, callable_functions
from paceline.server.openai.requests import MAX_CHOICES, ChatCompletionRequest, CompletionRequest, GenerationRequest
from paceline.server.openai.tool_requests import ToolOffer, num_chars, template_messages, tool_offer
from paceline.server.parsing.deltas import OutputParser, PlainParser
from paceline.server.parsing.formats import TOOL_PARSERS, output_format
from paceline.server.parsing.grammar import ANSWER, CALLS, Tags, call_rules, composed, top_rules
from paceline.server.parsing.one_call import OneCallParser
from paceline.server.sampling import banned_sequences, check_options, check_token_ids, for_choice, sampling_params
from paceline.server.template import ChatTemplate, load_chat_template

T = TypeVar("T")

_NUM_THREADS = 2
_MANY_CHARS = 2048  # about 0.3 ms of tokenising
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_TOO_LONG = "context_length_exceeded"
_EMPTY = "the prompt is empty; give at least one token"


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of the engine: one engine request for each choice of each prompt, in this order."""

    answer_id: str
    requests: tuple[Request, ...]
    stops: tuple[str, ...]
    num_choices: int = 1  # of each prompt
    new_parser: Callable[[], OutputParser] = PlainParser  # for each answer


@dataclass(frozen=True, slots=True)
class _OutputLimit:
    """The most output tokens a request asks for, the field that says so, and what holds if it says nothing (None: the context)."""

    num_tokens: int | None
    param: str
    default: int | None = None


@dataclass(frozen=True, slots=True)
class _Ask:
    """What all prompts of one HTTP request share. `prompt_param` is the field they came from."""

    body: GenerationRequest
    prompt_param: str
    limit: _OutputLimit
    arrival_s: float
    prediction_token_ids: tuple[int, ...] = ()
    grammar: str | None = None


class Preparation:
    """Turns bodies into jobs. Owns the tokenizer, the chat template and the generator of seeds."""

    def __init__(self, folder: Path, facts: EngineFacts, model_name: str, seed: int | None) -> None:
        """`seed` seeds the seeds of requests that bring none; None is a random one."""
        self._facts = facts
        self._model_name = model_name
        self._template = load_chat_template(folder)
        self._format = output_format("" if self._template is None else self._template.source)
        self._tokenizer = _load_tokenizer(folder / "tokenizer.json")
        self._tokenizer.no_truncation()  # some files ask for it, and a cut prompt is a wrong answer
        self._tokenizer.no_padding()
        self.vocabulary = Vocabulary(self._tokenizer)
        self._max_token_chars = max((len(token) for token in self._tokenizer.get_vocab()), default=1)
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)  # noqa: S311 - seeds are no secrets
        self._grammars = GrammarCheck(folder, facts)
        added = frozenset(token.content for token in self._tokenizer.get_added_tokens_decoder().values())
        self._tags = Tags(added.__contains__)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    async def start(self) -> None:
        """Get ready for the first request. Raises BadInputError if the chat template cannot be used."""
        if self._template is not None:
            await self._template.start()

    async def close(self) -> None:
        """End the processes that `start` or a request started."""
        await self._grammars.close()
        if self._template is not None:
            await self._template.close()

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def has_reasoning(self) -> bool:
        """Whether the model thinks before it answers."""
        return self._format.has_reasoning

    async def chat(self, body: ChatCompletionRequest) -> Job:
        """The job of a chat completion. Raises BadInputError for what this model or version cannot do."""
        arrival_s = time.monotonic()
        self._check(body)
        self._check_num_chars(sum(num_chars(message) for message in body.messages), "messages")
        offer = self._tool_offer(body)
        prediction = "" if body.prediction is None else body.prediction.text
        self._check_num_chars(len(prediction), "prediction")
        text, prompt = await self._encode_chat(body, offer)
        prediction_token_ids = await self._in_thread(lambda: self._encode_plain(prediction), len(prediction))
        if body.max_completion_tokens is not None:
            limit = _OutputLimit(body.max_completion_tokens, "max_completion_tokens")
        else:
            limit = _OutputLimit(body.max_tokens, "max_tokens")
        grammar = await self._chat_grammar(body, text, offer)
        job = await self._job("chatcmpl", [prompt], _Ask(body, "messages", limit, arrival_s, prediction_token_ids, grammar))
        return replace(job, new_parser=lambda: self._parser(body, text, offer))

    async def completion(self, body: CompletionRequest, limit_param: str = "max_tokens") -> Job:
        """The job of a completion. Raises BadInputError for what this model or version cannot do.

        `limit_param`: the field that `body.max_tokens` came from.
        """
        arrival_s = time.monotonic()
        self._check(body)
        texts, prompts = body.prompts()
        if "" in texts:  # it may still encode to a BOS token
            raise BadInputError(_EMPTY, param="prompt")
        if texts:
            for text in texts:
                self._check_num_chars(len(text), "prompt")
            prompts = await self._in_thread(lambda: self._encode_texts(texts))
        limit = _OutputLimit(body.max_tokens, limit_param, _DEFAULT_COMPLETION_TOKENS)
        source, grammar = body.grammar_source(), None
        if source is not None:
            grammar = composed({ANSWER: source.part()}, f"start: @{ANSWER}\n")
            await self._grammars.check(grammar, source.param)
        return await self._job("cmpl", prompts, _Ask(body, "prompt", limit, arrival_s, grammar=grammar))

    async def chat_prompt(self, body: ChatCompletionRequest) -> list[int]:
        """The tokens of a chat, however many. Raises BadInputError for what this model or version cannot do."""
        self._check(body)
        self._check_num_chars(sum(num_chars(message) for message in body.messages), "messages")
        offer = self._tool_offer(body)
        _, prompt = await self._encode_chat(body, offer)
        return prompt

    async def text_prompt(self, text: str, add_special_tokens: bool) -> list[int]:
        """The tokens of a text, however many. Raises BadInputError for one that is longer than any prompt."""
        self._check_num_chars(len(text), "prompt")
        return await self._in_thread(lambda: self._encode(text, add_special_tokens))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of any tokens, special ones included. Raises BadInputError for ids that the model lacks."""
        check_token_ids(token_ids, "tokens", self._facts)
        # decode_batch: unlike decode it lets other threads run.
        texts = await self._in_thread(lambda: self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False))
        return texts[0]

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as it stands in the vocabulary."""
        return await self._in_thread(lambda: [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids])

    def check_model(self, name: str | None) -> None:
        """Raise NotFoundError for a name that is not the model's; None is."""
        if name is not None and name != self._model_name:
            raise NotFoundError(
                f"the model {name[:100]!r} does not exist here; this server has {self._model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def _job(self, kind: str, prompts: Sequence[list[int]], ask: _Ask) -> Job:
        answer_id, body = f"{kind}-{secrets.token_hex(16)}", ask.body
        num_choices = body.n or 1
        if num_choices * len(prompts) > MAX_CHOICES:
            raise BadInputError(
                f"{len(prompts)} prompts with n = {num_choices} make more than {MAX_CHOICES} answers; ask for fewer", param="n"
            )
        if ask.grammar is not None and body.ignore_eos:
            raise BadInputError("ignore_eos does not go with structured output, which ends where its structure does", param="ignore_eos")
        bad_words = body.bad_words or ()
        banned = await self._in_thread(lambda: banned_sequences(bad_words, self._tokenizer)) if bad_words else ()
        requests: list[Request] = []
        for prompt in prompts:
            max_tokens = self._checked_max_tokens(prompt, ask)
            seed = self._seeds.getrandbits(64) if body.seed is None else body.seed
            sampling = sampling_params(body, self._facts, seed, max_tokens, banned, ask.grammar)
            for choice in range(num_choices):
                requests.append(self._request(f"{answer_id}-{len(requests)}", prompt, for_choice(sampling, choice), ask))
        return Job(answer_id, tuple(requests), body.stops, num_choices)

    def _checked_max_tokens(self, prompt: list[int], ask: _Ask) -> int:
        """Every prompt, whatever it was made of, is checked here: the engine trusts its tokens."""
        if not prompt:
            raise BadInputError(_EMPTY, param=ask.prompt_param)
        max_tokens, min_tokens = self._max_tokens(len(prompt), ask), ask.body.min_tokens or 0
        if min_tokens > max_tokens:
            raise BadInputError(f"min_tokens is {min_tokens:,}, more than the {max_tokens:,} tokens of the answer", param="min_tokens")
        check_token_ids(prompt, ask.prompt_param, self._facts)
        return max_tokens

    def _request(self, request_id: str, prompt: list[int], sampling: SamplingParams, ask: _Ask) -> Request:
        limit = ask.body.max_draft_length
        max_draft_length = None if limit is None else min(limit, self._facts.max_draft_length)
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            arrival_s=ask.arrival_s,
            max_draft_length=max_draft_length,
            cache_salt=ask.body.cache_salt or "",
            prediction_token_ids=ask.prediction_token_ids,
        )

    async def _in_thread(self, work: Callable[[], T], num_chars: int = _MANY_CHARS) -> T:
        """Work on a text of `num_chars`. Below a size the way to a thread and back takes longer than the work, and others wait as long."""
        if num_chars < _MANY_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _check(self, body: GenerationRequest) -> None:
        self.check_model(body.model)
        check_options(body, self._facts)

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

    def _tool_offer(self, body: ChatCompletionRequest) -> ToolOffer:
        """The tools that the answer may call. Raises BadInputError for those that this model or version cannot offer."""
        offer = tool_offer(body.tools, body.tool_choice)
        if offer.tools and self._format.tools is None:
            raise BadInputError(
                f"tools: this model's chat template has none of the known formats of tool calls ({', '.join(TOOL_PARSERS)}); "
                "leave tools out or serve another model",
                param="tools",
                code="unsupported_parameter",
            )
        return offer

    async def _chat_grammar(self, body: ChatCompletionRequest, prompt: str, offer: ToolOffer) -> str | None:
        """The grammar of the answer to the rendered `prompt`, checked; None: any text. Raises BadInputError."""
        parts: dict[str, dict[str, object]] = {}
        source = body.grammar_source()
        if source is not None and body.continue_final_message:
            raise BadInputError(
                f"{source.param}: is the structure of a whole answer, and the assistant's last message has begun one; "
                "end with a message of the user",
                param=source.param,
            )
        param = "tools" if source is None or offer.must_call else source.param
        if source is not None and not offer.must_call:
            parts[ANSWER] = source.part()
        if offer.must_call or (parts and offer.names):
            functions = callable_functions(offer.tools, offer.names)
            is_single = offer.is_single or body.parallel_tool_calls is False
            parts[CALLS] = {"lark_grammar": call_rules(self._format, functions, self._tags, is_single)}
        if not parts:
            return None
        grammar = composed(parts, top_rules(self._format, prompt, self._tags, tuple(parts)))
        await self._grammars.check(grammar, param)
        return grammar

    def _parser(self, body: ChatCompletionRequest, prompt: str, offer: ToolOffer) -> OutputParser:
        parser = self._format.parser(prompt, offer.names)
        return OneCallParser(parser) if offer.names and body.parallel_tool_calls is False else parser

    async def _encode_chat(self, body: ChatCompletionRequest, offer: ToolOffer) -> tuple[str, list[int]]:
        """The prompt as text and as tokens."""
        template = self._template
        if template is None:
            raise BadInputError(
                "this model has no chat template; use /v1/completions, or put a chat_template.jinja into the model folder",
                code="no_chat_template",
            )
        size = sum(num_chars(message) for message in body.messages) + 64 * len(body.messages) + 512 * len(offer.tools)
        packed, mark = await self._in_thread(lambda: _packed(template, body, offer), size)
        text = await template.render_packed(packed)
        if mark is not None:
            text = up_to_mark(text, mark)
        self._check_num_chars(len(text), "messages")
        # The template writes its special tokens itself.
        return text, await self._in_thread(lambda: self._encode(text, add_special_tokens=False), len(text))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # encode_batch_fast: unlike encode it lets other threads run.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        """Tokens of a text that stands inside another one."""
        return tuple(self._encode(text, add_special_tokens=False)) if text else ()

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=True)]

    def _max_tokens(self, num_prompt_tokens: int, ask: _Ask) -> int:
        """Output tokens of a prompt: those asked for, else the default. Raises BadInputError if they do not fit the context."""
        self._facts.check_prompt(num_prompt_tokens, ask.prompt_param)
        limit, room = ask.limit, self._facts.max_model_len - num_prompt_tokens
        if limit.num_tokens is None:
            return room if limit.default is None else min(room, limit.default)
        if limit.num_tokens > room:
            raise BadInputError(
                f"prompt has {num_prompt_tokens:,} tokens and {limit.param} is {limit.num_tokens:,}, "
                f"limit {self._facts.max_model_len:,} together; ask for at most {room:,}, shorten the prompt"
                f"{self._facts.or_longer_context(num_prompt_tokens + limit.num_tokens)}",
                param=limit.param,
                code=_TOO_LONG,
            )
        return limit.num_tokens


def _packed(template: ChatTemplate, body: ChatCompletionRequest, offer: ToolOffer) -> tuple[bytes, str | None]:
    """The messages for the template, and the mark in them where a prompt for an answer that continues the last one ends."""
    messages = template_messages(body.messages)
    if not body.continue_final_message:
        return template.pack(messages, offer.tools), None
    messages, mark = mark_end(messages)
    return template.pack(messages, offer.tools), mark


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise BadInputError(f"{path} cannot be read as a tokenizer: {error}; convert or fetch the model again") from error
