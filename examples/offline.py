"""The engine inside a script, without a server: a batch of prompts, with and without speculation.

    python examples/offline.py

The two runs give the same tokens; the speculative one needs fewer steps where the answer repeats its prompt.
"""

from paceline.config import EngineConfig
from paceline.core.request import SamplingParams
from paceline.llm import LLM

PROMPTS = (
    "The capital of France is",
    "one two three four five six one two three four five six one two three",
)

llm = LLM(EngineConfig(dtype="float32", draft="ngram", speculation="on"))
sampling = SamplingParams(max_tokens=24, temperature=0.0)

speculative = llm.generate(PROMPTS, sampling)
plain = llm.generate(PROMPTS, sampling, max_draft_length=0)

for prompt, fast, slow in zip(PROMPTS, speculative, plain, strict=True):
    assert fast.token_ids == slow.token_ids
    drafts = fast.stats.draft
    print(f"{prompt!r} ->{fast.text!r}")
    print(f"  {len(fast.token_ids)} tokens in {drafts.num_spec_steps + drafts.num_plain_steps} steps,", end=" ")
    print(f"plainly in {slow.stats.draft.num_plain_steps}")
