"""Owns one device: the target, the drafter, their KV memory and the slots. The engine loop feeds it plans and takes outcomes.

Loading lives in `executor/load.py`. On the CPU a step runs when it is submitted, so the queue depth is 1.
"""

from collections import deque
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import cast

import torch

from paceline.core.outcome import StepOutcome
from paceline.core.plan import StepPlan
from paceline.executor.grammar import Grammars
from paceline.executor.slots import SlotTable
from paceline.executor.step import Target, run_step
from paceline.forward.native import Native
from paceline.forward.op_times import OpTime, op_times
from paceline.speculative.drafter import Drafter


class Executor:
    """Runs plans in the order they are submitted; `collect` returns the oldest outcome not yet taken."""

    queue_depth = 1  # a CPU step leaves no idle device for the host to overlap with

    def __init__(self, target: Target, drafter: Drafter, grammars: Grammars) -> None:
        self._target = target
        self._drafter = drafter
        self._slots = SlotTable(grammars)
        self._outcomes: deque[StepOutcome] = deque()

    def prepare(self, grammar: str) -> Future[object] | None:
        """Begin what a request with this grammar has to wait for before it may be planned; None if there is nothing.

        The same future for the same grammar; whoever is the last to wait for it may cancel it.
        """
        return cast("Future[object] | None", self._slots.grammars.prepare(grammar))

    def close(self) -> None:
        self._slots.grammars.close()

    def inference(self) -> AbstractContextManager[object]:
        """What a thread that runs nothing but steps may be in throughout; to enter it for each step takes a noticeable part of one."""
        return torch.inference_mode()

    def submit(self, plan: StepPlan) -> None:
        if not torch.is_inference_mode_enabled():
            with self.inference():
                return self.submit(plan)
        self._outcomes.append(run_step(plan, self._slots, self._drafter, self._target))
        return None

    def run_apart(self, plan: StepPlan) -> StepOutcome:
        """Run a plan on slots of its own, which no request will see. Only before the first `submit`: it writes into pages."""
        with torch.inference_mode():
            return run_step(plan, SlotTable(self._slots.grammars), self._drafter, self._target)

    def op_times(self) -> tuple[OpTime, ...]:
        """Where the target's time goes, by kind of op; () if its runner does not say. Only before the first `submit`."""
        forward = self._target.forward
        return op_times(forward) if isinstance(forward, Native) else ()

    def collect(self) -> StepOutcome:
        return self._outcomes.popleft()
