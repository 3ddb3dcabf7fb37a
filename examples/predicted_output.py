"""Edit a text with its old version as the predicted output: what stays as it was comes several tokens at a time.

    make serve
    python examples/predicted_output.py

PACELINE_URL names another server; the client itself is `pip install openai`.
"""

import os

from openai import OpenAI

LETTER = """Dear Anna,
thank you for the parcel that you sent on Monday. The books arrived in good order, and the children read them every evening.
We would like to see you in Oslo again this summer.
Yours, Boris
"""

client = OpenAI(base_url=os.environ.get("PACELINE_URL", "http://127.0.0.1:8000") + "/v1", api_key="not needed")
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": f"Write this letter again, word for word, but to Clara:\n\n{LETTER}"}],
    prediction={"type": "content", "content": LETTER},
    max_tokens=100,
    temperature=0,
)
print(answer.choices[0].message.content)

assert answer.usage is not None
details = answer.usage.completion_tokens_details
assert details is not None
print(f"\n[{answer.usage.completion_tokens} tokens; of those predicted {details.accepted_prediction_tokens} stood,", end=" ")
print(f"{details.rejected_prediction_tokens} did not]")
