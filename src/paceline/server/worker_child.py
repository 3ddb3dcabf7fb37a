"""The child's side of `worker.py`: reads requests from stdin, hands each to one function, writes answers to stdout, under hard limits.

A module that a `Worker` runs calls `serve`. It should import little: the child is started again after every call that it did not survive.
"""

import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

REQUEST = struct.Struct(">I")  # bytes of the request that follows
ANSWER = struct.Struct(">BI")  # ANSWERED, FAILED or READY, and bytes of what follows
ANSWERED, FAILED, READY = range(3)

MAX_ERROR_BYTES = 4096

_PR_SET_PDEATHSIG = 1
_RESERVE_BYTES = 1 << 20  # given back when memory has run out, so that there is some to say so with
_OUT_OF_MEMORY = b"MemoryError\nout of memory"


def serve(handler: Callable[[bytes], bytes]) -> None:
    """Answer requests until the parent closes stdin. An exception of `handler` is an answer too: its class's name and its message.

    The limits come from the command line that `Worker` writes. Whatever prints goes to stderr: stdout carries frames only.
    """
    memory_bytes, cpu_s, max_answer_bytes, parent_pid = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    _die_with(parent_pid)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    _occupy_standard_streams()
    _limit(memory_bytes)
    _send(answers, READY, b"")
    used_s, reserve = -1, list[bytearray]()
    while (request := _next_request(requests)) is not None:
        if (now_s := int(time.process_time())) != used_s:  # the limit is in whole seconds
            used_s = now_s
            _limit_cpu(cpu_s)
        if not reserve:  # making it takes longer than to render a short chat
            reserve.append(bytearray(_RESERVE_BYTES))
        kind, payload = _outcome(handler, request, max_answer_bytes, reserve)
        del request
        try:
            _send(answers, kind, payload)
        except BrokenPipeError:
            os._exit(0)  # nobody is left to tell; an orderly end would try once more to flush


def error_payload(error: BaseException) -> bytes:
    """What a FAILED frame holds: the name of the error's class, a line break, its message, cut to a bound."""
    message = str(error)[:MAX_ERROR_BYTES]
    return f"{type(error).__name__}\n{message}".encode(errors="replace")[:MAX_ERROR_BYTES]


def _outcome(handler: Callable[[bytes], bytes], request: bytes, max_answer_bytes: int, reserve: list[bytearray]) -> tuple[int, bytes]:
    try:
        answer = handler(request)
        if len(answer) > max_answer_bytes:
            return FAILED, f"OverflowError\nthe answer has {len(answer)} bytes, limit {max_answer_bytes}".encode()
        return ANSWERED, answer
    except MemoryError:
        reserve.clear()
        return FAILED, _OUT_OF_MEMORY
    except Exception as error:
        return FAILED, error_payload(error)


def _next_request(requests: BinaryIO) -> bytes | None:
    """None once the parent has closed its end, in the midst of a request too."""
    header = requests.read(REQUEST.size)
    if len(header) < REQUEST.size:
        return None
    (num_bytes,) = REQUEST.unpack(header)
    request = requests.read(num_bytes)
    return request if len(request) == num_bytes else None


def _send(answers: BinaryIO, kind: int, payload: bytes) -> None:
    answers.write(ANSWER.pack(kind, len(payload)))
    answers.write(payload)
    answers.flush()


def _die_with(parent_pid: int) -> None:
    """Be killed when the parent dies, however busy; without Linux the end of stdin must do."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before that
        sys.exit(1)


def _occupy_standard_streams() -> None:
    """Nothing that the handler reads or prints may get between the frames."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)


def _limit(memory_bytes: int) -> None:
    """`memory_bytes` of address space beyond what the loaded modules take, no core files, few open files."""
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_NOFILE, 32)
    _set_limit(resource.RLIMIT_AS, _address_space_bytes() + memory_bytes)


def _limit_cpu(cpu_s: int) -> None:
    """The limit counts from the process's start, so it moves along with every request."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(usage.ru_utime + usage.ru_stime) + 1 + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _set_limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _address_space_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 30  # no procfs: more than the interpreter and its modules take
