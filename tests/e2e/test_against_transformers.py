"""Greedy plain decoding of the default model equals transformers' on 20 real prompts, in float32.

Where the two differ, the first difference must sit at a near tie: a top-2 gap below 1e-4 in a teacher-forced pass.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import EngineConfig
from paceline.core.request import SamplingParams
from paceline.llm import LLM

PROMPTS = Path(__file__).parents[1] / "data" / "mt_bench_20.jsonl"
NUM_TOKENS = 24
NEAR_TIE = 1e-4

pytestmark = pytest.mark.system


def test_twenty_prompts() -> None:
    llm = LLM(EngineConfig(dtype="float32", draft="none"))
    prompts = [
        llm.encode(f"<|im_start|>user\n{json.loads(line)['prompt']}<|im_end|>\n<|im_start|>assistant\n")
        for line in PROMPTS.read_text(encoding="utf-8").splitlines()
    ]
    assert len(prompts) == 20
    outputs = llm.generate(prompts, SamplingParams(NUM_TOKENS, temperature=0, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(llm.folder, dtype=torch.float32).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        # One teacher-forced pass over our answer: every token must be the argmax that transformers sees there, or a near tie.
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output.token_ids).unsqueeze(1)).squeeze(1)
        gap = logits.amax(dim=-1) - chosen
        assert gap.max() < NEAR_TIE, f"token {int(gap.argmax())} of {prompt[:8]}... is not the arg-max, by {gap.max():g}"
