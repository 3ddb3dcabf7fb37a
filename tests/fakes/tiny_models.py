"""Tiny random Hugging Face folders: real files (config, safetensors, tokenizer with a chat template) of a model nobody trained.

Used by tests of every layer that reads a model folder. The same arguments give the same bytes; neither torch nor transformers is needed.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD = "<|endoftext|>"  # id 0
IM_START = "<|im_start|>"  # id 1
IM_END = "<|im_end|>"  # id 2: eos
SPECIAL_TOKENS = (PAD, IM_START, IM_END)
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_ROPE_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the dog sleeps in the sun",
    "one two three four five six seven eight nine ten one two three four five",
    "the capital of france is paris and the capital of italy is rome",
)


@dataclass(frozen=True, slots=True)
class TinySizes:
    """Shape of a tiny model; every field is a keyword of `make_tiny_model`."""

    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_position_embeddings: int = 512
    tie_word_embeddings: bool | None = None  # None: tied for llama, untied for the others


def make_tiny_model(path: str | Path, architecture: str = "llama", vocab_size: int = 320, seed: int = 0, **sizes: int) -> Path:
    """Write a folder that transformers and Paceline load alike, and return it.

    `architecture`: llama, llama3 (llama with llama-3 rope scaling), qwen2 (q, k, v biases) or qwen3 (qk-norm).
    Below 264 entries of vocabulary the tokenizer knows only the first letters of the alphabet.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    shape = replace(TinySizes(), **sizes)
    if shape.tie_word_embeddings is None:
        shape = replace(shape, tie_word_embeddings=architecture.startswith("llama"))
    _write_json(folder / "config.json", _config(architecture, vocab_size, shape))
    _write_json(folder / "generation_config.json", {"eos_token_id": [EOS_TOKEN_ID], "pad_token_id": 0})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(shape))
    _tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    save_file(_tensors(architecture, vocab_size, shape, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _config(architecture: str, vocab_size: int, shape: TinySizes) -> dict[str, object]:
    model_type, class_name = {
        "llama": ("llama", "LlamaForCausalLM"),
        "llama3": ("llama", "LlamaForCausalLM"),
        "qwen2": ("qwen2", "Qwen2ForCausalLM"),
        "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    }[architecture]
    config: dict[str, object] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
    }
    if architecture == "llama3":
        config["rope_scaling"] = dict(LLAMA3_ROPE_SCALING)
    return config


def _tokenizer_config(shape: TinySizes) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": PAD,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE with the three special tokens first; at most `vocab_size` entries (the embedding's remaining rows are padding)."""
    if vocab_size < len(SPECIAL_TOKENS) + 1:
        raise ValueError(f"vocab_size {vocab_size} leaves no room beside {len(SPECIAL_TOKENS)} special tokens")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(SPECIAL_TOKENS) + len(alphabet):
        letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + ["\u0120"]
        letters += [c for c in alphabet if c not in letters]
        vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *letters[: vocab_size - len(SPECIAL_TOKENS)]])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    else:
        tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.get_vocab_size() == 0:
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _tensors(architecture: str, vocab_size: int, shape: TinySizes, seed: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    hidden, q_size, kv_size = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def matrix(num_out: int, num_in: int, gain: float = 1.0) -> NDArray[np.float32]:
        return (rng.standard_normal((num_out, num_in)) * gain / num_in**0.5).astype(np.float32)

    def vector(size: int, mean: float, spread: float) -> NDArray[np.float32]:
        return (mean + spread * rng.standard_normal(size)).astype(np.float32)

    # The layers outweigh the embedding in the residual stream, so that a tied head does not just repeat its input.
    tensors = {"model.embed_tokens.weight": matrix(vocab_size, hidden, gain=2.0), "model.norm.weight": vector(hidden, 1.0, 0.1)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = vector(hidden, 1.0, 0.1)
        tensors[prefix + "post_attention_layernorm.weight"] = vector(hidden, 1.0, 0.1)
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(size, hidden)
            if architecture == "qwen2":
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = vector(size, 0.0, 0.3)
        if architecture == "qwen3":
            tensors[prefix + "self_attn.q_norm.weight"] = vector(shape.head_dim, 1.0, 0.2)
            tensors[prefix + "self_attn.k_norm.weight"] = vector(shape.head_dim, 1.0, 0.2)
        tensors[prefix + "self_attn.o_proj.weight"] = matrix(hidden, q_size, gain=2.0)
        tensors[prefix + "mlp.gate_proj.weight"] = matrix(shape.intermediate_size, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = matrix(shape.intermediate_size, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = matrix(hidden, shape.intermediate_size, gain=4.0)
    if not shape.tie_word_embeddings:
        tensors["lm_head.weight"] = matrix(vocab_size, hidden, gain=2.0)
    return tensors
