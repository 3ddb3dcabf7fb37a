"""Where this user's caches lie on disk. Torch-free."""

import os
from pathlib import Path


def cache_root() -> Path:
    """PACELINE_CACHE, or ~/.cache/paceline; it need not exist."""
    configured = os.environ.get("PACELINE_CACHE")
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".cache" / "paceline"
