"""The killable worker: whatever its work does, the caller gets an answer or an error in time, and the next caller is served."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import uvloop

from paceline.server.worker import Worker, WorkerError, WorkerLimits, WorkerTimeoutError, WorkerUnavailableError

ROOT = Path(__file__).parents[3]
JOBS = "tests.fakes.worker_jobs"
LIMITS = WorkerLimits(memory_bytes=256 << 20, max_answer_bytes=1 << 20, max_callers=21)
LONG_S = 30.0  # a limit that nothing here should meet


@pytest.fixture(autouse=True)
def jobs_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker(JOBS, LIMITS)
    yield worker
    await worker.close()
    assert not psutil.Process().children(recursive=True)


async def ask(worker: Worker, request: str, timeout_s: float = LONG_S) -> str:
    return (await worker.call(request.encode(), timeout_s)).decode()


async def test_one_child_serves_call_after_call(worker: Worker) -> None:
    assert worker.pid is None, "the child waits until it is needed"
    assert await ask(worker, "echo ") == ""
    pid = worker.pid
    for text in ("a", "é" * 1000, "x" * 1_000_000):
        assert await ask(worker, f"echo {text}") == text
    assert worker.pid == pid is not None


async def test_errors_are_answers(worker: Worker) -> None:
    """Of the handler, of its memory, of its stack: the child goes on."""
    await worker.start()
    pid = worker.pid
    for request, kind, message in (
        ("raise no such schema", "ValueError", "no such schema"),
        ("raise " + "long " * 10_000, "ValueError", "long long"),
        ("unknown", "KeyError", "unknown"),
        ("recurse", "RecursionError", "recursion"),
        (f"memory {1 << 30}", "MemoryError", "out of memory"),
        (f"answer {2 << 20}", "OverflowError", "limit 1048576"),
        ("files 100", "OSError", "Too many open files"),
    ):
        with pytest.raises(WorkerError, match=message) as caught:
            await ask(worker, request)
        assert caught.value.kind == kind
        assert len(str(caught.value)) <= 4096
    assert await ask(worker, f"answer {1 << 20}") == "x" * (1 << 20)
    assert worker.pid == pid


async def test_a_child_that_is_slow_is_killed(worker: Worker) -> None:
    await worker.start()
    pid = worker.pid
    assert pid is not None
    for request in ("spin", "sleep 60"):
        started_s = time.monotonic()
        with pytest.raises(WorkerTimeoutError, match=r"within 0\.1 s"):
            await ask(worker, request, timeout_s=0.1)
        assert time.monotonic() - started_s < 5
        assert not psutil.pid_exists(pid)
        assert await ask(worker, "echo on") == "on"
        assert worker.pid != pid


async def test_the_start_of_a_child_is_not_the_callers_time(worker: Worker) -> None:
    """The limit is shorter than Python needs to start."""
    assert await ask(worker, "echo x", timeout_s=0.03) == "x"


async def test_a_request_that_the_child_does_not_take_is_in_the_time_too(worker: Worker) -> None:
    await worker.start()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerTimeoutError):
        await ask(worker, "echo " + "x" * 1_000_000, timeout_s=0.1)
    assert await ask(worker, "echo x") == "x"


@pytest.mark.parametrize("request_text", ["crash", "exit 0", "exit 3"])
async def test_a_child_that_ends_is_an_error_and_the_next_call_has_a_new_one(worker: Worker, request_text: str) -> None:
    with pytest.raises(WorkerError) as caught:
        await ask(worker, request_text)
    assert caught.value.kind == WorkerError.DIED
    assert await ask(worker, "echo x") == "x"


async def test_a_child_that_died_while_idle_is_nobodys_error(worker: Worker) -> None:
    await worker.start()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    await asyncio.sleep(0.1)
    assert await ask(worker, "echo x") == "x"


async def test_the_processor_limit_counts_per_call() -> None:
    worker = Worker(JOBS, WorkerLimits(cpu_s=0))
    try:
        with pytest.raises(WorkerError) as caught:
            await ask(worker, "spin")
        assert caught.value.kind == WorkerError.DIED
        assert await ask(worker, "echo x") == "x"
    finally:
        await worker.close()


async def test_an_announced_answer_over_the_limit_is_not_taken(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the child's own check not hold."""
    await worker.start()
    monkeypatch.setattr(worker, "_limits", WorkerLimits(max_answer_bytes=1000))
    with pytest.raises(WorkerError, match="limit 1,000"):
        await ask(worker, "answer 500000")
    assert await ask(worker, "echo x") == "x"


async def test_callers_do_not_get_each_others_answers(worker: Worker) -> None:
    texts = [f"{index} " * index for index in range(20)]
    assert await asyncio.gather(*(ask(worker, f"echo {text}") for text in texts)) == texts


async def test_a_caller_that_leaves_takes_the_child_along(worker: Worker) -> None:
    """Else the next one would get its answer."""
    await worker.start()
    pid = worker.pid
    leaving = asyncio.create_task(ask(worker, "sleep 60"))
    others = [asyncio.create_task(ask(worker, f"echo {index}")) for index in range(5)]
    await asyncio.sleep(0.05)
    others[2].cancel()  # one that waits costs nobody anything
    leaving.cancel()
    answers = await asyncio.gather(*others, return_exceptions=True)
    assert answers[:2] + answers[3:] == ["0", "1", "3", "4"]
    assert isinstance(answers[2], asyncio.CancelledError)
    assert leaving.cancelled()
    assert worker.pid != pid


@pytest.mark.parametrize("end", ["spin", "crash"])
async def test_what_befalls_one_call_is_not_the_next_ones_error(worker: Worker, end: str) -> None:
    """Calls behind one that ends its child, sent ahead or made while the next child starts, are answered by that one."""
    await worker.start()
    ending = asyncio.create_task(ask(worker, end, timeout_s=0.1))
    ahead = [asyncio.create_task(ask(worker, f"echo {index}")) for index in range(19)]
    await asyncio.wait([ending])
    assert isinstance(ending.exception(), WorkerError)
    assert worker.pid is None, "the next child has not started"
    late = asyncio.create_task(ask(worker, "echo late"))
    assert await asyncio.gather(*ahead, late) == [*map(str, range(19)), "late"]


async def test_the_answer_of_a_call_that_was_sent_ahead_and_left_is_nobodys(worker: Worker) -> None:
    await worker.start()
    pid = worker.pid
    running = asyncio.create_task(ask(worker, "sleep 0.2"))
    leaving = asyncio.create_task(ask(worker, "echo secret"))
    staying = asyncio.create_task(ask(worker, "echo mine"))
    await asyncio.sleep(0.05)
    leaving.cancel()
    assert await running == "0.2"
    assert await staying == "mine"
    assert worker.pid == pid


async def test_callers_that_leave_while_they_wait_leave_no_work_behind(worker: Worker) -> None:
    await worker.start()
    running = asyncio.create_task(ask(worker, "sleep 0.3"))
    await asyncio.sleep(0)
    for _ in range(5):  # more than may wait at a time
        leaving = [asyncio.create_task(ask(worker, "sleep 60 " + "x" * 20_000)) for _ in range(20)]
        await asyncio.sleep(0)
        for call in leaving:
            call.cancel()
        await asyncio.wait(leaving)
    assert await ask(worker, "echo x") == "x"
    assert await running == "0.3"


async def test_frames_that_nobody_asked_for_end_the_child_and_no_other_call(worker: Worker) -> None:
    await worker.start()
    pid = worker.pid
    assert await ask(worker, "forge 3") == "", "the first of them passes for the answer"
    assert await ask(worker, "echo x") == "x"
    assert worker.pid != pid


async def test_a_large_request_is_not_sent_ahead(worker: Worker) -> None:
    """The child's memory is for one call."""
    large = "x" * 1_000_000
    texts = ["a", large, "b", large, large, "c"]
    assert await asyncio.gather(*(ask(worker, f"echo {text}") for text in texts)) == texts


async def test_more_callers_than_may_wait_are_told_so(worker: Worker) -> None:
    calls = [asyncio.create_task(ask(worker, f"echo {index}")) for index in range(25)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert answers[:21] == [str(index) for index in range(21)]
    assert all(isinstance(answer, WorkerUnavailableError) for answer in answers[21:])
    assert await ask(worker, "echo x") == "x", "the places are free again"


async def test_waiting_for_ones_turn_has_an_end() -> None:
    worker = Worker(JOBS, WorkerLimits(max_wait_s=0.2))
    try:
        await worker.start()
        running = asyncio.create_task(ask(worker, "sleep 0.6"))
        await asyncio.sleep(0)
        with pytest.raises(WorkerUnavailableError, match=r"busy for 0\.2 s"):
            await ask(worker, "echo x")
        assert await running == "0.6", "who is served goes on"
        assert await ask(worker, "echo x") == "x"
    finally:
        await worker.close()


async def test_what_the_work_prints_is_no_answer(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    assert await ask(worker, "print hello") == ""
    assert await ask(worker, "echo x") == "x"
    captured = capfd.readouterr()
    assert captured.err.count("hello") == 2
    assert not captured.out


async def test_ctrl_c_is_not_for_the_child(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    assert await ask(worker, "interrupt x") == "x"
    assert worker.pid is not None
    assert os.getsid(worker.pid) != os.getsid(0)
    assert not capfd.readouterr().err


async def test_the_environment_holds_no_secrets(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    assert await ask(worker, "environment PACELINE_API_KEY") == ""
    assert await ask(worker, "environment PATH") == os.environ["PATH"]


async def test_close_ends_the_call_that_runs_and_those_that_wait(worker: Worker) -> None:
    await worker.start()
    pid = worker.pid
    assert pid is not None
    running = asyncio.create_task(ask(worker, "sleep 60"))
    waiting = asyncio.create_task(ask(worker, "echo x"))
    await asyncio.sleep(0.05)
    await worker.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(WorkerError):
        await running
    for late in (waiting, ask(worker, "echo x")):
        with pytest.raises(WorkerUnavailableError, match="shutting down"):
            await late
    await worker.close()


async def test_close_while_the_child_starts() -> None:
    worker = Worker(JOBS, LIMITS)
    starting = asyncio.create_task(ask(worker, "sleep 60"))
    await asyncio.sleep(0.01)
    await worker.close()
    with pytest.raises(WorkerUnavailableError):
        await starting
    assert not psutil.Process().children(recursive=True)


async def test_a_module_that_cannot_start(capfd: pytest.CaptureFixture[str]) -> None:
    worker = Worker("tests.fakes.no_such_module", LIMITS)
    with pytest.raises(WorkerUnavailableError, match="did not start"):
        await ask(worker, "echo x")
    assert "no_such_module" in capfd.readouterr().err
    await worker.close()


def test_the_servers_event_loop_can_run_it() -> None:
    async def calls() -> None:
        worker = Worker(JOBS, LIMITS)
        assert await ask(worker, "echo x") == "x"
        with pytest.raises(WorkerTimeoutError):
            await ask(worker, "spin", timeout_s=0.05)
        with pytest.raises(WorkerError, match="limit 1048576"):
            await ask(worker, f"answer {2 << 20}")
        await worker.close()
        assert not psutil.Process().children(recursive=True)

    uvloop.run(calls())


@pytest.mark.parametrize("job", ["spin", "sleep 60"])
def test_the_child_dies_with_its_parent(job: str) -> None:
    """Killed outright, in the midst of a call: nothing is left behind."""
    program = f"""
        import asyncio
        from paceline.server.worker import Worker

        async def main():
            worker = Worker({JOBS!r})
            await worker.start()
            print(worker.pid, flush=True)
            await worker.call({job.encode()!r}, 60)

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.05)
        parent.kill()
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
