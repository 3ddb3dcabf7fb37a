"""`/health`: is the engine making progress? An engine that hangs with its process alive must not look healthy.

With work at hand the last step must be recent; an idle engine must produce one real token, asked for at most once in a few seconds.
"""

import asyncio
import time
import uuid
from dataclasses import dataclass

from paceline.core.request import FinishReason, Request, SamplingParams
from paceline.errors import PacelineError
from paceline.server.engine_port import Engine
from paceline.server.inflight import InFlight

_PROBE_LIFETIME_S = 4.0  # probes each 5 s see a fresh token each time, faster ones share it
_PROBE_TIMEOUT_S = 5.0
_MIN_STALL_S = 5.0
_MAX_STALL_S = 120.0
_FIRST_STALL_S = 60.0  # before any step has shown how long one takes


@dataclass(frozen=True, slots=True)
class Health:
    """`reason` says what is wrong, or what the verdict rests on."""

    is_healthy: bool
    reason: str


class HealthCheck:
    """Judges one engine. Concurrent callers share a probe."""

    def __init__(self, engine: Engine, in_flight: InFlight, max_num_batched_tokens: int) -> None:
        self._engine = engine
        self._in_flight = in_flight
        self._max_num_batched_tokens = max_num_batched_tokens
        self._probe: asyncio.Task[Health] | None = None
        self._probed_s = 0.0  # when the running or last probe began

    async def check(self) -> Health:
        """The verdict now. Takes at most the probe's time limit."""
        if not self._engine.is_alive:
            return Health(False, "the engine has stopped")
        busy_since_s = self._in_flight.busy_since_s
        if busy_since_s is not None:
            return self._judge_busy(busy_since_s)
        health = await self._shared_probe()
        if not health.is_healthy and (busy_since_s := self._in_flight.busy_since_s) is not None and self._engine.is_alive:
            return self._judge_busy(busy_since_s)  # work came in meanwhile, and the probe may have waited behind it
        return health

    async def probe(self) -> Health:
        """Ask the engine for one real token."""
        token_id = next(iter(self._engine.facts.eos_token_ids), 0)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = Request(f"health-{uuid.uuid4().hex}", (token_id,), sampling, time.monotonic(), max_draft_length=0)
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                finish_reason = None
                async for delta in self._engine.submit(request):
                    finish_reason = delta.finish_reason
        except TimeoutError:
            return Health(False, f"the idle engine gave no token within {_PROBE_TIMEOUT_S:g} s")
        except PacelineError:
            return Health(False, "the engine failed to give a token")
        if finish_reason not in (FinishReason.LENGTH, FinishReason.STOP):
            return Health(False, "the engine failed to give a token")
        return Health(True, "the engine gave a token")

    async def _shared_probe(self) -> Health:
        now_s = time.monotonic()
        if self._probe is None or (self._probe.done() and now_s - self._probed_s >= _PROBE_LIFETIME_S):
            self._probed_s = now_s
            self._probe = asyncio.create_task(self.probe())
        return await asyncio.shield(self._probe)  # a caller that leaves must not end it for the others

    def _judge_busy(self, busy_since_s: float) -> Health:
        """Work is running: when was the last step, or else since when has there been work?"""
        stalled_s = time.monotonic() - max(self._engine.stats().last_step_s, busy_since_s)
        limit_s = self._stall_limit_s()
        if stalled_s > limit_s:
            return Health(False, f"no step for {stalled_s:.0f} s with work at hand, limit {limit_s:.0f} s")
        return Health(True, "the engine is working")

    def _stall_limit_s(self) -> float:
        """How long one step can take: as many tokens as fit a step, at the average time per token so far.

        Decoding costs more per token than prefill, so the average errs on the patient side.
        """
        stats = self._engine.stats()
        num_tokens = stats.num_prompt_tokens - stats.num_prefix_hit_tokens + stats.num_generation_tokens
        if num_tokens <= 0 or stats.step_s <= 0:
            return _FIRST_STALL_S
        return min(max(stats.step_s / num_tokens * self._max_num_batched_tokens, _MIN_STALL_S), _MAX_STALL_S)
