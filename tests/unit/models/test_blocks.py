"""The quantised matrices that a conversion keeps: those of the file, in the folder's order of rows, and nothing that is damaged."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from paceline.core.program import Program
from paceline.core.progress import SilentProgress
from paceline.errors import BadInputError
from paceline.models.blocks import BlockTensors
from paceline.models.convert import convert_gguf
from paceline.models.folder import BLOCKS_FILE, stored_weight_files
from paceline.models.loader import CheckpointTensors, load_program
from paceline.quant.blocks import floats
from tests.fakes.tiny_gguf import make_tiny_gguf
from tests.fakes.tiny_models import make_tiny_model

QUERY = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


def converted(path: Path, architecture: str = "llama", kind: str = "Q4_0", head_kind: str | None = None) -> Path:
    make_tiny_gguf(
        path / "m.gguf", architecture, GGMLQuantizationType[kind], head_kind=GGMLQuantizationType[head_kind] if head_kind else None
    )
    (path / "folder").mkdir()
    convert_gguf(path / "m.gguf", path / "folder", SilentProgress())
    return path / "folder"


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_blocks_are_the_matrices_unrounded(tmp_path: Path, architecture: str) -> None:
    folder = converted(tmp_path, architecture, "Q4_0", "Q8_0" if architecture == "qwen3" else None)
    with BlockTensors(folder) as blocks, CheckpointTensors(folder) as tensors:
        blocks.check(load_program(folder))
        assert blocks.kinds.keys() == {name for name in tensors if tensors[name].dim() > 1}
        for name, kind in blocks.kinds.items():
            values = torch.from_numpy(floats(kind, blocks.rows(name)))
            assert torch.equal(values.to(torch.bfloat16), tensors[name]), name
            assert not torch.equal(values, tensors[name].float()), "kept for what bfloat16 lost"
    assert blocks.kinds.get("lm_head.weight") == ("Q8_0" if architecture == "qwen3" else None)
    assert stored_weight_files(folder) == ["config.json", "model.safetensors", BLOCKS_FILE]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_float_files_have_none(tmp_path: Path, kind: str) -> None:
    folder = converted(tmp_path, kind=kind)
    assert not (folder / BLOCKS_FILE).exists()
    with BlockTensors(folder) as blocks:
        blocks.check(load_program(folder))
        assert not blocks.kinds
    assert stored_weight_files(folder) == ["config.json", "model.safetensors"]


def program_of(tmp_path: Path) -> Program:
    return load_program(make_tiny_model(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("name", "shape", "kind", "message"),
    [
        (QUERY, (64, 36), "Q4_1", r"q_proj\.weight has \[64, 36\] elements of uint8, Q4_1 needs \[64, 40\]"),
        (QUERY, (63, 36), "Q4_0", r"needs \[64, 36\]"),
        (QUERY, (64, 36), "Q4_K", r"needs \[64, -1\]"),
        (QUERY, (64, 36), "F16", "of the type F16 is no quantised matrix"),
        (QUERY, (64, 36), "", "of the type unknown"),
        (NORM, (1, 36), "Q4_0", "is no quantised matrix"),
        ("model.layers.9.self_attn.q_proj.weight", (64, 36), "Q4_0", "is no quantised matrix of this model"),
    ],
)
def test_blocks_of_another_model_are_refused(tmp_path: Path, name: str, shape: tuple[int, int], kind: str, message: str) -> None:
    program = program_of(tmp_path)
    save_file({name: np.zeros(shape, np.uint8)}, tmp_path / BLOCKS_FILE, metadata={name: kind} if kind else None)
    with BlockTensors(tmp_path) as blocks, pytest.raises(BadInputError, match=f"{message}.*paceline models evict"):
        blocks.check(program)


def test_floats_where_bytes_should_be_are_refused(tmp_path: Path) -> None:
    program = program_of(tmp_path)
    save_file({QUERY: np.zeros((64, 36), np.float32)}, tmp_path / BLOCKS_FILE, metadata={QUERY: "Q4_0"})
    with BlockTensors(tmp_path) as blocks, pytest.raises(BadInputError, match="of float32"):
        blocks.check(program)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    folder = converted(tmp_path)
    data = (folder / BLOCKS_FILE).read_bytes()
    (folder / BLOCKS_FILE).write_bytes(data[:-10])
    with pytest.raises(BadInputError, match="is damaged"):
        BlockTensors(folder)


def test_llamas_rows_are_in_the_folders_order(tmp_path: Path) -> None:
    """Otherwise the first test could not see rows left as llama.cpp permutes them: all matrices would have to be alike."""
    folder = converted(tmp_path)
    with BlockTensors(folder) as blocks:
        query = blocks.rows(QUERY)
        assert query.tobytes() not in (tmp_path / "m.gguf").read_bytes()
        assert blocks.rows(QUERY.replace("q_proj", "v_proj")).tobytes() in (tmp_path / "m.gguf").read_bytes()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert QUERY in load_file(folder / BLOCKS_FILE)
