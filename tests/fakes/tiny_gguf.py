"""Tiny GGUF files made by llama.cpp's own writer from the tiny Hugging Face folders, the way llama.cpp's converter makes them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

from paceline.models.convert import llama3_frequency_factors
from tests.fakes.tiny_models import make_tiny_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Tensors = dict[str, NDArray[np.float32]]


def make_tiny_gguf(
    path: Path,
    architecture: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    change: Callable[[GGUFWriter], None] | None = None,
    edit: Callable[[Tensors], Tensors] | None = None,
    head_kind: GGMLQuantizationType | None = None,
) -> Path:
    """Write `path` and, beside it, the folder `<path>.source` that it was made from; returns that folder.

    `kind` is the block format of the matrices and `head_kind` the head's, if another; `change` adds metadata; `edit` changes the
    tensors, named as in the folder.
    """
    folder = make_tiny_model(path.with_suffix(".source"), architecture)
    config = json.loads((folder / "config.json").read_text())
    name = config["model_type"]
    writer = GGUFWriter(path, name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    add_tokenizer(writer, folder)
    if change is not None:
        change(writer)
    tensors: Tensors = load_file(folder / "model.safetensors")
    for tensor_name, tensor in (edit(tensors) if edit else tensors).items():
        own_kind = head_kind or kind if tensor_name == "lm_head.weight" else kind
        _add_tensor(writer, _gguf_name(tensor_name), _permuted(tensor_name, tensor, config), own_kind)
    if architecture == "llama3":
        scaling = config["rope_scaling"]
        factors = llama3_frequency_factors(config["head_dim"], config["rope_theta"], scaling["factor"])
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def add_tokenizer(writer: GGUFWriter, folder: Path, pre: str = "gpt-2") -> None:
    """The folder's byte-level BPE tokenizer as metadata."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def _permuted(name: str, tensor: NDArray[np.float32], config: dict[str, object]) -> NDArray[np.float32]:
    """llama.cpp's `LlamaModel.permute`."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if config["model_type"] != "llama" or heads is None:
        return tensor
    return tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _add_tensor(writer: GGUFWriter, name: str, tensor: NDArray[np.float32], kind: GGMLQuantizationType) -> None:
    if tensor.ndim == 1 or kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    else:
        writer.add_tensor(name, quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
