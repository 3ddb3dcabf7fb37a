"""Scrapes a local server's /metrics at irregular times and says how long each answer took. For `http_streams.py`, as a process of its own.

Reads "PORT SECONDS" from its input, writes the milliseconds of all scrapes to its output, as JSON. Two of each scrape: until this
process had the answer, and until the kernel had it (its time stamp of what is received). The difference is this process waiting for a
processor, which it has in common with the load; the second is the server's own.
"""

import json
import random
import re
import socket
import struct
import sys
import time

_MEAN_INTERVAL_S = 0.1
_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_TIMESTAMP_NS = 35  # SO_TIMESTAMPNS of Linux, which Python's socket module lacks; the messages have the same number
_TIMESPEC = struct.Struct("@ll")
_TIMEOUT_S = 10.0


def main() -> None:
    port, seconds = sys.stdin.readline().split()
    print(json.dumps(scrapes(int(port), float(seconds))))


def scrapes(port: int, seconds: float) -> list[tuple[float, float]]:
    """(until the answer is read, until the kernel has it) of each scrape, in ms."""
    intervals = random.Random(0)
    took_ms: list[tuple[float, float]] = []
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, _TIMESTAMP_NS, 1)
        end_s = time.monotonic() + seconds
        # Irregular, or they would always meet the same moment of the load's steps.
        while time.monotonic() + (pause_s := intervals.uniform(0.5, 1.5) * _MEAN_INTERVAL_S) < end_s:
            time.sleep(pause_s)
            took_ms.append(scrape(connection))
    return took_ms


def scrape(connection: socket.socket) -> tuple[float, float]:
    """One scrape's two times in ms. Raises SystemExit for anything but a whole answer."""
    sent_ns = time.time_ns()
    connection.sendall(_REQUEST)
    data = bytearray()
    received_ns = 0
    while not _is_whole(data):
        part, messages, _flags, _address = connection.recvmsg(1 << 20, socket.CMSG_SPACE(_TIMESPEC.size))
        if not part:
            raise SystemExit("the server closed the connection of the scrapes")
        data += part
        for level, kind, stamp in messages:
            if (level, kind) == (socket.SOL_SOCKET, _TIMESTAMP_NS):
                seconds, nanoseconds = _TIMESPEC.unpack(stamp)
                received_ns = seconds * 10**9 + nanoseconds
    read_ns = time.time_ns()
    if not data.startswith(b"HTTP/1.1 200") or not received_ns:
        raise SystemExit(f"/metrics answered {bytes(data[:100])!r}, or the kernel gave no time")
    return (read_ns - sent_ns) / 1e6, (received_ns - sent_ns) / 1e6


def _is_whole(data: bytearray) -> bool:
    head_end = data.find(b"\r\n\r\n")
    if head_end < 0:
        return False
    found = _LENGTH.search(data, 0, head_end + 2)
    if found is None:
        raise SystemExit("/metrics answered without a length")
    return len(data) >= head_end + 4 + int(found[1])


if __name__ == "__main__":
    main()
