"""The engine without a server: load a model and generate from scripts, tests and benchmarks.

The same scheduler, executor and loop as the server's engine process; no sockets and no HTTP packages.
"""

import itertools
import random
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from paceline.config import AnswerConfig, EngineConfig, check_engine, check_ranges
from paceline.core.outcome import RequestStats, TokenDelta
from paceline.core.progress import Progress, SilentProgress
from paceline.core.request import FinishReason, Request, SamplingParams
from paceline.core.stats import EngineStats
from paceline.engine.loop import EngineLoop
from paceline.errors import BadInputError, PacelineError
from paceline.executor.load import load_executor
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


class LLM:
    """A model in this process."""

    def __init__(self, config: EngineConfig | None = None, progress: Progress | None = None) -> None:
        """Resolve, load and pack the model that `config` names; `progress` is told how far it is."""
        self.config = config if config is not None else EngineConfig()
        check_engine(self.config)
        notify = progress if progress is not None else SilentProgress()
        target, draft = resolve_models(self.config, notify)
        executor, self.facts = load_executor(self.config, str(target.path), str(draft.path) if draft else None, notify)
        self.folder: Path = target.path
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(target.path / "tokenizer.json"))
        self._loop = EngineLoop(Scheduler(SchedulerConfig.from_engine_config(self.config), self.facts), executor)
        self._ids = itertools.count()
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
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        last: dict[str, TokenDelta] = {}
        with self._running(requests):
            for request in requests:
                for delta in self._deltas(request):
                    tokens[request.request_id].extend(delta.token_ids)
                    last[request.request_id] = delta
        return [self._output(request, tokens[request.request_id], last[request.request_id]) for request in requests]

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
        answer = AnswerConfig(sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        check_ranges(answer, spell=str)
        if max_draft_length is not None and max_draft_length < 0:
            raise BadInputError(f"max_draft_length is {max_draft_length}; it must be at least 0", param="max_draft_length")
        seed = self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed
        sampling = replace(sampling, seed=seed).normalised(self.facts.vocab_size)
        return Request(f"llm-{next(self._ids)}", ids, sampling, time.monotonic(), max_draft_length)

    def _output(self, request: Request, token_ids: list[int], last: TokenDelta) -> Output:
        if last.finish_reason is None or last.stats is None:
            raise PacelineError(last.error or "the engine ended a request without its statistics")
        text = self.tokenizer.decode(token_ids)
        return Output(request.prompt_token_ids, tuple(token_ids), text, last.finish_reason, last.stats)
