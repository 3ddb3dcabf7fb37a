"""The line on stdout by which a server says that it is ready, where, and how to try it: written by `run.py`, read back by `cli/chat.py`."""

import json
import socket
import sys
from collections.abc import Mapping

_WORDS = "Paceline is ready on "
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not bound; an address one can connect to instead


def ready_line(listener: socket.socket, host: str, path: str, body: Mapping[str, object]) -> str:
    """One line that says where the server is and how to try it: by posting `body` to `path`."""
    host = _WILDCARDS.get(host, host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    data = json.dumps(body).replace("'", "'\\''")
    return f"{_WORDS}{url}  try: curl {url}{path} -H 'Content-Type: application/json' -d '{data}'"


def ready_url(line: str) -> str | None:
    """The server's address if this is its ready line."""
    return line.removeprefix(_WORDS).split()[0] if line.startswith(_WORDS) else None


def say(line: str) -> None:
    """Write a line to stdout at once: whoever waits for it may read a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
