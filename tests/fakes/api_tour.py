"""schemathesis over the description of the interface of a running server: what a hostile client could send to every route it names.

The description of the routes leads, so a new route is visited without a line here. Every case is derived from it and a fixed seed.
"""

import json
import time
from collections import Counter
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import schemathesis
from schemathesis.checks import CheckContext
from schemathesis.config import SchemathesisConfig
from schemathesis.core.transport import Response
from schemathesis.engine import Status, events, from_schema
from schemathesis.generation.case import Case

ALIVE_WITHIN_S = 1.0
_MAX_BUILT_ITEMS = 300  # schemathesis builds lists of the largest size, and some of ours may have thousands; test_hostile.py has those
_READ_BY_OTHERS = ("/tokenize", "/v1/messages/count_tokens")  # what is in these bodies is read as in chat's and in messages'
_GOOD_COMPLETION = ("/v1/completions", b'{"prompt": "the fox", "max_tokens": 1}')
_GOOD_DRAFT = ("/draft", b'{"token_ids": [5], "max_draft_length": 1}')
_PHASES = ("examples", "coverage", "fuzzing")

# Some rules of a good body lie outside JSON schema: two fields that do not go together, a token id that the model lacks, the context.
_CHECKS = {
    "positive_data_acceptance": {"enabled": False},
    "negative_data_rejection": {"expected-statuses": ["400", "404", "405", "408", "413"]},
}


@dataclass(frozen=True, slots=True)
class Tour:
    """What came of it: statuses by route, and what was wrong, each with the request as a curl command."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict[str, Counter[int]])
    failures: list[str] = field(default_factory=list[str])

    @property
    def num_requests(self) -> int:
        return sum(counts.total() for counts in self.statuses.values())

    @property
    def never_answered(self) -> list[str]:
        """Routes that refused everything, which therefore were not tried at all."""
        return sorted(route for route, counts in self.statuses.items() if not counts[200])

    def add(self, event: events.ScenarioFinished) -> None:
        recorder = event.recorder
        for case_id, interaction in recorder.interactions.items():
            route = recorder.cases[case_id].value.operation.label
            if interaction.response is None:
                self.failures.append(f"{route}: no answer")
            else:
                self.statuses.setdefault(route, Counter())[interaction.response.status_code] += 1
            for check in recorder.checks.get(case_id, ()):
                if check.status is Status.FAILURE and check.failure_info is not None:
                    failure = check.failure_info.failure
                    what = f"{route}: {check.name}: {failure.title}: {failure.message[:600]}"
                    self.failures.append(f"{what}\n{check.failure_info.code_sample[:1500]}")


@schemathesis.check
def next_request_succeeds(ctx: CheckContext, response: Response, case: Case) -> None:
    """Whatever this request was, the next good one is answered at once."""
    path, body = _GOOD_DRAFT if "/draft" in case.operation.schema.raw_schema["paths"] else _GOOD_COMPLETION
    started_s = time.monotonic()
    connection = HTTPConnection(urlsplit(case.operation.base_url).netloc, timeout=10)
    with closing(connection):
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        told = answer.read()
    elapsed_s = time.monotonic() - started_s
    assert answer.status == 200, f"the next request got {answer.status}: {told[:200]!r}"
    assert elapsed_s < ALIVE_WITHIN_S, f"the next request took {elapsed_s:.2f} s"


@schemathesis.check
def stream_holds_no_error(ctx: CheckContext, response: Response, case: Case) -> None:
    """A stream has status 200 before it fails, so its failure is an event."""
    if response.status_code == 200 and response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        for line in response.content.split(b"\n"):
            data = line.removeprefix(b"data: ")
            if data != line and data != b"[DONE]":
                event = json.loads(data)
                assert not event.get("error") and event.get("type") != "error", data[:300]


def tour(url: str, max_examples: int, phases: Collection[str] = _PHASES, paths: Collection[str] | None = None) -> Tour:
    """Send what follows from the description of the server at `url`.

    `phases`: `examples` are those of the description, `coverage` each boundary of each field, `fuzzing` `max_examples` random requests per
    route. `paths`: these routes only.
    """
    config = SchemathesisConfig.from_dict(
        {
            "seed": 1,
            "continue-on-failure": True,
            "max-stream-events": 20,
            "generation": {"deterministic": True, "max-examples": max_examples, "database": "none", "no-shrink": True},
            "checks": _CHECKS,
            "output": {"sanitization": {"enabled": False}},
            "phases": {phase: {"enabled": phase in phases} for phase in (*_PHASES, "stateful")},
            "operations": [
                {"include-path": "/stats", "max-stream-events": 1},  # it has one a second, for ever
                *({"include-path": path, "phases": {"coverage": {"enabled": False}}} for path in _READ_BY_OTHERS),
            ],
        }
    )
    document = httpx.get(f"{url}/openapi.json", timeout=10).json()
    document["paths"] = {path: operations for path, operations in document["paths"].items() if paths is None or path in paths}
    _forget_large_sizes(document)
    schema = schemathesis.openapi.from_dict(document, config=config)
    schema.config.update(base_url=url)
    result = Tour()
    for event in from_schema(schema).execute():
        if isinstance(event, events.ScenarioFinished):
            result.add(event)
        elif isinstance(event, events.NonFatalError | events.FatalError):
            result.failures.append(f"schemathesis itself: {event}")
    return result


def _forget_large_sizes(node: Any) -> None:
    if isinstance(node, dict):
        for name in ("maxItems", "maxProperties"):
            if isinstance(node.get(name), int) and node[name] > _MAX_BUILT_ITEMS:
                del node[name]
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _forget_large_sizes(child)
