"""`paceline serve` and `paceline draft-server`: configuration, port, model, engine, facts, HTTP.

In this order, so that each fault shows as early as it can. Only the engine's process, whose imports take longest, is begun before all.
"""

import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from paceline.cli.facts import choice_lines, facts_lines
from paceline.cli.progress import ConsoleProgress
from paceline.config import DraftServerConfig, ServerConfig, settle_draft_server, settle_server
from paceline.engine.process import EngineProcess

if TYPE_CHECKING:
    from paceline.server.app import Server

C = TypeVar("C", bound=ServerConfig)

_ENDING = {signal.SIGINT, signal.SIGTERM}


def serve(
    model: str | None = None,
    /,
    *,
    config: ServerConfig = ServerConfig(),  # noqa: B008 - frozen
) -> None:
    """Serve a model over HTTP in OpenAI's form.

    MODEL is a name from `paceline models list`, a folder, or a .gguf file.
    """
    _run(settle_server(_with_model(config, model)), is_draft_server=False)


def draft_server(
    model: str | None = None,
    /,
    *,
    config: DraftServerConfig = DraftServerConfig(),  # noqa: B008 - frozen
) -> None:
    """Serve a small model as a drafter: POST /draft continues token ids by a few tokens.

    MODEL is a name from `paceline models list`, a folder, or a .gguf file.
    """
    _run(settle_draft_server(_with_model(config, model)), is_draft_server=True)


def _with_model(config: C, model: str | None) -> C:
    return config if model is None else replace(config, engine=replace(config.engine, model=model, model_dir=None))


def _run(config: ServerConfig, is_draft_server: bool) -> None:
    signal.signal(signal.SIGTERM, _exit)  # until the server has its own: what was started is then ended on the way out
    with EngineProcess() as process:
        process.spawn(config.engine.threads)
        with _signals_held():
            import uvloop

            from paceline.server.app import Server
            from paceline.server.draft import DraftServer
            from paceline.server.run import bind_socket
            from paceline.weights.resolve import resolve_models

        with bind_socket(config.host, config.port) as listener, ConsoleProgress() as progress:
            target, draft = resolve_models(config.engine, progress)
            config = replace(config, served_model_name=config.served_model_name or target.name)
            folders = (target.path, draft.path if draft else None)
            uvloop.run(_serve(config, folders, listener, progress, DraftServer if is_draft_server else Server, process))


@contextmanager
def _signals_held() -> Generator[None]:
    """Let signals wait for the imports: compiled ones turn an interrupt in their midst into an error of another kind."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


async def _serve(
    config: ServerConfig,
    folders: tuple[Path, Path | None],
    listener: socket.socket,
    progress: ConsoleProgress,
    kind: "type[Server]",
    process: EngineProcess,
) -> None:
    from paceline.engine.client import EngineClient
    from paceline.server.run import run_server

    engine = await EngineClient.start(config.engine, *folders, progress, process)
    try:
        progress.close()
        facts = engine.facts
        print(
            "\n".join((*facts_lines(config.served_model_name or facts.model_name, facts, config.engine), *choice_lines(facts.choices))),
            flush=True,
        )
        await run_server(engine, config, folders[0], listener, make_server=kind)
    finally:
        await engine.close()
