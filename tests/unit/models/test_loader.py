"""Folders to programs and tensors: one tensor at a time, checked against the config, and never any code of the folder."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.program import Op, OpKind, Program
from paceline.errors import BadInputError, UnsupportedModelError
from paceline.models.folder import read_config
from paceline.models.loader import MODELS, CheckpointTensors, load_program, load_weights
from paceline.models.spec import read_spec, tensor_shapes
from tests.fakes.tiny_models import make_tiny_model

ARCHITECTURES = ["llama", "llama3", "qwen2", "qwen3"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", "qwen2")


def program_of(folder: Path) -> Program:
    """Every tensor of the folder in one op, so that these tests do not hang on the architectures' own lists."""
    weights = tuple((name, name) for name in load_file(folder / "model.safetensors"))
    return Program(read_spec(read_config(folder)), (Op(OpKind.EMBED, -1, weights),))


def rewrite(folder: Path, **tensors: torch.Tensor | None) -> None:
    kept = load_file(folder / "model.safetensors") | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, folder / "model.safetensors")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_gives_a_program_whose_tensors_are_in_the_folder(tmp_path: Path, architecture: str) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture)
    program = load_program(folder)
    assert program.spec.architecture in MODELS
    stored = load_file(folder / "model.safetensors")
    used = {name for op in program.ops for _, name in op.weights}
    assert used == set(stored)
    with load_weights(folder, program, torch.float32) as tensors:
        assert all(torch.equal(tensors[name], tensor) for name, tensor in stored.items())


def test_shapes_of_the_family_are_those_of_real_checkpoints(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        folder = make_tiny_model(tmp_path / architecture, architecture)
        expected = tensor_shapes(read_spec(read_config(folder)))
        for name, tensor in load_file(folder / "model.safetensors").items():
            assert expected[name] == tuple(tensor.shape)


@pytest.mark.parametrize("change", [{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, {"model_type": "../../evil"}])
def test_an_unknown_architecture_is_told_what_is_supported(folder: Path, change: dict[str, object]) -> None:
    (folder / "config.json").write_text(json.dumps(read_config(folder) | change))
    with pytest.raises(UnsupportedModelError, match="supported architectures are llama, qwen2, qwen3"):
        load_program(folder)


def test_code_in_the_folder_is_never_imported(folder: Path) -> None:
    (folder / "modeling_evil.py").write_text(f"open({str(folder / 'canary')!r}, 'w')\n")
    config = read_config(folder) | {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    with load_weights(folder, load_program(folder), torch.float32) as tensors:
        list(tensors.values())
    assert not (folder / "canary").exists()
    assert "modeling_evil" not in sys.modules


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tensors_are_converted_when_asked_for(folder: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    stored = load_file(folder / "model.safetensors")[name].to(dtype)
    rewrite(folder, **{name.replace(".", "__"): stored})
    with load_weights(folder, program_of(folder), torch.float32) as tensors:
        assert torch.equal(tensors[name], stored.float())
    with CheckpointTensors(folder) as tensors:
        assert tensors[name].dtype == dtype
        assert tensors.shape(name) == (64, 64)
        assert "absent" not in tensors
        assert len(tensors) == len(list(tensors)) == 27


def test_nothing_is_kept(folder: Path) -> None:
    """Two reads give two tensors over the mapped file: packing one after the other holds one copy."""
    with CheckpointTensors(folder, torch.bfloat16) as tensors:
        one, two = tensors["lm_head.weight"], tensors["lm_head.weight"]
        assert one.data_ptr() != two.data_ptr()


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (None, r"lacks the tensor model\.norm\.weight"),
        (torch.ones(63), r"model\.norm\.weight has shape \[63\], config\.json asks for \[64\]"),
        (torch.ones(64, dtype=torch.int8), "is stored as I8, not one of F32, F16, BF16"),
        (torch.ones(64, dtype=torch.float64), "is stored as F64"),
    ],
)
def test_tensors_are_checked_against_the_config(folder: Path, tensor: torch.Tensor | None, words: str) -> None:
    program = program_of(folder)
    rewrite(folder, model__norm__weight=tensor)
    with pytest.raises(BadInputError, match=words):
        load_weights(folder, program, torch.float32)


def test_asking_for_an_absent_tensor_is_a_clear_error(folder: Path) -> None:
    with CheckpointTensors(folder) as tensors, pytest.raises(BadInputError, match="lacks the tensor nothing"):
        tensors["nothing"]


@pytest.mark.parametrize("keep", [0, 4, 500, -1])
def test_truncated_files(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadInputError, match="damaged or truncated"):
        CheckpointTensors(folder)


@pytest.mark.parametrize("header", [b"\xff" * 8, (10**15).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"[]"])
def test_malformed_headers(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(header + b"\0" * 64)
    with pytest.raises(BadInputError, match="damaged or truncated"):
        CheckpointTensors(folder)


@pytest.fixture
def sharded(folder: Path) -> Path:
    stored = load_file(folder / "model.safetensors")
    names = sorted(stored)
    weight_map: dict[str, str] = {}
    for i in range(2):
        part = names[i::2]
        save_file({name: stored[name] for name in part}, folder / f"model-{i + 1:05d}-of-00002.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i + 1:05d}-of-00002.safetensors")
    (folder / "model.safetensors").rename(folder.parent / "whole.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_shards(sharded: Path) -> None:
    whole = load_file(sharded.parent / "whole.safetensors")
    with load_weights(sharded, load_program(sharded), torch.float32) as tensors:
        assert set(tensors) == set(whole)
        assert all(torch.equal(tensors[name], tensor) for name, tensor in whole.items())


def test_an_index_that_lies(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    file = index["weight_map"]["model.norm.weight"]
    other = next(name for name in set(index["weight_map"].values()) if name != file)
    index["weight_map"]["model.norm.weight"] = other
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInputError, match=f"places model.norm.weight in {other}, which does not hold it"):
        CheckpointTensors(sharded)
