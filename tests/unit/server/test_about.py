"""What a server says of its model: versions and hashes where they are known, and nothing in their place where they are not."""

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from paceline.config import EngineConfig
from paceline.server.about import model_facts
from paceline.weights.catalog import CATALOG
from paceline.weights.store import MANIFEST_FILE
from tests.fakes.fake_engine import FACTS

FILE = {"name": "config.json", "size_bytes": 1, "sha256": "0" * 64}
MANIFEST = json.dumps({"format": 1, "name": "m", "source": "s", "sha256": "abc", "files": [FILE]})


def test_a_model_of_the_cache_has_the_hash_of_its_file(tmp_path: Path) -> None:
    assert "model_sha256" not in model_facts(FACTS, EngineConfig(), tmp_path)
    (tmp_path / MANIFEST_FILE).write_text(MANIFEST)
    told = model_facts(FACTS, EngineConfig(), tmp_path)
    assert told["model_sha256"] == "abc"
    assert told["torch"] == version("torch")


def test_gpus_are_told_where_there_are_some(tmp_path: Path) -> None:
    assert model_facts(replace(FACTS, device="cuda"), EngineConfig(), tmp_path)["num_gpus"] == 1
    assert "num_gpus" not in model_facts(replace(FACTS, device="cpu"), EngineConfig(), tmp_path)


def test_only_a_drafter_with_weights_has_a_hash(tmp_path: Path) -> None:
    config = EngineConfig(draft=CATALOG[1].name)
    assert model_facts(replace(FACTS, drafter="draft_model"), config, tmp_path)["draft_sha256"] == CATALOG[1].sha256
    assert "draft_sha256" not in model_facts(replace(FACTS, drafter="ngram"), config, tmp_path)
    assert "draft_sha256" not in model_facts(replace(FACTS, drafter="draft_model"), EngineConfig(draft="my/folder"), tmp_path)
