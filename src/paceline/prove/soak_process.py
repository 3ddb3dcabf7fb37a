"""Memory and open files of a server on this machine, with its children, from /proc. Called by `soak.py`; None where it cannot be known."""

import ipaddress
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_PROC = Path("/proc")
_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Sums over a process and all its descendants."""

    rss_mib: float
    num_fds: int
    num_processes: int


def process_use(pid: int) -> ProcessUse | None:
    """What `pid` and its descendants hold now; None if it is gone or may not be looked at."""
    rss_bytes = num_fds = num_processes = 0
    for each in _family(pid):
        try:
            rss_pages = int((_PROC / str(each) / "statm").read_text().split()[1])
            fds = len(os.listdir(_PROC / str(each) / "fd"))
        except (OSError, IndexError, ValueError):
            if each == pid:
                return None
            continue  # a child that has just ended
        rss_bytes += rss_pages * os.sysconf("SC_PAGE_SIZE")
        num_fds += fds
        num_processes += 1
    return ProcessUse(rss_bytes / 2**20, num_fds, num_processes) if num_processes else None


def listening_pid(url: str) -> int | None:
    """The process that listens on the port of a URL of this machine; None if it is not here or cannot be seen."""
    parts = urlsplit(url)
    if not _is_here(parts.hostname or ""):
        return None
    inodes = set(_listening_inodes(parts.port or (443 if parts.scheme == "https" else 80)))
    if not inodes:
        return None
    holders = sorted(pid for pid in _pids() if _holds(pid, inodes))
    # A child that inherited the socket is younger; ids mostly rise.
    return holders[0] if holders else None


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == socket.gethostname()


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                yield f"socket:[{fields[9]}]"


def _holds(pid: int, inodes: set[str]) -> bool:
    folder = _PROC / str(pid) / "fd"
    try:
        return any(os.readlink(folder / name) in inodes for name in os.listdir(folder))
    except OSError:
        return False


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_PROC) if name.isdecimal()]
    except OSError:
        return []


def _family(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for each in _pids():
        try:
            # The name may hold anything, brackets too; what follows its last one are numbers.
            parent = int((_PROC / str(each) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(each)
    family = [pid]
    for each in family:  # grows while it is walked
        family += children.get(each, [])
    return family
