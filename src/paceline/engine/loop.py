"""The engine's one loop: requests in, plan -> step -> commit, token deltas out. `python -m paceline.engine.loop` runs it as a process.

`EngineLoop` is the same for `llm.py` (in-process) and for the engine process; only `serve_frames` below knows sockets.
"""

import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.core.outcome import StepOutcome, TokenDelta
from paceline.core.plan import StepPlan
from paceline.core.request import FinishReason, Request
from paceline.core.stats import EngineStats
from paceline.errors import BadInputError, PacelineError
from paceline.executor.executor import Executor
from paceline.scheduler.scheduler import Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from paceline.engine.wire import EnginePort

STATS_INTERVAL_S = 0.25
_PREPARATION_POLL_S = 0.01
_IDLE_POLL_S = 0.25  # also how soon an idle engine notices that its parent is gone


class EngineLoop:
    """Scheduler and executor, driven one outcome at a time."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._in_flight: deque[StepPlan] = deque()
        self._preparing: dict[str, tuple[Request, Future[object]]] = {}  # request id -> a request whose grammar is being compiled

    def add(self, request: Request) -> None:
        """Queue a request; raises BadInputError if it can never run. One whose grammar is being compiled waits for that first."""
        self._scheduler.check(request)
        if request.request_id in self._preparing:
            raise BadInputError(f"request id {request.request_id!r} is in use by an unfinished request; choose another", param="request_id")
        grammar = request.sampling.grammar
        preparation = None if grammar is None else self._executor.prepare(grammar)
        if preparation is None:
            self._scheduler.add(request)
        else:
            self._preparing[request.request_id] = (request, preparation)

    def abort(self, request_id: str) -> list[TokenDelta]:
        _, preparation = self._preparing.pop(request_id, (None, None))
        if preparation is not None:
            if all(other is not preparation for _, other in self._preparing.values()):
                preparation.cancel()  # others need not wait for it, unless it has begun
            return [TokenDelta(request_id, (), FinishReason.ABORT)]
        return self._scheduler.abort(request_id)

    def fail_all(self, reason: str) -> list[TokenDelta]:
        failed = [TokenDelta(request_id, (), FinishReason.ERROR, error=reason) for request_id in self._preparing]
        self._preparing.clear()
        return failed + self._scheduler.fail_all(reason)

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished or bool(self._preparing)

    def step(self) -> list[TokenDelta]:
        """Plan up to the queue depth, wait for the oldest step and commit it. Empty when nothing could run."""
        if self._preparing:
            self._add_prepared()
        while len(self._in_flight) < self._executor.queue_depth:
            plan = self._scheduler.plan()
            if plan is None:
                break
            self._executor.submit(plan)
            self._in_flight.append(plan)
        if not self._in_flight:
            return []
        outcome: StepOutcome = self._executor.collect()
        return self._scheduler.commit(self._in_flight.popleft(), outcome)

    def _add_prepared(self) -> None:
        """Hand over what is ready; with nothing else to do, wait for it a little."""
        if not self._scheduler.has_unfinished:
            wait([preparation for _, preparation in self._preparing.values()], _PREPARATION_POLL_S, FIRST_COMPLETED)
        for request_id, (request, preparation) in tuple(self._preparing.items()):
            if preparation.done():
                del self._preparing[request_id]
                self._scheduler.add(request)

    def idle_s(self) -> float:
        """Seconds until the loop has something to do by itself: 0 with work at hand, at most the poll interval."""
        if self._in_flight:
            return 0.0
        if not self._scheduler.has_unfinished:
            return 0.0 if self._preparing else _IDLE_POLL_S  # `step` waits for what is being compiled
        wakeup_s = self._scheduler.next_wakeup_s()
        poll_s = _PREPARATION_POLL_S if self._preparing else _IDLE_POLL_S
        return 0.0 if wakeup_s is None else min(max(wakeup_s - time.monotonic(), 0.0), poll_s)

    def stats(self) -> EngineStats:
        """The scheduler's; requests whose grammar is being compiled wait, and while there are no others no step is due."""
        stats = self._scheduler.stats()
        if not self._preparing:
            return stats
        last_step_s = stats.last_step_s if self._scheduler.has_unfinished else stats.time_s
        return replace(stats, num_waiting=stats.num_waiting + len(self._preparing), last_step_s=last_step_s)

    def inference(self) -> AbstractContextManager[object]:
        """See `Executor.inference`."""
        return self._executor.inference()

    def close(self) -> None:
        """Let go of work beside the steps that would keep the process from ending."""
        self._executor.close()


def serve_frames(directory: str, parent: int) -> int:
    """Connect to the client's sockets in `directory`, load the model it names, and run until told to stop. Returns the exit status.

    Ends by itself once process `parent`, who started it, is gone.
    """
    # Imported here: the in-process engine must work where msgspec and pyzmq are not installed.
    from paceline.engine import wire

    def is_orphan() -> bool:
        return os.getppid() != parent

    port = wire.EnginePort(directory)
    try:
        return _load_and_run(port, is_orphan)
    finally:
        port.close()


def _load_and_run(port: "EnginePort", is_orphan: Callable[[], bool]) -> int:
    from paceline.engine import wire

    try:
        launch = port.receive_launch(is_orphan)
        if launch is None:
            return 1
        from paceline.executor.load import load_executor
        from paceline.executor.profile import with_step_costs

        executor, facts = load_executor(launch.config, launch.folder, launch.draft_folder, port)
        facts = with_step_costs(launch.config, executor, facts)
        loop = EngineLoop(Scheduler(SchedulerConfig.from_engine_config(launch.config), facts), executor)
    except PacelineError as error:
        port.send(wire.Failed(str(error), error.exit_code))
        return error.exit_code
    except Exception as error:  # the client must learn of any failure to load, whatever it is
        traceback.print_exc()
        port.send(wire.Failed(f"the engine could not start: {error}", 1))
        return 1
    gc.freeze()  # the loaded model never becomes garbage; keep it out of every later collection
    port.send(wire.Ready(facts))
    try:
        with loop.inference():
            _run(loop, port, is_orphan)
    except Exception as error:  # every stream must end with the reason before the process does
        traceback.print_exc()
        reason = _failure_reason(error)
        port.send_deltas(loop.fail_all(reason))
        port.send(wire.Failed(reason, 1))
        return 1
    finally:
        loop.close()
    return 0


def _failure_reason(error: Exception) -> str:
    """What clients are told: the text of an error that is made for users, the class alone of any other, which may hold their content."""
    return f"the engine failed: {error if isinstance(error, PacelineError) else type(error).__name__}"


def _run(loop: EngineLoop, port: "EnginePort", is_orphan: Callable[[], bool]) -> None:
    from paceline.engine import wire

    sent_stats_s = 0.0
    while True:
        # The loop sleeps in the socket, and for some milliseconds in a step that has only grammars to wait for; with other work at
        # hand it only drains what has come.
        for message in port.receive(loop.idle_s()):
            match message:
                case wire.Submit(request):
                    port.send_deltas(_add(loop, request))
                case wire.Abort():
                    port.send_deltas(loop.abort(message.request_id))
                case wire.Shutdown():
                    return
        if is_orphan():
            return
        port.send_deltas(loop.step())
        now_s = time.monotonic()
        if now_s - sent_stats_s >= STATS_INTERVAL_S:
            port.send(wire.Stats(loop.stats()))
            sent_stats_s = now_s


def _add(loop: EngineLoop, request: Request) -> list[TokenDelta]:
    try:
        loop.add(request)
    except PacelineError as error:
        return [TokenDelta(request.request_id, (), FinishReason.ERROR, None, str(error), is_refusal=True)]
    return []


def main() -> None:
    # The parent decides when the engine ends, also if someone signals the engine alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s engine: %(message)s")
    logging.getLogger("paceline").setLevel(logging.INFO)
    sys.exit(serve_frames(sys.argv[1], int(sys.argv[2])))


if __name__ == "__main__":
    main()
