"""`paceline serve`: configuration, port, model, engine, facts, HTTP, in this order, so that each fault shows as early as it can."""

import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from paceline.cli.facts import choice_lines, facts_lines
from paceline.cli.progress import ConsoleProgress
from paceline.config import ServerConfig, settle_server


def serve(
    model: str | None = None,
    /,
    *,
    config: ServerConfig = ServerConfig(),  # noqa: B008 - frozen
) -> None:
    """Serve a model over HTTP in OpenAI's form.

    MODEL is a name from `paceline models list`, a folder, or a .gguf file.
    """
    if model is not None:
        config = replace(config, engine=replace(config.engine, model=model, model_dir=None))
    config = settle_server(config)
    with _signals_held():
        import uvloop

        from paceline.server.run import bind_socket
        from paceline.weights.resolve import resolve_models

    signal.signal(signal.SIGTERM, _exit)  # until the server has its own: what was started is then ended on the way out
    with bind_socket(config.host, config.port) as listener, ConsoleProgress() as progress:
        target, draft = resolve_models(config.engine, progress)
        config = replace(config, served_model_name=config.served_model_name or target.name)
        uvloop.run(_serve(config, target.path, draft.path if draft else None, listener, progress))


@contextmanager
def _signals_held() -> Generator[None]:
    """Let Ctrl-C wait for the imports: compiled ones turn an interrupt in their midst into an error of another kind."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


async def _serve(config: ServerConfig, folder: Path, draft_folder: Path | None, listener: socket.socket, progress: ConsoleProgress) -> None:
    from paceline.engine.client import EngineClient
    from paceline.server.run import run_server

    engine = await EngineClient.start(config.engine, folder, draft_folder, progress)
    try:
        progress.close()
        facts = engine.facts
        print(
            "\n".join((*facts_lines(config.served_model_name or facts.model_name, facts, config.engine), *choice_lines(facts.choices))),
            flush=True,
        )
        await run_server(engine, config, folder, listener)
    finally:
        await engine.close()
