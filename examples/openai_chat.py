"""Talk to a running server with the openai client: one answer at once, and one as it comes.

    make serve
    python examples/openai_chat.py

PACELINE_URL names another server; the client itself is `pip install openai`.
"""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("PACELINE_URL", "http://127.0.0.1:8000") + "/v1", api_key="not needed")
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name the capital of France."}],
    max_tokens=40,
    temperature=0,
)
print(answer.choices[0].message.content)
assert answer.usage is not None
print(f"[{answer.usage.completion_tokens} tokens]")

# What speculation did stands beside OpenAI's own fields.
extra = answer.model_extra or {}
print(f"[acceptance length {extra['metrics']['speculative_decoding']['mean_acceptance_length']:.2f}]\n")

# A request may cap its drafts; 0 decodes plainly. The tokens are the same either way.
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Repeat this list three times: red, green, blue, white, black."}],
    max_tokens=60,
    temperature=0,
    stream=True,
    extra_body={"max_draft_length": 5},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
