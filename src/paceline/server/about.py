"""What `GET /v1/models` tells of the model beyond OpenAI's fields: what decides about speed, weights and versions."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paceline import __version__
from paceline.config import EngineConfig
from paceline.core.facts import EngineFacts
from paceline.weights.catalog import CATALOG
from paceline.weights.store import read_manifest

_DRAFT_MODEL = "draft_model"  # a drafter with weights of its own


def model_facts(facts: EngineFacts, config: EngineConfig, folder: Path) -> dict[str, object]:
    """For who measures or compares. A hash is that of the file that a model was made from; a folder of the user's own has none."""
    told: dict[str, object] = {
        "version": __version__,
        "architecture": facts.architecture,
        "device": facts.device,
        "dtype": facts.dtype,
        "drafter": facts.drafter,
        "max_draft_length": facts.max_draft_length,
        "verification": config.verification,
        "enable_prefix_caching": config.enable_prefix_caching,
    }
    manifest = read_manifest(folder)
    draft_sha256 = next((model.sha256 for model in CATALOG if model.name == config.draft), None)
    known = {
        "torch": _torch_version(),
        "model_sha256": None if manifest is None else manifest.sha256,
        "draft_sha256": draft_sha256 if facts.drafter == _DRAFT_MODEL else None,
    }
    if facts.device.startswith("cuda"):
        told["num_gpus"] = 1  # a server computes on one device
    return told | {name: value for name, value in known.items() if value is not None}


def _torch_version() -> str | None:
    """As installed: the server itself never imports it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None
