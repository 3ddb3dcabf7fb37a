"""Sizes and places as people read them."""

from pathlib import Path


def size_text(num_bytes: float) -> str:
    """A size for people, in decimal units: 1500000 -> `1.5 MB`."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.{0 if unit == 'B' else 1}f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def shown(path: Path) -> str:
    """A path with the home folder as `~`."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except ValueError:
        return str(path)
