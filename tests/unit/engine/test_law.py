"""The law of what comes out of the whole engine, real models and real noise: thousands of requests against the exact law of the model.

The exact law is computed apart: transformers' logits for every prefix, and sampling options written out naively. Every option for
itself is in test_exact_law.py; here they are together.
"""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from paceline.config import EngineConfig
from paceline.core.progress import SilentProgress
from paceline.core.request import Request, SamplingParams
from paceline.engine.loop import EngineLoop
from paceline.executor.load import load_executor
from paceline.scheduler.scheduler import Scheduler, SchedulerConfig
from paceline.speculative import verify
from tests.fakes.slow_sampler import adjusted, slow_law
from tests.fakes.tiny_models import make_tiny_model

NUM_REQUESTS = 2_000
NUM_TOKENS = 3  # whose joint law is compared; one more is generated, so that the last of them may come from a draft of two
VOCAB_SIZE = 8
PROMPT = (4, 5, 6, 4, 5, 7, 4, 5)
P_VALUE = 1e-4

OPTIONS = {
    "temperature": SamplingParams(NUM_TOKENS + 1, temperature=0.8, ignore_eos=True),
    "cuts": SamplingParams(NUM_TOKENS + 1, temperature=1.2, top_k=6, top_p=0.9, min_p=0.05, ignore_eos=True),
    "adjusted": SamplingParams(
        NUM_TOKENS + 1,
        temperature=0.9,
        ignore_eos=True,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias=((2, 1.0), (6, -1.5)),
        banned_sequences=((3, 3), (1,)),
        stop_token_ids=(0,),
        min_tokens=NUM_TOKENS,
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("law")
    sizes = {"vocab_size": VOCAB_SIZE, "num_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    return make_tiny_model(root / "target", "llama", seed=3, **sizes), make_tiny_model(root / "draft", "llama", seed=4, **sizes)


@pytest.mark.parametrize(
    ("rule", "draft", "options"),
    [
        ("coupled", "ngram", "temperature"),
        ("coupled", "draft_model", "adjusted"),
        ("ratio", "ngram", "cuts"),
        ("ratio", "draft_model", "adjusted"),
    ],
)
def test_joint_law_of_three_tokens(folders: tuple[Path, Path], rule: str, draft: str, options: str) -> None:
    counts, acceptance = sample(folders, rule, draft, OPTIONS[options])
    assert p_value(counts, exact_law(folders[0], OPTIONS[options])) > P_VALUE
    assert 0.02 < acceptance < 0.98, "drafts were never or always accepted: the law was not put to a test"


def test_a_residual_that_forgets_q_is_caught(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: after a rejection the token is drawn from p instead of (p - q)+."""
    monkeypatch.setattr(verify, "residual", lambda p, q: p)
    counts, _ = sample(folders, "ratio", "draft_model", OPTIONS["temperature"])
    assert p_value(counts, exact_law(folders[0], OPTIONS["temperature"])) < P_VALUE


def sample(folders: tuple[Path, Path], rule: str, draft: str, sampling: SamplingParams) -> tuple[np.ndarray, float]:
    """How often each triple of first tokens came, `[V, V, V]`, and the acceptance rate of drafts."""
    target, draft_folder = folders
    config = EngineConfig(
        dtype="float32",
        draft=draft,
        speculation="on",
        max_draft_length=2,
        verification=rule,
        threads=1,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=64 << 20,
    )
    executor, facts = load_executor(
        replace(config, draft=str(draft_folder)) if draft == "draft_model" else config,
        str(target),
        str(draft_folder) if draft == "draft_model" else None,
        SilentProgress(),
    )
    loop = EngineLoop(Scheduler(SchedulerConfig.from_engine_config(config), facts), executor)
    outputs: dict[str, list[int]] = {}
    for index in range(NUM_REQUESTS):
        outputs[str(index)] = []
        loop.add(Request(str(index), PROMPT, replace(sampling, seed=0x9E3779B97F4A7C15 * (index + 1) % 2**64), 0.0))
    while loop.has_unfinished:
        for delta in loop.step():
            outputs[delta.request_id].extend(delta.token_ids)
    counts = np.zeros((VOCAB_SIZE,) * NUM_TOKENS)
    np.add.at(counts, tuple(np.array([tokens[:NUM_TOKENS] for tokens in outputs.values()]).T), 1)
    engine_stats = loop.stats()
    return counts, engine_stats.num_accepted_tokens / engine_stats.num_draft_tokens


def exact_law(folder: Path, sampling: SamplingParams) -> np.ndarray:
    """P(first three tokens) `[V, V, V]` by enumeration of all prefixes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    law = np.ones((VOCAB_SIZE,) * NUM_TOKENS)
    for depth in range(NUM_TOKENS):
        prefixes = list(itertools.product(range(VOCAB_SIZE), repeat=depth))
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT + prefix for prefix in prefixes])).logits[:, -1].double().numpy()
        for prefix, row in zip(prefixes, logits, strict=True):
            shape = (VOCAB_SIZE,) + (1,) * (NUM_TOKENS - depth - 1)
            allowed = adjusted(row.tolist(), PROMPT, prefix, sampling, sampling.stop_token_ids)
            law[prefix] *= np.array(slow_law(allowed, sampling)).reshape(shape)
    return law


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square test of counts against a law; what is expected less than 5 times goes into one bin, the impossible must not occur."""
    assert np.isclose(law.sum(), 1)
    if counts[law == 0].sum() > 0:
        return 0.0
    expected = law.ravel() * counts.sum()
    large = expected >= 5
    observed = np.append(counts.ravel()[large], counts.ravel()[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    keep = wanted > 0
    return float(stats.chisquare(observed[keep], wanted[keep]).pvalue)
