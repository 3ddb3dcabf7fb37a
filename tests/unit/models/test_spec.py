"""config.json -> ModelSpec: values, defaults, and a refusal by name of everything that would run wrongly."""

import math

import pytest

from paceline.errors import BadInputError, UnsupportedModelError
from paceline.models.spec import architecture_of, read_spec, tensor_shapes

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama_with_the_old_and_the_new_spelling_of_rope() -> None:
    old = read_spec(LLAMA | {"rope_scaling": SCALING})
    assert (old.architecture, old.num_layers, old.head_dim, old.num_kv_heads, old.tie_word_embeddings) == ("llama", 16, 64, 8, True)
    assert (old.rope_theta, old.rope_scaling) == (500000.0, (32.0, 1.0, 4.0, 8192))
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"} | {"rope_parameters": SCALING | {"rope_theta": 500000.0}}
    assert read_spec(new) == old


def test_defaults() -> None:
    left_out = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "hidden_act")
    spec = read_spec({key: value for key, value in LLAMA.items() if key not in left_out})
    assert (spec.num_kv_heads, spec.rms_norm_eps, spec.rope_theta, spec.rope_scaling) == (32, 1e-6, 10000.0, None)
    assert not spec.tie_word_embeddings
    assert read_spec(LLAMA | {"head_dim": None}).head_dim == 64
    assert read_spec(LLAMA | {"head_dim": 128}).head_dim == 128
    assert read_spec(LLAMA | {"rope_scaling": {"type": "default"}}).rope_scaling is None


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, "64", True, 10**12, [64]])
def test_sizes_are_checked(key: str, value: object) -> None:
    with pytest.raises(BadInputError, match=f"{key} must be a whole number from 1 to"):
        read_spec(LLAMA | {key: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_key_value_heads": 5}, "32 attention heads are not a multiple of 5"),
        ({"num_key_value_heads": 64}, "num_key_value_heads must be a whole number from 1 to 32"),
        ({"hidden_size": 2049}, "2049 is not a multiple of 32"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number above 0"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"rope_scaling": "llama3"}, "rope_scaling must be an object"),
        ({"rope_scaling": SCALING | {"factor": None}}, "factor must be a number"),
        ({"rope_scaling": SCALING | {"low_freq_factor": 4.0}}, "must be above low_freq_factor"),
        ({"architectures": None, "model_type": None}, "names neither"),
    ],
)
def test_bad_values(change: dict[str, object], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        read_spec(LLAMA | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"rope_parameters": {"full_attention": SCALING, "sliding_attention": {"rope_type": "default"}}}, "different layers"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts 8"),
        ({"num_experts": 128}, "mixture of experts"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding window of 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ],
)
def test_features_that_are_not_run(change: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_spec(LLAMA | change)


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28},
        {"sliding_window": None, "layer_types": ["full_attention"] * 16},
        {"partial_rotary_factor": 1.0, "attention_bias": False, "quantization_config": None, "num_experts": 0},
        {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}},
    ],
)
def test_features_that_are_off_change_nothing(change: dict[str, object]) -> None:
    assert read_spec(LLAMA | change) == read_spec(LLAMA)


def test_architecture_of() -> None:
    assert architecture_of({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}) == "qwen3"
    assert architecture_of({"architectures": ["MistralForCausalLM"]}) == "mistral"
    assert architecture_of({"model_type": "gemma3"}) == "gemma3"


def test_tensor_shapes_follow_the_grouped_heads() -> None:
    shapes = tensor_shapes(read_spec(LLAMA))
    assert shapes["model.layers.15.self_attn.k_proj.weight"] == (512, 2048)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (2048, 2048)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (2048, 8192)
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (64,)
    assert "model.layers.16.mlp.down_proj.weight" not in shapes
