"""Programs with random weights in memory, for tests below `models.loader`: any shape, no folder, no tokenizer."""

from dataclasses import replace
from importlib import import_module

import torch

from paceline.core.kv import KvPages
from paceline.core.program import ModelSpec, OpKind, Program
from paceline.core.progress import SilentProgress
from paceline.forward.forward import Forward
from paceline.forward.inputs import RowInput, build_batch
from paceline.forward.load import Forced, load_forward
from paceline.kernels.primitives.residual import extra_columns, widen
from paceline.kernels.primitives.table import Place, Prepared
from paceline.models.spec import tensor_shapes

NOTHING_FORCED = Forced()
CPU = torch.device("cpu")
F32 = Place(CPU, torch.float32)
BF16 = Place(CPU, torch.bfloat16)


def random_spec(
    num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16, hidden_size: int = 64, architecture: str = "llama"
) -> ModelSpec:
    return ModelSpec(
        architecture=architecture,
        num_layers=2,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size + 8,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=100,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=architecture == "llama",
    )


def native_spec(architecture: str = "llama") -> ModelSpec:
    """A shape that the native step runs."""
    return replace(random_spec(architecture=architecture), intermediate_size=160)


def random_program(spec: ModelSpec) -> Program:
    return Program(spec, vars(import_module(f"paceline.models.{spec.architecture}"))["ops"](spec))


def random_tensors(program: Program, seed: int = 0) -> dict[str, torch.Tensor]:
    """float32 tensors for every name of the program, scaled so that activations stay near 1."""
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(program.spec)
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted({name for op in program.ops for _, name in op.weights}):
        noise = torch.randn(shapes[name], generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.2 * noise
        else:
            tensors[name] = noise * (0.3 if noise.dim() == 1 else 1.5 / noise.shape[-1] ** 0.5)
    return tensors


def random_forward(spec: ModelSpec, dtype: torch.dtype = torch.float32, forced: Forced = NOTHING_FORCED, seed: int = 0) -> Forward:
    program = random_program(spec)
    return load_forward(program, random_tensors(program, seed), dtype, "load", SilentProgress(), forced=forced)


def run_rows(forward: Forward, kv: KvPages, *rows: RowInput) -> torch.Tensor:
    """The logits of one pass."""
    return forward.run(build_batch(rows, kv.page_size), kv).logits


def prepare_op(spec: ModelSpec, kind: OpKind, place: Place, seed: int = 0) -> Prepared:
    """The op of `kind` in layer 1 (or outside the layers) of a random program."""
    program = random_program(spec)
    op = next(op for op in program.ops if op.kind is kind and op.layer in (-1, 1))
    return import_module(f"paceline.kernels.{kind}").prepare(op, spec, random_tensors(program, seed), place)


def random_stream(spec: ModelSpec, num_tokens: int, seed: int = 0) -> torch.Tensor:
    """A residual stream with hidden states of unit variance."""
    hidden = torch.randn(num_tokens, spec.hidden_size, generator=torch.Generator().manual_seed(seed))
    return widen(hidden, extra_columns(spec.hidden_size, spec.rms_norm_eps))
