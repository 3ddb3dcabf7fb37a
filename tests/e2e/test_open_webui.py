"""What Open WebUI asks of an OpenAI connection, in its order: models, an answer as a stream, its title, its tags, and a stop in between.

As its backend sends it in the 0.9 line (`routers/openai.py` and `routers/tasks.py`): a bearer key even where none is needed, usage with
every stream, titles and tags as answers in one piece whose prompts ask for JSON, a closed connection where the user presses stop. It puts
its own fields (metadata, chat ids, features) aside before it asks. The prompts are shorter than its own.
"""

import json
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.conftest import DEFAULT_MODEL, RunningServer

SETTINGS = {"temperature": 0}  # a user's, so that answers are the same each time
MAX_TOKENS = 32  # a model's; it limits titles under the newer name, everything else under the old one
HISTORY = """### Chat History:
<chat_history>
USER: What is the capital of France?
ASSISTANT: The capital of France is Paris.
</chat_history>"""
TITLE = f"""### Task:
Sum the chat up in a title of three to five words.
### Output:
JSON format: {{ "title": "the title" }}
### Examples:
- {{ "title": "Growing Tomatoes at Home" }}
{HISTORY}"""
TAGS = f"""### Task:
Name one to three broad themes of the chat.
### Output:
JSON format: {{ "tags": ["tag", "another tag"] }}
### Examples:
- {{ "tags": ["Gardening", "Vegetables"] }}
{HISTORY}"""


@pytest.fixture(scope="module")
def connection(real_server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer sk-any", "Content-Type": "application/json"}
    with httpx.Client(base_url=real_server.url + "/v1", headers=headers, timeout=60) as client:
        yield client


def test_the_connection_is_verified_by_its_models(connection: httpx.Client) -> None:
    answer = connection.get("/models")
    assert answer.status_code == 200
    assert [model["id"] for model in answer.json()["data"]] == [DEFAULT_MODEL]


def test_a_chat_then_its_title_and_tags(connection: httpx.Client) -> None:
    question = [{"role": "system", "content": "Answer in one sentence."}, {"role": "user", "content": "What is the capital of France?"}]
    body = {"model": DEFAULT_MODEL, "messages": question, "stream": True, "stream_options": {"include_usage": True}, **SETTINGS}
    with connection.stream("POST", "/chat/completions", content=json.dumps(body)) as answer:
        assert answer.status_code == 200
        assert "text/event-stream" in answer.headers["content-type"]  # how it tells streams
        lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "Paris" in "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 3
    for task, limit in ((TITLE, {"max_completion_tokens": MAX_TOKENS}), (TAGS, {"max_tokens": MAX_TOKENS})):
        body = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": task}], "stream": False, **limit, **SETTINGS}
        answer = connection.post("/chat/completions", content=json.dumps(body))
        assert answer.status_code == 200
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] in ("stop", "length")
        assert choice["message"]["content"].strip()
        assert 0 < answer.json()["usage"]["completion_tokens"] <= MAX_TOKENS


def test_a_stop_in_between_frees_the_server(connection: httpx.Client, real_server: RunningServer) -> None:
    ended = aborts(real_server)
    body = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Count from one to a thousand."}], "stream": True, **SETTINGS}
    with connection.stream("POST", "/chat/completions", content=json.dumps({**body, "ignore_eos": True})) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert real_server.metric("vllm:num_requests_waiting") == 0
    deadline_s = time.monotonic() + 10  # the engine reports its counters each 250 ms
    while aborts(real_server) == ended or real_server.metric("vllm:num_requests_running") > 0:
        assert time.monotonic() < deadline_s, "the answer went on without a reader"
        time.sleep(0.05)
    assert connection.get("/models").status_code == 200


def aborts(server: RunningServer) -> float:
    _, text = server.get("/metrics")
    samples = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{") and 'finished_reason="abort"' in line]
    return sum(float(sample.rsplit(" ", 1)[1]) for sample in samples)
