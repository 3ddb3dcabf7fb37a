"""Which requests a server on a loopback address takes: those of this machine's programs, not those of web pages it has open.

A browser lets any page send requests to 127.0.0.1, and a page whose name was made to resolve to 127.0.0.1 can even read the answers.
The first names itself in `Origin`, the second in `Host`. And a page may only send JSON that it declares as such where it is asked first,
so a body must have its content type. Called by the edge and the routes.
"""

import re
from collections.abc import Iterable

from paceline.config import is_loopback
from paceline.errors import BadInputError

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]*)?")
_JSON = re.compile(r"application/([a-z0-9.+-]+\+)?json", re.IGNORECASE)
_MAX_SHOWN_CHARS = 100


def foreign_header(headers: Iterable[tuple[bytes, bytes]], allowed_hosts: frozenset[str]) -> str | None:
    """What to tell a request that does not come from this machine, by its headers; None for one that does, or that does not say.

    `allowed_hosts` are names, in lower case, that count as this machine's.
    """
    for name, value in headers:
        text = value.decode("latin-1")
        if name == b"host" and not _is_ours(text, allowed_hosts):
            return (
                f"the header Host names {text[:_MAX_SHOWN_CHARS]!r}, and this server listens on this machine only; "
                "ask for localhost, or start with --allowed-hosts and that name"
            )
        if name == b"origin" and not _is_ours(text.removeprefix("http://").removeprefix("https://"), allowed_hosts):
            return (
                f"the header Origin names {text[:_MAX_SHOWN_CHARS]!r}, and this server takes no requests of web pages from elsewhere; "
                "start with --allowed-hosts and its name if it may ask"
            )
    return None


def check_content_type(value: str | None) -> None:
    """Raise BadInputError unless a Content-Type header declares JSON."""
    if value is None or not _JSON.fullmatch(value.partition(";")[0].strip()):
        given = "none" if value is None else repr(value[:_MAX_SHOWN_CHARS])
        raise BadInputError(f"the content type is {given}; send JSON with the header Content-Type: application/json")


def _is_ours(host: str, allowed_hosts: frozenset[str]) -> bool:
    match = _HOST.fullmatch(host)
    return match is not None and (is_loopback(match[1].lower()) or match[1].lower() in allowed_hosts)
