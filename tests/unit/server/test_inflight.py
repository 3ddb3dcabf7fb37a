"""Answers without a client: begun at any time, they end when they are told to, and are waited for."""

import asyncio

import pytest

from paceline.server.inflight import InFlight, InterruptedAnswerError, Interruption


@pytest.mark.parametrize("has_begun", [False, True])
async def test_the_end_of_background_work(has_begun: bool) -> None:
    in_flight, reasons = InFlight(), []

    async def work() -> None:
        try:
            with in_flight.answering(None):
                await asyncio.sleep(60)
        except InterruptedAnswerError as error:
            await asyncio.sleep(0.01)  # its own end takes time
            reasons.append(error.reason)

    tasks = [in_flight.start(work()) for _ in range(2)]
    if has_begun:
        await asyncio.sleep(0)
        assert len(in_flight) == 2
    async with asyncio.timeout(5):  # wait_for would give the tasks the time to begin
        await in_flight.end_background()
    assert reasons == [Interruption.SHUT_DOWN] * 2
    assert all(task.done() for task in tasks)
    assert (len(in_flight), in_flight.busy_since_s) == (0, None)


async def test_the_end_of_no_background_work() -> None:
    await asyncio.wait_for(InFlight().end_background(), 5)
