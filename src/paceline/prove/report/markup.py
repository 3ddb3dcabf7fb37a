"""HTML by small functions that escape whatever is not markup already, so that no prompt or server can write into the page."""

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is HTML and needs no escaping. Only `tag`, `joined` and our own plots make it."""

    __slots__ = ()


Attribute = str | int | bool | None

_VOID = ("br", "meta")


def escaped(text: str) -> Markup:
    """Markup as it is, other text with its special characters escaped and what a page cannot show made visible."""
    return text if isinstance(text, Markup) else Markup(html.escape(visible(text)))


def visible(text: str) -> str:
    """Control characters as their symbols, and no lone surrogates: both would break the page or hide what stands there."""
    shown = "".join(chr(0x2400 + ord(char)) if ord(char) < 0x20 and char not in "\n\t" else char for char in text)
    return shown.encode("utf-8", "replace").decode("utf-8")


def tag(name: str, /, *children: str, **attributes: Attribute) -> Markup:
    """One element. `class_` is `class`, `_` in other names is `-`; an attribute of None or False is left out, True has no value."""
    shown: list[str] = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        shown.append(f" {label}" if value is True else f' {label}="{html.escape(visible(str(value)))}"')
    head = f"<{name}{''.join(shown)}>"
    return Markup(head if name in _VOID else f"{head}{joined(children)}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """The parts one after the other, each escaped."""
    return Markup("".join(escaped(part) for part in parts))
