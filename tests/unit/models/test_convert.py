"""GGUF -> folder: the tensors, shape and tokens that went into llama.cpp's file come out again."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from tokenizers import Tokenizer

from paceline.core.progress import SilentProgress
from paceline.errors import BadInputError, UnsupportedModelError
from paceline.models.convert import convert_gguf, converted_size_bytes, llama3_frequency_factors, to_bfloat16
from paceline.models.folder import read_chat_format, read_config, read_eos_token_ids
from paceline.models.spec import read_spec
from tests.fakes.tiny_gguf import Tensors, make_tiny_gguf
from tests.fakes.tiny_models import LLAMA3_ROPE_SCALING

HARD_TEXT = "the  quick\n\tbrown 123 caf\u00e9 \u4f60\u597d \U0001f916<|im_start|>user\nhi<|im_end|> \u00df"


def convert(gguf: Path) -> Path:
    folder = gguf.with_suffix(".folder")
    folder.mkdir()
    convert_gguf(gguf, folder, SilentProgress())
    return folder


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tensors_shape_and_tokens_survive(gguf: Path, architecture: str) -> None:
    source = make_tiny_gguf(gguf, architecture)
    folder = convert(gguf)
    expected, found = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert read_spec(read_config(folder)) == read_spec(read_config(source))
    one, two = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (source, folder))
    assert two.encode(HARD_TEXT).ids == one.encode(HARD_TEXT).ids
    assert two.decode(two.encode(HARD_TEXT).ids, skip_special_tokens=False) == HARD_TEXT
    assert read_eos_token_ids(folder) == (2, 0)  # the turn's end, and the document's
    chat, original = read_chat_format(folder), read_chat_format(source)
    assert chat is not None and original is not None
    assert chat.template == original.template


def test_llamas_rows_are_stored_permuted(gguf: Path) -> None:
    """Otherwise the test above could not see a forgotten un-permutation."""
    source = make_tiny_gguf(gguf, "llama")
    query = load_file(source / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert query.numpy().tobytes() not in gguf.read_bytes()
    assert load_file(source / "model.safetensors")["model.layers.0.self_attn.v_proj.weight"].numpy().tobytes() in gguf.read_bytes()


def test_llama3_scaling_is_recovered_from_the_frequency_factors(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.convert._LLAMA3_POSITIONS", LLAMA3_ROPE_SCALING["original_max_position_embeddings"])
    source = make_tiny_gguf(gguf, "llama3")
    assert read_spec(read_config(convert(gguf))) == read_spec(read_config(source))


def test_llama3_factors_agree_with_transformers() -> None:
    from transformers import LlamaConfig
    from transformers import modeling_rope_utils as rope

    scaling = LLAMA3_ROPE_SCALING | {"original_max_position_embeddings": 8192, "factor": 32.0, "rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=2048, num_attention_heads=32, max_position_embeddings=131072, rope_parameters=scaling)
    scaled, _ = rope.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(plain / llama3_frequency_factors(64, 500000.0, 32.0), scaled.numpy(), rtol=1e-5)


@pytest.mark.parametrize(("kind", "dtype"), [("Q8_0", torch.bfloat16), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_quantised_matrices(gguf: Path, kind: str, dtype: torch.dtype) -> None:
    source = make_tiny_gguf(gguf, "llama", GGMLQuantizationType[kind])
    found = load_file(convert(gguf) / "model.safetensors")
    for name, tensor in load_file(source / "model.safetensors").items():
        assert found[name].dtype == (dtype if tensor.ndim > 1 else torch.float32)
        distance = (found[name].float() - tensor).norm() / tensor.norm()
        assert distance < 0.012, name  # Q8_0: 0.5 of 127 steps, then bfloat16's 8 bits


@pytest.mark.parametrize(("embedding_kind", "head_kind"), [("Q4_0", "Q8_0"), ("Q8_0", "Q4_0")])
def test_of_a_matrix_held_twice_the_finer_copy_is_kept(gguf: Path, embedding_kind: str, head_kind: str) -> None:
    def with_head(tensors: Tensors) -> Tensors:
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}

    source = make_tiny_gguf(gguf, "llama", GGMLQuantizationType[embedding_kind], edit=with_head, head_kind=GGMLQuantizationType[head_kind])
    folder = convert(gguf)
    found = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in found
    assert read_spec(read_config(folder)).tie_word_embeddings
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    distance = (found["model.embed_tokens.weight"].float() - embedding).norm() / embedding.norm()
    assert distance < 0.012  # that of Q8_0; Q4_0's is 0.08


def test_a_head_of_its_own_stays(gguf: Path) -> None:
    make_tiny_gguf(gguf, "qwen2", GGMLQuantizationType.Q8_0)
    folder = convert(gguf)
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    assert not read_spec(read_config(folder)).tie_word_embeddings


@pytest.mark.parametrize(
    ("architecture", "change", "words"),
    [
        ("llama", lambda w: w.add_uint32("llama.expert_count", 8), "mixture of experts"),
        ("llama", lambda w: w.add_uint16("split.count", 3), "llama-gguf-split"),
        ("qwen2", lambda w: w.add_uint32("qwen2.attention.sliding_window", 4096), "sliding-window"),
        ("llama", lambda w: w.add_string("llama.rope.scaling.type", "yarn"), "'yarn'"),
        ("llama", lambda w: w.add_uint32("llama.rope.dimension_count", 8), "rope over 8 dimensions"),
        ("llama", lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32)), "attn_sinks"),
        ("llama", lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32)), "attn_q.bias has no place in a llama model"),
        ("qwen2", lambda w: w.add_tensor("blk.0.attn_q_norm.weight", np.ones(16, np.float32)), "no place in a qwen2 model"),
        ("llama", lambda w: w.add_tensor("blk.2.attn_norm.weight", np.ones(64, np.float32)), "blk.2.attn_norm.weight has no place"),
        ("llama", lambda w: w.add_tensor("rope_freqs.weight", np.array([1, 2, 3, 4, 5, 6, 7, 8], np.float32)), "factor 8"),
        ("llama", lambda w: w.add_tensor("output.weight", np.ones((320, 64), np.int32)), "I32"),
    ],
)
def test_refusals_name_the_feature(gguf: Path, architecture: str, change, words: str) -> None:
    make_tiny_gguf(gguf, architecture, change=change)
    with pytest.raises(UnsupportedModelError, match=words):
        convert(gguf)


def test_an_unknown_architecture_is_told_what_is_supported(gguf: Path) -> None:
    writer = GGUFWriter(gguf, "mamba")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*llama, qwen2, qwen3"):
        convert(gguf)


@pytest.mark.parametrize(
    ("lost", "changed", "words"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"lacks 1 tensors, among them the one for model\.layers\.1\.mlp\.up_proj\.weight"),
        ("model.embed_tokens.weight", None, "no embedding matrix"),
        ("", "model.layers.1.mlp.up_proj.weight", r"blk\.1\.ffn_up\.weight has shape \[64, 64\], its metadata asks for \[128, 64\]"),
    ],
)
def test_tensors_that_do_not_fit_the_metadata(gguf: Path, lost: str, changed: str | None, words: str) -> None:
    def edit(tensors: Tensors) -> Tensors:
        kept = {name: tensor for name, tensor in tensors.items() if name != lost}
        return kept if changed is None else kept | {changed: np.ones((64, 64), np.float32)}

    make_tiny_gguf(gguf, "llama", edit=edit)
    with pytest.raises(BadInputError, match=words):
        convert(gguf)


@pytest.mark.parametrize("heads", [0, 2**31, -1])
def test_absurd_sizes_are_refused_before_they_are_used(gguf: Path, heads: int) -> None:
    make_tiny_gguf(gguf, "llama3", change=lambda writer: writer.add_int64("llama.attention.head_count", heads))
    with pytest.raises(BadInputError, match="heads"):
        convert(gguf)


def test_values_that_are_not_finite_are_damage(gguf: Path) -> None:
    def spoil(tensors: Tensors) -> Tensors:
        tensors["model.norm.weight"][3] = np.nan
        return tensors

    make_tiny_gguf(gguf, "llama", edit=spoil)
    with pytest.raises(BadInputError, match=r"output_norm.*not finite"):
        convert(gguf)


def test_bfloat16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (np.arange(0, 2000, dtype=np.uint32) << 16) + 0x3F800000 + 0x8000
    values = np.concatenate([bits, ties, [0, 0x80000000, 1, 0x7F7FFFFF]]).astype(np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bfloat16(values), expected)


def test_memory_is_bounded_by_a_chunk_not_by_a_tensor(gguf: Path) -> None:
    writer = GGUFWriter(gguf, "llama")
    rows, width = 16_384, 2048
    writer.add_tensor("token_embd.weight", np.zeros((rows, width // 32 * 34), np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from paceline.models.gguf import GgufFile

    tracemalloc.start()
    with GgufFile(gguf) as file:
        num_rows = sum(len(chunk) for chunk in file.rows("token_embd.weight"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_rows == rows
    assert peak < rows * width * 4 / 1.5, f"{peak / 1e6:.0f} MB for a tensor of {rows * width * 4 / 1e6:.0f} MB"


def test_the_size_is_known_beforehand(gguf: Path) -> None:
    make_tiny_gguf(gguf, "qwen3", GGMLQuantizationType.Q8_0)
    folder = convert(gguf)
    size = sum((folder / name).stat().st_size for name in ("model.safetensors", "blocks.safetensors"))
    assert size - 16384 < converted_size_bytes(gguf) <= size
