"""An engine without a model: plays given tokens in deltas of several, and fails, hangs or dies on demand. Records what it was asked.

Deterministic and torch-free; ends requests by the rules of the real scheduler (stop tokens, then max_tokens).
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from paceline.core.facts import EngineFacts
from paceline.core.outcome import DraftStats, RequestStats, TokenDelta, TokenLogprobs
from paceline.core.request import FinishReason, Request
from paceline.core.stats import EngineStats
from paceline.errors import EngineDeadError

FACTS = EngineFacts(
    model_name="fake",
    architecture="llama",
    device="cpu",
    dtype="float32",
    vocab_size=320,
    max_model_len=128,
    max_position_embeddings=4096,
    num_pages=64,
    page_size=16,
    target_page_bytes=1024,
    drafter_page_bytes=0,
    target_weight_bytes=1_000_000,
    drafter_weight_bytes=0,
    drafter="ngram",
    drafter_max_len=128,
    max_draft_length=7,
    eos_token_ids=(2,),
    choices=(),
)


@dataclass(slots=True)
class Faults:
    """What goes wrong, and after how many deltas of a request."""

    die_after: int | None = None
    fail_after: int | None = None
    is_refusal: bool = False  # of a failure: the request's own fault
    hang_after: int | None = None
    step_s: float = 0.0  # time between deltas


def echo(request: Request) -> Sequence[int]:
    """The prompt again, then the end of text."""
    return (*request.prompt_token_ids, 2)


@dataclass(slots=True)
class FakeEngine:
    """`answer` gives the tokens of a request; each delta after the first (one token, as a prompt's is) holds `chunk` of them, at most 8.

    `num_control`: so many deltas before those come from control steps, with one token each.
    """

    facts: EngineFacts = FACTS
    answer: Callable[[Request], Sequence[int]] = echo
    chunk: int = 1
    num_control: int = 0
    faults: Faults = field(default_factory=Faults)
    is_alive: bool = True
    requests: list[Request] = field(default_factory=list[Request])
    aborted: list[str] = field(default_factory=list[str])
    num_active: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)  # set once a request runs
    current_stats: EngineStats = field(default_factory=lambda: EngineStats(num_pages=64, num_free_pages=64))
    _death: asyncio.Event = field(default_factory=asyncio.Event)

    def stats(self) -> EngineStats:
        return self.current_stats

    def kill(self) -> None:
        """The engine is gone: all running requests end with EngineDeadError."""
        self.is_alive = False
        self._death.set()

    async def submit(
        self, request: Request, sink: Callable[[TokenDelta, Sequence[TokenDelta]], bool] | None = None
    ) -> AsyncGenerator[TokenDelta, None]:
        if not self.is_alive:
            raise EngineDeadError("the fake engine is dead")
        self.requests.append(request)
        self.num_active += 1
        self.started.set()
        is_finished = False
        try:
            for index, delta in enumerate(self._deltas(request)):
                if index == self.faults.fail_after:
                    is_finished = True
                    yield TokenDelta(request.request_id, (), FinishReason.ERROR, None, "step 17 went wrong", self.faults.is_refusal)
                    return
                await self._wait(index)
                is_finished = delta.finish_reason is not None
                if sink is None or not sink(delta, ()):
                    yield delta
        except EngineDeadError:
            is_finished = True
            raise
        finally:
            self.num_active -= 1
            if not is_finished:
                self.aborted.append(request.request_id)

    async def _wait(self, index: int) -> None:
        if index == self.faults.die_after:
            self.kill()
        if self._death.is_set():
            raise EngineDeadError("the fake engine died")
        seconds = None if index == self.faults.hang_after else self.faults.step_s
        try:
            await asyncio.wait_for(self._death.wait(), seconds)
        except TimeoutError:
            return
        raise EngineDeadError("the fake engine died")

    def _deltas(self, request: Request) -> Iterable[TokenDelta]:
        tokens, reason = ending(request, self.answer(request))
        num_single = min(1 + self.num_control, len(tokens))
        singles = [tokens[start : start + 1] for start in range(num_single)]
        chunks = [*singles, *(tokens[start : start + self.chunk] for start in range(num_single, len(tokens), self.chunk))]
        k = self.facts.max_draft_length if request.max_draft_length is None else request.max_draft_length
        prompt = logprobs_of(request.prompt_token_ids[1:], request.sampling.num_prompt_logprobs)
        draft = DraftStats(accepted_histogram=[0] * (k + 1))
        stats = RequestStats(draft, k, num_cached_tokens=0, num_preemptions=0, queue_ms=0.5, prefill_ms=2.0, decode_ms=0.0)
        for index, token_ids in enumerate(chunks):
            num_drafted = 0
            is_control = 0 < index < num_single and k > 0
            draft.num_control_steps += is_control
            if index and k and not is_control:
                num_drafted = min(k, max(len(token_ids), self.chunk - 1))
                draft.count_drafts(num_drafted, len(token_ids) - 1)
            elif index:
                draft.num_plain_steps += 1
            is_last = index == len(chunks) - 1
            given = replace(stats, draft=DraftStats()) if index == 0 and not is_last else stats if is_last else None
            delta = TokenDelta(request.request_id, tuple(token_ids), reason if is_last else None, given, num_drafted=num_drafted)
            logprobs = logprobs_of(token_ids, request.sampling.num_logprobs)
            yield replace(delta, logprobs=logprobs, prompt_logprobs=() if index else prompt, is_control=is_control)


def logprobs_of(token_ids: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """Made-up figures: a token's own is -0.5, the likeliest are the ids from 10 on, at -0.1, -0.2 ..."""
    if num_top is None:
        return ()
    top_ids = tuple(range(10, 10 + num_top))
    return tuple(TokenLogprobs(-0.5, top_ids, tuple(-(i + 1) / 10 for i in range(num_top))) for _ in token_ids)


def ending(request: Request, tokens: Sequence[int]) -> tuple[Sequence[int], FinishReason]:
    """Where an answer ends and why: at a stop token, itself included, or at max_tokens. Answers that end too early go on with id 5."""
    sampling = request.sampling
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else FACTS.eos_token_ids)}
    tokens = [*tokens, *[5] * (sampling.max_tokens - len(tokens))][: sampling.max_tokens]
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1], FinishReason.STOP
    return tokens, FinishReason.LENGTH


def busy_stats(last_step_age_s: float, step_s: float = 1.0, num_tokens: int = 1000) -> EngineStats:
    """Statistics of an engine with work, whose last step ended that long ago."""
    now_s = time.monotonic()
    return EngineStats(
        time_s=now_s, last_step_s=now_s - last_step_age_s, num_running=1, num_steps=100, num_generation_tokens=num_tokens, step_s=step_s
    )
