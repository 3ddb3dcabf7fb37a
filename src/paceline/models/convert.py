"""Turns a GGUF file into a Hugging Face folder: config.json, model.safetensors, tokenizer files, and the quantised blocks. Torch-free.

`weights/` calls it once per file and caches the folder. Block-quantised matrices become bfloat16 in model.safetensors, for whoever computes
in floats, and stand as they were in blocks.safetensors (`blocks.py` reads it); F16 and F32 matrices keep their type.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.program import ModelSpec
from paceline.core.progress import Progress
from paceline.errors import BadInputError, UnsupportedModelError
from paceline.models.folder import BLOCKS_FILE, WEIGHTS_FILE
from paceline.models.gguf import GgufFile, GgufMetadata, GgufTensor
from paceline.models.safetensors_file import SafetensorsWriter, StoredTensor
from paceline.models.spec import read_spec, tensor_shapes
from paceline.models.tokenizer_files import TokenizerFacts, write_tokenizer_files
from paceline.quant.blocks import is_block_kind

CONVERSION_FORMAT = 2  # part of the cache's folder names; raise it when the same GGUF file must be converted again

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQUENCY_FACTORS = "rope_freqs.weight"  # how llama 3.1 and later store their rope scaling
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_POSITIONS = 1.0, 4.0, 8192
_TIED_DISTANCE = 0.2  # two quantisations of one matrix differ by 0.01 to 0.1 of its norm, two matrices by more than 1


@dataclass(frozen=True, slots=True)
class _Source:
    """One tensor to write: its name in the folder, where it comes from, and the rows' new order (None: as stored)."""

    name: str
    tensor: GgufTensor
    order: NDArray[np.intp] | None


def convert_gguf(path: Path, folder: Path, progress: Progress) -> None:
    """Write into the existing, empty `folder` what transformers and Paceline load; progress counts the tensor bytes read.

    Errors: UnsupportedModelError (architecture, rope scaling, block format, tokenizer), BadInputError (damaged file).
    """
    with GgufFile(path) as file:
        config = _model_config(file)
        sources, tied = _plan_tensors(file, config)
        config["tie_word_embeddings"] = tied
        _check_tensors(path, sources, read_spec(config))
        facts = write_tokenizer_files(file.metadata, folder, _int(config, "max_position_embeddings"))
        _check_vocabulary(path, facts, _int(config, "vocab_size"))
        config["eos_token_id"] = list(facts.eos_token_ids)
        if facts.bos_token_id is not None:
            config["bos_token_id"] = facts.bos_token_id
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _write_tensors(file, sources, folder, progress)


def converted_size_bytes(path: Path) -> int:
    """Bytes of the weights that `convert_gguf` would write, at most; reads the file's header only."""
    with GgufFile(path) as file:
        floats = sum(StoredTensor(tensor.name, _dtype(tensor), tensor.shape).num_bytes for tensor in file.tensors.values())
        return floats + sum(tensor.num_bytes for tensor in file.tensors.values() if is_block_kind(tensor.kind.name))


def _model_config(file: GgufFile) -> dict[str, object]:
    metadata = file.metadata
    architecture = metadata.text("general.architecture")
    if architecture not in _CLASSES:
        raise UnsupportedModelError(
            f"{file.path} holds a {architecture!r} model; supported architectures are {', '.join(sorted(_CLASSES))}"
        )
    if (metadata.find_int("split.count") or 1) > 1:
        raise UnsupportedModelError(f"{file.path} is one part of a split model; join the parts with llama-gguf-split --merge first")
    if metadata.find_int(f"{architecture}.expert_count"):
        raise UnsupportedModelError(f"{file.path} is a mixture of experts, which is not supported")
    if metadata.find_int(f"{architecture}.attention.sliding_window"):
        raise UnsupportedModelError(f"{file.path} uses sliding-window attention, which is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise BadInputError(f"{file.path} has no embedding matrix token_embd.weight; it is not a complete language model")
    hidden_size, num_heads = metadata.int(f"{architecture}.embedding_length"), metadata.int(f"{architecture}.attention.head_count")
    if num_heads < 1 or hidden_size < 1:
        raise BadInputError(f"{file.path}: {num_heads} attention heads over a hidden size of {hidden_size} make no model")
    config: dict[str, object] = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "torch_dtype": _main_dtype(file),
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": metadata.int(f"{architecture}.feed_forward_length"),
        "num_hidden_layers": metadata.int(f"{architecture}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.find_int(f"{architecture}.attention.head_count_kv") or num_heads,
        "head_dim": _head_dim(metadata, architecture, hidden_size // num_heads),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": metadata.int(f"{architecture}.context_length"),
        "rms_norm_eps": _rounded(metadata.find_float(f"{architecture}.attention.layer_norm_rms_epsilon") or 1e-6),
        "rope_theta": _rounded(metadata.find_float(f"{architecture}.rope.freq_base") or 10000.0),
    }
    read_spec(config)  # refuses absurd sizes before anything is computed from them
    scaling = _rope_scaling(file, architecture, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _rounded(stored: float) -> float:
    """The shortest decimal that is this float32: 9.999999747e-06 was written as 1e-05."""
    return float(str(np.float32(stored)))


def _head_dim(metadata: GgufMetadata, architecture: str, default: int) -> int:
    keys = (f"{architecture}.attention.key_length", f"{architecture}.attention.value_length", f"{architecture}.rope.dimension_count")
    key_length, value_length, rope_length = (metadata.find_int(key) for key in keys)
    head_dim = key_length or default
    if (value_length or head_dim) != head_dim or (rope_length or head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{metadata.path}: keys of {head_dim}, values of {value_length} and rope over {rope_length} dimensions; they must be equal"
        )
    return head_dim


def _rope_scaling(file: GgufFile, architecture: str, config: dict[str, object]) -> dict[str, object] | None:
    kind = file.metadata.find_text(f"{architecture}.rope.scaling.type")
    if kind not in (None, "none"):
        raise UnsupportedModelError(f"{file.path} uses rope scaling {kind!r}; only llama 3 scaling is supported")
    if _FREQUENCY_FACTORS not in file.tensors:
        return None
    stored = np.concatenate([rows.ravel() for rows in file.rows(_FREQUENCY_FACTORS)])
    factor = _rounded(float(stored.max()))
    head_dim, theta = _int(config, "head_dim"), config["rope_theta"]
    assert isinstance(theta, float)
    expected = llama3_frequency_factors(head_dim, theta, factor)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise UnsupportedModelError(f"{file.path}: its rope frequency factors are not those of llama 3 (factor {factor:g})")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_POSITIONS,
    }


def llama3_frequency_factors(head_dim: int, theta: float, factor: float) -> NDArray[np.float64]:
    """What llama 3 divides each rope frequency by, [head_dim / 2] (llama-models `apply_scaling`, with its fixed constants)."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (_LLAMA3_POSITIONS / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(smooth <= 0, factor, np.where(smooth >= 1, 1.0, between))


def _plan_tensors(file: GgufFile, config: dict[str, object]) -> tuple[list[_Source], bool]:
    """What to write, in order, and whether the head is the embedding."""
    embedding, head = file.tensors["token_embd.weight"], file.tensors.get("output.weight")
    tied = head is None or _same_matrix(file, embedding, head)
    finer = max((tensor for tensor in (embedding, head) if tensor is not None), key=lambda tensor: tensor.bits_per_weight)
    sources: list[_Source] = []
    for tensor in file.tensors.values():
        if tensor.name == _FREQUENCY_FACTORS or (tied and tensor is head):
            continue
        name = _folder_name(file.path, tensor.name)
        # Quantised files may hold the one matrix of a tied model twice; the head's copy is usually the better one.
        stored = finer if tied and tensor is embedding else tensor
        sources.append(_Source(name, stored, _unpermuted_rows(tensor, config)))
    return sources, tied


def _check_tensors(path: Path, sources: list[_Source], spec: ModelSpec) -> None:
    """Refuse a file whose tensors are not exactly those of its architecture: one too many would be ignored and change the output."""
    expected = {name: shape for name, shape in tensor_shapes(spec).items() if _belongs(name, spec)}
    found = {source.name: source.tensor for source in sources}
    for name, tensor in found.items():
        if name not in expected:
            raise UnsupportedModelError(f"{path}: the tensor {tensor.name} has no place in a {spec.architecture} model of this build")
        if tensor.shape != expected[name]:
            raise BadInputError(f"{path}: {tensor.name} has shape {list(tensor.shape)}, its metadata asks for {list(expected[name])}")
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise BadInputError(f"{path} lacks {len(missing)} tensors, among them the one for {missing[0]}; it is not a complete model")


def _belongs(name: str, spec: ModelSpec) -> bool:
    if name.endswith(".bias"):
        return spec.architecture == "qwen2"
    if name.endswith((".q_norm.weight", ".k_norm.weight")):
        return spec.architecture == "qwen3"
    return name != "lm_head.weight" or not spec.tie_word_embeddings


def _same_matrix(file: GgufFile, first: GgufTensor, second: GgufTensor) -> bool:
    """Whether two quantised matrices come from one original, judged on the first chunk of rows."""
    if first.shape != second.shape:
        return False
    one, two = next(file.rows(first.name)), next(file.rows(second.name))
    return float(np.linalg.norm(one - two)) < _TIED_DISTANCE * float(np.linalg.norm(one))


def _folder_name(path: Path, name: str) -> str:
    stem, dot, kind = name.rpartition(".")
    if dot and kind in ("weight", "bias"):
        if stem in _OUTER_NAMES:
            return f"{_OUTER_NAMES[stem]}.{kind}"
        match stem.split("."):
            case ["blk", layer, part] if layer.isdecimal() and part in _LAYER_NAMES:
                return f"model.layers.{int(layer)}.{_LAYER_NAMES[part]}.{kind}"
            case _:
                pass
    raise UnsupportedModelError(f"{path}: this build has no place for the tensor {name!r}")


def _unpermuted_rows(tensor: GgufTensor, config: dict[str, object]) -> NDArray[np.intp] | None:
    """llama.cpp stores llama's q and k rows with the two halves of each rope pair interleaved; the order that undoes it."""
    part = tensor.name.split(".")[-2]
    if config["model_type"] != "llama" or part not in ("attn_q", "attn_k"):
        return None
    num_heads = _int(config, "num_attention_heads" if part == "attn_q" else "num_key_value_heads")
    head_dim = _int(config, "head_dim")
    num_rows = tensor.shape[0]
    if num_rows != num_heads * head_dim or head_dim % 2:
        raise BadInputError(f"tensor {tensor.name} has {num_rows} rows, {num_heads} heads of {head_dim} need {num_heads * head_dim}")
    return np.arange(num_rows).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _main_dtype(file: GgufFile) -> str:
    stored = {_dtype(tensor) for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[stored.pop()] if len(stored) == 1 else "bfloat16"


def _dtype(tensor: GgufTensor) -> str:
    return tensor.kind.name if tensor.kind.name in ("F32", "F16") else "BF16"


def _write_tensors(file: GgufFile, sources: list[_Source], folder: Path, progress: Progress) -> None:
    total = sum(source.tensor.num_bytes for source in sources)
    done = 0
    announced = [StoredTensor(source.name, _dtype(source.tensor), source.tensor.shape) for source in sources]
    quantised = [source for source in sources if is_block_kind(source.tensor.kind.name)]
    with ExitStack() as files:
        writer = files.enter_context(SafetensorsWriter(folder / WEIGHTS_FILE, announced))
        blocks = files.enter_context(_blocks_writer(folder, quantised)) if quantised else None
        for source, stored in zip(sources, announced, strict=True):
            writer.write(source.name, _encoded(file.rows(source.tensor.name, source.order), stored.dtype))
            if blocks is not None and is_block_kind(source.tensor.kind.name):
                packed = file.packed_rows(source.tensor.name, source.order)
                blocks.write(source.name, (np.ascontiguousarray(chunk).data.cast("B") for chunk in packed))
            done += source.tensor.num_bytes
            progress.update("convert", done, total)


def _blocks_writer(folder: Path, sources: list[_Source]) -> SafetensorsWriter:
    """A file of `[rows, bytes]` U8 tensors, ggml's type of each in the metadata."""
    tensors = [source.tensor for source in sources]
    announced = [
        StoredTensor(source.name, "U8", (tensor.num_rows, tensor.num_bytes // tensor.num_rows))
        for source, tensor in zip(sources, tensors, strict=True)
    ]
    return SafetensorsWriter(folder / BLOCKS_FILE, announced, {source.name: source.tensor.kind.name for source in sources})


def _encoded(rows: Iterable[NDArray[np.float32]], dtype: str) -> Iterator[memoryview]:
    for chunk in rows:
        stored = to_bfloat16(chunk) if dtype == "BF16" else chunk.astype("<f2" if dtype == "F16" else "<f4")
        yield np.ascontiguousarray(stored).data.cast("B")


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of finite float32 values rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")


def _check_vocabulary(path: Path, facts: TokenizerFacts, vocab_size: int) -> None:
    if facts.num_tokens > vocab_size:
        raise BadInputError(f"{path}: the vocabulary has {facts.num_tokens} tokens, the embedding only {vocab_size} rows")


def _int(config: dict[str, object], key: str) -> int:
    value = config[key]
    assert isinstance(value, int)
    return value
