"""Reads a model's shape out of its config.json, strictly: what this build cannot run exactly is refused, by name. Torch-free.

`loader.py` calls it. Which architectures exist is the loader's table; nothing here depends on one of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import cast

from paceline.core.program import ModelSpec
from paceline.errors import BadInputError, UnsupportedModelError

_MAX_LAYERS = 1024
_MAX_WIDTH = 1 << 18
_MAX_VOCAB = 1 << 22
_MAX_POSITIONS = 1 << 27
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def architecture_of(config: Mapping[str, object]) -> str:
    """The name of the architecture, "llama" for a LlamaForCausalLM; known to this build or not.

    Errors: UnsupportedModelError for a class that is not a causal language model, BadInputError if the config names none.
    """
    classes = config.get("architectures")
    model_type = config.get("model_type")
    if isinstance(classes, list) and classes:
        name = str(cast(list[object], classes)[0])
        if not name.endswith("ForCausalLM"):
            raise UnsupportedModelError(f"config.json names the class {name}; only causal language models (…ForCausalLM) can be served")
        # Both must agree: a class of the folder's own may reuse a known type for another computation.
        architecture = name.removesuffix("ForCausalLM").lower()
        return architecture if model_type in (None, architecture) else f"{name} of the type {model_type}"
    if isinstance(model_type, str):
        return model_type
    raise BadInputError("config.json names neither architectures nor model_type, so nobody can know what the model is")


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Check every value that matters and give the model's shape; `auto_map` and other code hooks are never followed.

    Errors: BadInputError for a missing or absurd value, UnsupportedModelError naming a feature that this build does not run.
    """
    architecture = architecture_of(config)
    _refuse_features(config, architecture)
    fields = _Fields(config)
    hidden_size = fields.whole("hidden_size", _MAX_WIDTH)
    num_heads = fields.whole("num_attention_heads", 4096)
    num_kv_heads = fields.whole("num_key_value_heads", num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise BadInputError(f"config.json: {num_heads} attention heads are not a multiple of {num_kv_heads} key/value heads")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise BadInputError(f"config.json: hidden_size {hidden_size} is not a multiple of {num_heads} heads, and head_dim is not given")
    head_dim = fields.whole("head_dim", 1024, default=hidden_size // num_heads)
    if head_dim % 2:
        raise BadInputError(f"config.json: head_dim {head_dim} is odd; rope turns pairs of elements")
    rope = _read_rope(config)
    return ModelSpec(
        architecture=architecture,
        num_layers=fields.whole("num_hidden_layers", _MAX_LAYERS),
        hidden_size=hidden_size,
        intermediate_size=fields.whole("intermediate_size", _MAX_WIDTH),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.whole("vocab_size", _MAX_VOCAB),
        max_position_embeddings=fields.whole("max_position_embeddings", _MAX_POSITIONS),
        rms_norm_eps=fields.positive("rms_norm_eps", default=1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
    )


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape that each tensor name of the llama family must have in a checkpoint of this spec, optional ones included."""
    q_size, kv_size, hidden = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (spec.vocab_size, hidden),
    }
    layer_shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.q_proj.bias": (q_size,),
        "self_attn.k_proj.bias": (kv_size,),
        "self_attn.v_proj.bias": (kv_size,),
        "self_attn.q_norm.weight": (spec.head_dim,),
        "self_attn.k_norm.weight": (spec.head_dim,),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_proj.weight": (spec.intermediate_size, hidden),
        "mlp.up_proj.weight": (spec.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, spec.intermediate_size),
    }
    for layer in range(spec.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    return shapes


@dataclass(frozen=True, slots=True)
class _Rope:
    theta: float
    scaling: tuple[float, float, float, int] | None


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed reads from a JSON object. null counts as absent."""

    values: Mapping[str, object]

    def whole(self, key: str, high: int, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= high:
            return value
        raise BadInputError(f"config.json: {key} must be a whole number from 1 to {high}, not {value!r}")

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0:
            return float(value)
        raise BadInputError(f"config.json: {key} must be a number above 0, not {value!r}")

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool):
            return value
        raise BadInputError(f"config.json: {key} must be true or false, not {value!r}")


def _refuse_features(config: Mapping[str, object], architecture: str) -> None:
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            raise UnsupportedModelError(f"the checkpoint is quantised ({key}); use the float checkpoint or a .gguf file")
    for key in _EXPERT_KEYS:
        if config.get(key):
            raise UnsupportedModelError(f"the model is a mixture of experts ({key} {config[key]}), which is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"the model's activation is {config['hidden_act']!r}; only silu is supported")
    if config.get("attention_bias"):
        raise UnsupportedModelError(f"the {architecture} model has biases in its attention (attention_bias), which is not supported")
    if config.get("mlp_bias"):
        raise UnsupportedModelError(f"the {architecture} model has biases in its MLP (mlp_bias), which is not supported")
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError("the model is an encoder-decoder, which is not supported")
    _refuse_sliding_window(config)


def _refuse_sliding_window(config: Mapping[str, object]) -> None:
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        others = sorted({str(kind) for kind in cast(list[object], layer_types)} - {"full_attention"})
        if others:
            raise UnsupportedModelError(f"the model has layers of the types {', '.join(others)}; only full_attention is supported")
        return
    # Qwen configurations carry a window and a switch that is off by default; llama's have neither.
    if config.get("sliding_window") and config.get("use_sliding_window"):
        raise UnsupportedModelError(f"the model uses a sliding window of {config['sliding_window']} tokens, which is not supported")


def _read_rope(config: Mapping[str, object]) -> _Rope:
    """Newer configurations hold theta and scaling together in rope_parameters, older ones apart; both are in use."""
    merged: dict[str, object] = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if isinstance(value, dict):
            merged |= cast(dict[str, object], value)
        elif value is not None:
            raise BadInputError(f"config.json: {key} must be an object, not {value!r}")
    part = merged["partial_rotary_factor"]
    if part not in (None, 1, 1.0):
        raise UnsupportedModelError(f"rope over a part of the head (partial_rotary_factor {part}) is not supported")
    theta = _Fields(merged).positive("rope_theta", default=10000.0)
    kind = merged.get("rope_type", merged.get("type", "default"))
    if any(isinstance(value, dict) for value in merged.values()):
        raise UnsupportedModelError("the model has different rope parameters for different layers, which is not supported")
    if kind == "default":
        return _Rope(theta, None)
    if kind != "llama3":
        raise UnsupportedModelError(f"rope scaling of the type {kind!r} is not supported; supported are default and llama3")
    fields = _Fields(merged)
    factor, low, high = (fields.positive(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise BadInputError(f"config.json: rope scaling has high_freq_factor {high:g}, which must be above low_freq_factor {low:g}")
    return _Rope(theta, (factor, low, high, fields.whole("original_max_position_embeddings", _MAX_POSITIONS)))
