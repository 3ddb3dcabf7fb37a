"""The engine without a server: load a model and generate from scripts, tests and benchmarks.

The same scheduler, executor and loop as the server's engine process; no sockets and no HTTP packages.
"""

import random
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

from tokenizers import Tokenizer

from paceline.config import AnswerConfig, EngineConfig, check_engine, check_ranges
from paceline.core.outcome import RequestStats, TokenDelta, TokenLogprobs
from paceline.core.progress import Progress, SilentProgress
from paceline.core.request import FinishReason, Request, SamplingParams
from paceline.core.stats import EngineStats
from paceline.engine.loop import EngineLoop
from paceline.errors import BadInputError, PacelineError
from paceline.executor.load import load_executor
from paceline.executor.profile import with_step_costs
from paceline.scheduler.scheduler import Scheduler, SchedulerConfig
from paceline.weights.resolve import resolve_models


@dataclass(frozen=True, slots=True)
class Output:
    """One finished generation. `text` leaves special tokens out; `token_ids` holds every token, the stop token included."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stats: RequestStats
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # one per prompt token from the second on, if asked for


class LLM:
    """A model in this process."""

    def __init__(self, config: EngineConfig | None = None, progress: Progress | None = None) -> None:
        """Resolve, load and pack the model that `config` names; `progress` is told how far it is."""
        self.config = config if config is not None else EngineConfig()
        check_engine(self.config)
        notify = progress if progress is not None else SilentProgress()
        target, draft = resolve_models(self.config, notify)
        executor, facts = load_executor(self.config, str(target.path), str(draft.path) if draft else None, notify)
        self.facts = with_step_costs(self.config, executor, facts)
        self.folder: Path = target.path
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(target.path / "tokenizer.json"))
        self._loop = EngineLoop(Scheduler(SchedulerConfig.from_engine_config(self.config), self.facts), executor)
        self._ids = count()
        self._seeds = random.Random(self.config.seed)  # noqa: S311 - for samples, not for secrets
        self._received: dict[str, deque[TokenDelta]] = {}  # of running requests, not yet read

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text).ids)

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        max_draft_length: int | None = None,
    ) -> list[Output]:
        """Run all prompts as one dynamic batch; results in the prompts' order.

        `sampling` is one for all or one each. `max_draft_length` caps every request's drafts; 0 decodes plainly.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        requests = [self._request(prompt, params, max_draft_length) for prompt, params in zip(prompts, each, strict=True)]
        with self._running(requests), self._loop.inference():
            return [self._output(request, list(self._deltas(request))) for request in requests]

    def stream(self, prompt: str | Sequence[int], sampling: SamplingParams, max_draft_length: int | None = None) -> Iterator[TokenDelta]:
        """Run one prompt and yield its deltas as steps finish; closing the iterator aborts it. Several streams may be read in turn."""
        request = self._request(prompt, sampling, max_draft_length)
        with self._running([request]):
            yield from self._deltas(request)

    @contextmanager
    def _running(self, requests: Sequence[Request]) -> Generator[None]:
        """The requests are in the engine; on leaving, whatever the reason, none of them is."""
        try:
            for request in requests:
                self._received[request.request_id] = deque()
                self._loop.add(request)
            yield
        finally:
            for request in requests:
                self._loop.abort(request.request_id)
                self._received.pop(request.request_id, None)

    def _deltas(self, request: Request) -> Iterator[TokenDelta]:
        """Deltas of a running request up to its last one. Steps serve all requests, so those of others are kept for their readers."""
        received = self._received[request.request_id]
        while True:
            while not received:
                deltas = self._loop.step()
                for delta in deltas:
                    self._received[delta.request_id].append(delta)
                if not deltas:
                    time.sleep(self._loop.idle_s())
            delta = received.popleft()
            yield delta
            if delta.finish_reason is not None:
                return

    def _request(self, prompt: str | Sequence[int], sampling: SamplingParams, max_draft_length: int | None) -> Request:
        ids = self.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        if not ids:
            raise BadInputError("the prompt is empty; give at least one token", param="prompt")
        if not all(0 <= token < self.facts.vocab_size for token in ids):
            raise BadInputError(f"a prompt token id is outside the vocabulary 0..{self.facts.vocab_size - 1}", param="prompt")
        self.facts.check_prompt(len(ids))
        check_ranges(_answer_config(sampling), spell=str)
        listed = {*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias), *chain(*sampling.banned_sequences)}
        if not all(0 <= token < self.facts.vocab_size for token in listed):
            raise BadInputError(
                f"a token id of the sampling options is outside the vocabulary 0..{self.facts.vocab_size - 1}", param="sampling"
            )
        if max_draft_length is not None and max_draft_length < 0:
            raise BadInputError(f"max_draft_length is {max_draft_length}; it must be at least 0", param="max_draft_length")
        seed = self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed
        sampling = replace(sampling, seed=seed).normalised(self.facts.vocab_size)
        return Request(f"llm-{next(self._ids)}", ids, sampling, time.monotonic(), max_draft_length)

    def _output(self, request: Request, deltas: Sequence[TokenDelta]) -> Output:
        last = deltas[-1]
        if last.finish_reason is None or last.stats is None:
            raise PacelineError(last.error or "the engine ended a request without its statistics")
        token_ids = tuple(chain.from_iterable(delta.token_ids for delta in deltas))
        return Output(
            prompt_token_ids=request.prompt_token_ids,
            token_ids=token_ids,
            text=self.tokenizer.decode(list(token_ids)),
            finish_reason=last.finish_reason,
            stats=last.stats,
            logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
            prompt_logprobs=deltas[0].prompt_logprobs,
        )


def _answer_config(sampling: SamplingParams) -> AnswerConfig:
    """The options that have ranges."""
    return AnswerConfig(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=sampling.min_tokens,
    )
