"""The answers in the description of the interface, `GET /openapi.json`: what each route sends, how it refuses, an example.

Request bodies describe themselves (`requests.py`); answers are written by hand in `answers.py` and its neighbours, so their shapes stand
here. A route that is not in the table answers with some JSON object. Called by each kind of server.
"""

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

Schema = dict[str, Any]

_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"
_STRING, _INTEGER, _NUMBER, _BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))
_COUNT = {"type": "integer", "minimum": 0}
_MS = {"type": "number", "minimum": 0, "description": "milliseconds"}

# Every route can be refused so, one that takes a place and a body in more ways.
_ALWAYS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
_ALWAYS_TO_POST = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.GATEWAY_TIMEOUT)


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(optional: Mapping[str, Schema] | None = None, **required: Schema) -> Schema:
    """An object that has the fields of `required`, may have those of `optional`, and others."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _generation(name: str, content: Schema) -> Schema:
    """A whole answer of completions or chat; `content` is the field in which its choices differ."""
    (field,) = content
    tokens = {"prompt_token_ids": _list(_COUNT), "token_ids": _list(_COUNT)}
    optional = {"prompt_logprobs": _or_null(_list({})), **tokens}
    choice = _object(optional, index=_COUNT, logprobs=_or_null({"type": "object"}), finish_reason=_STRING)
    choice["properties"] |= content
    choice["required"].append(field)
    return _object(
        {"prompt_token_ids": _list(_COUNT)},
        id=_STRING,
        object={"const": name},
        created=_INTEGER,
        model=_STRING,
        choices=_list(choice),
        usage=_ref("Usage"),
        metrics=_ref("AnswerMetrics"),
    )


_TOOL_CALL = _object(id=_STRING, type={"const": "function"}, function=_object(name=_STRING, arguments=_STRING))
_MESSAGE = _object(
    {"reasoning_content": _STRING, "tool_calls": _list(_TOOL_CALL)}, role={"const": "assistant"}, content={"type": ["string", "null"]}
)
_SPECULATION = _object(
    mean_acceptance_length={"type": "number", "minimum": 1},
    draft_acceptance_rate={"type": "number", "minimum": 0, "maximum": 1},
    acceptance_histogram=_list(_COUNT),
    acceptance_histogram_by_draft_length={"type": "object", "additionalProperties": _list(_COUNT)},
    num_spec_steps=_COUNT,
    num_accepted_draft_tokens=_COUNT,
    num_draft_tokens=_COUNT,
    num_spec_tokens=_COUNT,
)
_MODEL = _object(
    dict.fromkeys(("version", "architecture", "device", "dtype", "drafter", "verification"), _STRING)
    | dict.fromkeys(("torch", "model_sha256", "draft_sha256"), _STRING)
    | {"max_draft_length": _COUNT, "enable_prefix_caching": _BOOLEAN},
    id=_STRING,
    object={"const": "model"},
    created=_INTEGER,
    owned_by=_STRING,
    max_model_len=_COUNT,
    lossless=_BOOLEAN,
)

_SCHEMAS: dict[str, Schema] = {
    "Error": _object(error=_object({"param": _or_null(_STRING), "code": _or_null(_STRING)}, message=_STRING, type=_STRING)),
    "Usage": _object(
        {"completion_tokens_details": _object(accepted_prediction_tokens=_COUNT, rejected_prediction_tokens=_COUNT)},
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    ),
    "AnswerMetrics": _object(
        speculative_decoding=_SPECULATION,
        num_plain_steps=_COUNT,
        num_control_steps=_COUNT,
        verification=_STRING,
        lossless=_BOOLEAN,
        queue_ms=_MS,
        prefill_ms=_MS,
        decode_ms=_MS,
    ),
    "Completion": _generation("text_completion", {"text": _STRING}),
    "ChatCompletion": _generation("chat.completion", {"message": _MESSAGE}),
    "Model": _MODEL,
    "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
    "Verdict": _object(status={"enum": ["ok", "unavailable"]}, reason=_STRING),
    "Tokens": _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT), token_strs=_or_null(_list(_STRING))),
    "Text": _object(prompt=_STRING),
    "InferAnswer": _object(
        text=_STRING,
        tokens=_COUNT,
        latency_ms=_MS,
        first_token_ms=_MS,
        accepted_length={"type": "number", "minimum": 1},
        finish_reason=_STRING,
    ),
    "Response": _object(
        id=_STRING,
        object={"const": "response"},
        created_at=_INTEGER,
        status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
        model=_STRING,
        output=_list(_object(id=_STRING, type=_STRING)),
    ),
    "DeletedResponse": _object(id=_STRING, object={"const": "response"}, deleted={"const": True}),
    "InputItems": _object(object={"const": "list"}, data=_list(_object(type=_STRING)), has_more=_BOOLEAN),
    "Message": _object(
        id=_STRING,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_STRING,
        content=_list(_object(type={"enum": ["text", "thinking", "tool_use"]})),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]},
        stop_sequence=_or_null(_STRING),
        usage=_object(input_tokens=_COUNT, cache_creation_input_tokens=_COUNT, cache_read_input_tokens=_COUNT, output_tokens=_COUNT),
        metrics=_ref("AnswerMetrics"),
    ),
    "MessageTokens": _object(input_tokens=_COUNT),
    "MessageError": _object(type={"const": "error"}, error=_object(type=_STRING, message=_STRING), request_id=_STRING),
    "Draft": _object({"probs": _list({"type": "number", "minimum": 0, "maximum": 1})}, token_ids=_list(_COUNT)),
    "Statistics": _object(time_s=_NUMBER, model=_STRING, is_alive=_BOOLEAN, engine={"type": "object"}, requests={"type": "object"}),
}

# path, or method and path where they differ -> the schema of its JSON, by name
_ANSWERS = {
    "/v1/completions": "Completion",
    "/v1/chat/completions": "ChatCompletion",
    "/v1/responses": "Response",
    "/v1/responses/{response_id}": "Response",
    "DELETE /v1/responses/{response_id}": "DeletedResponse",
    "/v1/responses/{response_id}/cancel": "Response",
    "/v1/responses/{response_id}/input_items": "InputItems",
    "/v1/messages": "Message",
    "/v1/messages/count_tokens": "MessageTokens",
    "/v1/models": "ModelList",
    "/v1/models/{name}": "Model",
    "/health": "Verdict",
    "/ready": "Verdict",
    "/stats": "Statistics",
    "/tokenize": "Tokens",
    "/detokenize": "Text",
    "/infer": "InferAnswer",
    "/draft": "Draft",
}
_OTHER_ANSWERS: dict[str, Schema] = {"/metrics": {_TEXT: {"schema": _STRING}}}
_HELLO = [{"role": "user", "content": "Say hello."}]
_EXAMPLES: dict[str, Schema] = {  # of request bodies
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 16},
    "/v1/chat/completions": {"messages": _HELLO, "max_tokens": 16},
    "/v1/responses": {"input": "Say hello.", "max_output_tokens": 16},
    "/v1/messages": {"messages": _HELLO, "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": _HELLO},
    "/tokenize": {"prompt": "Once upon a time"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/infer": {"prompt": "Once upon a time", "max_length": 16},
    "/draft": {"token_ids": [1, 2, 3], "max_draft_length": 5},
}
_VERDICTS = ("/health", "/ready")  # their 503 is an answer, too


def describe_answers(document: dict[str, Any], body_schemas: Mapping[str, Any], model_name: str) -> None:
    """Complete a description that FastAPI made of the routes, in place. `body_schemas`: what the request bodies refer to, by name."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"] = _responses(path, method, _content(path, method, operation, body_schemas))
            if path in _EXAMPLES and method == "post":
                operation["requestBody"]["content"][_JSON]["example"] = _EXAMPLES[path]
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and path.startswith("/v1/models/"):
                    parameter["example"] = model_name
    document["components"] = {"schemas": _needed({**_SCHEMAS, **body_schemas}, document["paths"])}


def _needed(schemas: Mapping[str, Schema], paths: Schema) -> dict[str, Schema]:
    """Those of `schemas` that the routes refer to, and what these refer to."""
    needed: dict[str, Schema] = {}
    names = _names_in(paths)
    while names:
        name = names.pop()
        if name not in needed:
            needed[name] = schemas[name]
            names += _names_in(schemas[name])
    return needed


def _names_in(node: object) -> list[str]:
    return re.findall(r'"#/components/schemas/(\w+)"', json.dumps(node))


def _responses(path: str, method: str, content: Schema) -> dict[str, Schema]:
    responses = {"200": {"description": "The answer", "content": content}}
    error = _ref("MessageError" if path.startswith("/v1/messages") else "Error")
    for status in (*_ALWAYS, *_ALWAYS_TO_POST) if method == "post" else _ALWAYS:
        responses[str(status.value)] = {"description": status.phrase, "content": {_JSON: {"schema": error}}}
    if path in _VERDICTS:
        responses["503"]["content"] = content
    return responses


def _content(path: str, method: str, operation: Schema, body_schemas: Mapping[str, Any]) -> Schema:
    """What a good request gets, by content type: events, too, where it can ask for a stream."""
    if path in _OTHER_ANSWERS:
        return _OTHER_ANSWERS[path]
    name = _ANSWERS.get(f"{method.upper()} {path}", _ANSWERS.get(path))
    content: Schema = {_JSON: {"schema": {"type": "object"} if name is None else _ref(name)}}
    if _can_stream(operation, body_schemas):
        content[_EVENTS] = {}
    return content


def _can_stream(operation: Schema, body_schemas: Mapping[str, Any]) -> bool:
    if any(parameter["name"] == "stream" for parameter in operation.get("parameters", ())):
        return True
    reference = operation.get("requestBody", {}).get("content", {}).get(_JSON, {}).get("schema", {}).get("$ref", "")
    return "stream" in body_schemas.get(reference.rpartition("/")[2], {}).get("properties", {})
