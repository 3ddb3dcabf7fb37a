"""What a worker's child runs in tests: a request names a job and gives it a number. Started as `python -m tests.fakes.worker_jobs`."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

from paceline.server.worker_child import ANSWER, ANSWERED, serve


def _echo(text: str) -> bytes:
    return text.encode()


def _recurse(text: str) -> bytes:
    return _recurse(text)


def _refuse(text: str) -> bytes:
    raise ValueError(text)


def _hold_memory(num_bytes: str) -> bytes:
    return str(len(bytearray(int(num_bytes)))).encode()


def _print(text: str) -> bytes:
    print(text, flush=True)
    os.write(1, text.encode())
    return sys.stdin.read().encode()


def _sleep(seconds: str) -> bytes:
    time.sleep(float(seconds))
    return seconds.encode()


def _spin(_: str) -> bytes:
    while True:
        pass


def _interrupt(text: str) -> bytes:
    os.kill(os.getpid(), signal.SIGINT)
    return text.encode()


def _crash(_: str) -> bytes:
    ctypes.string_at(0)
    return b""


def _exit(code: str) -> bytes:
    os._exit(int(code))


def _forge(num_frames: str) -> bytes:
    """Write frames of its own beside the answer, wherever the answers go."""
    for descriptor in range(3, 16):
        with contextlib.suppress(OSError):
            os.write(descriptor, ANSWER.pack(ANSWERED, 0) * int(num_frames))
    return b""


JOBS: dict[str, Callable[[str], bytes]] = {
    "echo": _echo,
    "forge": _forge,
    "answer": lambda num_bytes: b"x" * int(num_bytes),
    "crash": _crash,
    "environment": lambda name: os.environ.get(name, "").encode(),
    "exit": _exit,
    "files": lambda number: str(len([os.open("/dev/null", os.O_RDONLY) for _ in range(int(number))])).encode(),
    "interrupt": _interrupt,
    "memory": _hold_memory,
    "print": _print,
    "raise": _refuse,
    "recurse": _recurse,
    "sleep": _sleep,
    "spin": _spin,
}


def run(request: bytes) -> bytes:
    name, _, argument = request.decode().partition(" ")
    return JOBS[name](argument)


if __name__ == "__main__":
    serve(run)
