"""A template that hangs, eats memory or breaks out: its request alone fails, at every route that renders, and the next one is served."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from paceline.config import ServerConfig
from paceline.errors import BadInputError
from paceline.server import template
from paceline.server.run import bind_socket, run_server
from paceline.server.template import ChatTemplate
from paceline.server.template_child import MAX_OUTPUT_CHARS, run
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.tiny_models import make_tiny_model
from tests.unit.server.conftest import Site

pytestmark = pytest.mark.usefixtures("child_processes")

# What the user says decides what the template does. `word`: constants are folded when the template is compiled.
SOURCE = """{%- set word = messages[-1].content -%}
{%- if word == 'loop' -%}{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif word == 'power' -%}{{ (word | length + 4) ** (9 ** 9) }}
{%- elif word == 'memory' -%}{{ word * 10 ** 9 }}
{%- elif word == 'list' -%}{{ ([word] * 10 ** 9) | length }}
{%- elif word == 'range' -%}{%- for a in range(10 ** 12) -%}{%- endfor -%}
{%- elif word == 'output' -%}{%- for a in range(99999) -%}{%- for b in range(99999) -%}xxxxxxxxxxxxxxxx{%- endfor -%}{%- endfor -%}
{%- elif word == 'padding' -%}{{ '%0*d' % (10 ** 9, 1) }}
{%- else -%}{{ word }}{%- endif -%}"""
HANGS, TAKES_MEMORY, OTHERS = ["loop", "power"], ["memory", "list", "padding"], ["range", "output"]


def turns(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": word}]


# A body for each route that renders; a route without one fails `test_no_route_that_renders_is_left_out`.
BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda word: {"messages": turns(word)},
    "/v1/messages": lambda word: {"model": "fake", "max_tokens": 9, "messages": turns(word)},
    "/v1/messages/count_tokens": lambda word: {"model": "fake", "messages": turns(word)},
    "/v1/responses": lambda word: {"model": "fake", "input": word},
    "/tokenize": lambda word: {"messages": turns(word)},
}


async def rendering_routes(site: Site) -> set[str]:
    """The routes whose body can hold a conversation."""
    document = (await site.get("/openapi.json")).json()
    found: set[str] = set()
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body is not None:
            name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            if {"messages", "input"} & document["components"]["schemas"][name]["properties"].keys():
                found.add(path)
    return found


@pytest.fixture
async def site(make_site: Callable[..., Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(template, "TIME_LIMIT_S", 0.5)
    folder = make_tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(SOURCE)
    site = make_site(model_folder=folder)
    await site.server.start()
    yield site
    await site.server.close()


async def test_no_route_that_renders_is_left_out(site: Site) -> None:
    assert {"/v1/chat/completions", "/tokenize"} <= await rendering_routes(site) <= BODIES.keys()


async def test_its_request_alone_fails(site: Site) -> None:
    for path in sorted(await rendering_routes(site)):
        for word in HANGS[:1] + TAKES_MEMORY[:1]:
            answer = await site.post(path, BODIES[path](word))
            assert answer.status == 400, (path, word, answer.body)
            error = answer.json()["error"]
            assert "the model's chat template " in error["message"]
            started_s = time.monotonic()
            assert (await site.post(path, BODIES[path]("the fox"))).status == 200
            assert time.monotonic() - started_s < 5
    assert not site.engine.aborted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (HANGS, "took more than 0.5 s for these messages; send fewer or shorter ones"),
        (TAKES_MEMORY, "needs more than 512 MB for these messages; send fewer or shorter ones"),
        (["range"], "cannot render these messages"),
        (["output"], "wrote more than 16,777,216 characters for these messages"),
    ],
    ids=["time", "memory", "range", "output"],
)
async def test_the_answer_says_why(site: Site, words: list[str], message: str) -> None:
    template.TIME_LIMIT_S = 0.5 if words == HANGS else 20.0  # set back with the fixture's patch
    for word in words:
        answer = await site.post("/v1/chat/completions", {"messages": turns(word)})
        assert answer.status == 400
        error = answer.json()["error"]
        assert (error["message"], error["param"]) == (f"the model's chat template {message}", "messages")


async def test_others_are_served_meanwhile(site: Site) -> None:
    """The event loop waits for nothing, and so do requests that render nothing; the others wait their turn."""
    hanging = site.open("/v1/chat/completions", {"messages": turns("loop")})
    await asyncio.sleep(0.05)
    assert (await site.post("/v1/completions", {"prompt": "the fox"})).status == 200
    assert not hanging.task.done()
    queued = site.open("/tokenize", {"messages": turns("the fox")})
    await asyncio.gather(hanging.task, queued.task)
    assert (hanging.answer.status, queued.answer.status) == (400, 200)


async def test_hundreds_of_requests_at_once_are_all_served(site: Site) -> None:
    connections = [site.open("/tokenize", {"messages": turns(f"fox {index}")}) for index in range(300)]
    await asyncio.gather(*(connection.task for connection in connections))
    assert {connection.answer.status for connection in connections} == {200}


async def test_a_client_that_leaves_frees_the_worker(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one whose time is up does: its work is ended with it, long before the template's own limit."""
    monkeypatch.setattr(template, "TIME_LIMIT_S", 60.0)
    hanging = site.open("/tokenize", {"messages": turns("loop")})
    await asyncio.sleep(0.1)
    hanging.task.cancel()
    assert (await site.post("/tokenize", {"messages": turns("the fox")})).status == 200


async def test_a_template_that_hangs_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its constants are computed when it is compiled, which the server waits for when it starts."""
    monkeypatch.setattr(template, "_COMPILE_LIMIT_S", 0.3)
    hostile = ChatTemplate("{{ 9 ** (9 ** 9) }}", {})
    try:
        with pytest.raises(BadInputError, match=r"not a valid Jinja template: no answer within 0\.3 s"):
            await hostile.start()
    finally:
        await hostile.close()


async def test_a_crash_is_an_error_of_the_request(site: Site) -> None:
    hanging = site.open("/tokenize", {"messages": turns("loop")})
    await asyncio.sleep(0.1)
    for child in psutil.Process().children():
        child.kill()
    await hanging.task
    assert hanging.answer.status == 400
    assert "ended over these messages" in hanging.answer.json()["error"]["message"]
    assert (await site.post("/tokenize", {"messages": turns("the fox")})).status == 200


async def test_the_longest_conversation_of_ordinary_size() -> None:
    """4,096 turns, and one of 10 MB: within the limits by far."""
    ordinary = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}", {})
    try:
        await ordinary.start()
        for messages in (turns("é" * 100) * 4096, turns("x" * (10 << 20)), turns("x" * (10 << 20) + "\U0001f600")):
            started_s = time.process_time()
            text = await ordinary.render(messages)
            assert text == "".join(f"<user>{message['content']}\n" for message in messages)
            assert time.process_time() - started_s < 1
    finally:
        await ordinary.close()


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__cl' ~ 'ass__'] }}",
    "{{ '' | attr('__class__') | attr('__mro__') }}",
    "{{ ()|attr('\\x5f\\x5fclass\\x5f\\x5f')|attr('\\x5f\\x5fbase\\x5f\\x5f') }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "{{ '{0.__globals__}'.format_map({'0': strftime_now}) }}",
    "{{ raise_exception.__globals__['os'].system('touch CANARY') }}",
    "{{ strftime_now.__globals__.__builtins__.open('CANARY', 'w') }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').popen('touch CANARY').read() }}",
    "{{ self._TemplateReference__context.environment.loader }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ lipsum.__globals__['os'].system('touch CANARY') }}",
    "{{ joiner.__init__.__globals__.os.environ }}",
    "{{ namespace.__init__.__globals__.__builtins__ }}",
    "{{ get_flashed_messages.__globals__ }}",
    "{{ config.items() }}{{ request.application }}",
    "{{ messages.append(1) }}{{ messages[0].update({'content': 'changed'}) }}",
    "{% set x = messages[0].pop('content') %}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
    "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{{ dict(a=1).__init__.__globals__ }}",
    "{{ (messages | map(attribute='__class__') | list) }}",
    "{{ messages | map('attr', '__class__') | map(attribute='__mro__') | list }}",
    "{{ [1] | sort(attribute='__class__.__mro__') }}",
    "{{ messages | groupby('__class__') }}",
    "{{ loop.__class__ }}{{ caller.__globals__ }}{{ varargs.__class__ }}",
    "{% macro m() %}{{ m.__globals__ }}{{ m._func.__globals__ }}{% endmacro %}{{ m() }}",
    "{{ messages.__reduce_ex__(2) }}{{ messages.__getattribute__('__class__') }}",
    "{{ ''.join.__self__.__class__.__base__ }}",
    "{{ tojson.__globals__ }}{{ ({} | tojson).__class__ }}",
]


async def test_escapes_stay_inside(tmp_path: Path) -> None:
    """An error without a word about the inside, or text without one; nothing is run, opened or changed."""
    canary, asked = tmp_path / "canary", turns("hello")
    worker = template.Worker("paceline.server.template_child")
    try:
        for source in ESCAPES:
            hostile = ChatTemplate(source.replace("CANARY", str(canary)), {}, worker)
            try:
                text = await hostile.render(asked)
            except BadInputError as error:
                text = str(error)
            for word in ("<class", "<module", "<function", "root:", "PATH", "builtin_function", os.getcwd(), "Traceback"):
                assert word not in text, source
    finally:
        await worker.close()
    assert not canary.exists()
    assert asked == turns("hello")


async def test_a_server_starts_its_worker_early_and_leaves_no_process(folder: Path) -> None:
    processes: list[list[psutil.Process]] = []

    def on_ready(_: str) -> None:
        processes.append(psutil.Process().children(recursive=True))

    serving = asyncio.create_task(run_server(FakeEngine(), ServerConfig(), folder, bind_socket("127.0.0.1", 0), on_ready))
    while not processes:
        await asyncio.sleep(0.01)
        assert not serving.done()
    (children,) = processes
    assert ["paceline.server.template_child" in child.cmdline() for child in children] == [True]
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert not any(child.is_running() for child in children)


async def test_a_server_that_fails_to_start_leaves_no_process_either(make_site: Callable[..., Site], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% if %}")
    listener = bind_socket("127.0.0.1", 0)
    with listener, pytest.raises(BadInputError, match="not a valid Jinja template"):
        await run_server(FakeEngine(), ServerConfig(), folder, listener)


def test_the_child_takes_what_the_server_sends() -> None:
    """Both ends of the pipe, without it."""
    packed = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"}).pack(turns("é\u2028\x00"))
    assert run(packed).decode() == "<s>é\u2028\x00"
    large = {"n": 2**70, "x": 1e308, "deep": {"a": [None, True]}}
    packed = ChatTemplate("{{ messages[0].content | tojson }}", {}).pack([{"content": large}])
    assert msgspec.json.decode(run(packed)) == large
    assert template._LIMITS.max_answer_bytes >= MAX_OUTPUT_CHARS * 4
