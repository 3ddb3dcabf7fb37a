"""A server of our own as a child process, for commands that need one: `paceline chat` and `paceline prove` without `--url`."""

import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, NoReturn

from paceline.errors import MissingError, PacelineError
from paceline.server.ready import ready_url

_START_LIMIT_S = 3600.0  # the first start downloads and converts the model
_STOP_GRACE_S = 10.0
_POLL_S = 0.2

Lines = queue.SimpleQueue[str | None]


@dataclass(frozen=True, slots=True)
class ChildServer:
    """A server that is ready."""

    url: str
    pid: int


@contextmanager
def running_server(
    arguments: Sequence[str], show: Callable[[str], object], merges_errors: bool = False, is_stopped: threading.Event | None = None
) -> Generator[ChildServer]:
    """Run `paceline serve` with these arguments for the block; `show` gets its output line by line, from another thread.

    `merges_errors`: its errors and log as well; else they go where ours go. `is_stopped`: set from another thread, it ends the wait for a
    server that is not ready yet; for the block may be entered and left in other threads than the main one. Raises what made it end early.
    """
    command = [sys.executable, "-m", "paceline.cli", "serve", *arguments]
    if threading.current_thread() is threading.main_thread():  # no other may
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _exit)  # so that the child is stopped below
    # A session of its own: Ctrl-C in the terminal stops something here, and must not stop the server.
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merges_errors else None,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert child.stdout is not None
    lines: Lines = queue.SimpleQueue()
    relay = threading.Thread(target=_relay, args=(child.stdout, lines, show), daemon=True)
    relay.start()
    try:
        url = _wait_for_url(lines, is_stopped)
        if url is None:
            raise _StartError(child.wait())
        yield ChildServer(url, child.pid)
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        relay.join(_STOP_GRACE_S)


def _relay(output: IO[str], lines: Lines, show: Callable[[str], object]) -> None:
    """Pass a child's output on to `show` and to `lines`; None at its end."""
    with output:
        for line in output:
            show(line)
            lines.put(line)
    lines.put(None)


def _wait_for_url(lines: Lines, is_stopped: threading.Event | None) -> str | None:
    """The address that a starting server prints; None if it ended instead. Only its own word counts: another may hold the port."""
    deadline_s = time.monotonic() + _START_LIMIT_S
    while True:
        if is_stopped is not None and is_stopped.is_set():
            raise MissingError("the server was stopped before it was ready")
        left_s = deadline_s - time.monotonic()
        try:
            line = lines.get(timeout=min(max(left_s, 0), _POLL_S))
        except queue.Empty:
            if left_s > 0:
                continue
            raise MissingError(f"the server was not ready after {_START_LIMIT_S:,.0f} s; `paceline serve` shows how far it gets") from None
        url = None if line is None else ready_url(line)
        if line is None or url is not None:
            return url


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


class _StartError(PacelineError):
    """The started server ended; its exit code becomes ours."""

    def __init__(self, code: int) -> None:
        super().__init__("the server could not start; its message stands above")
        self.exit_code = code if code > 0 else MissingError.exit_code  # a signal ended it
