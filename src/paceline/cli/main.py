"""The entry point: registers the verbs, and turns every error into one line and an exit code.

Verbs import what they need when they run, so that `--help` and `--version` are quick.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from paceline import __version__
from paceline.cli.outcome import run_command, say
from paceline.cli.settings import ConfigFile, Origins, canonical, misspelt_variables, own_names, sources

_HELP = """An LLM inference server that decodes speculatively: the same tokens, sooner.

Every flag is also a variable (--max-batch-size is PACELINE_MAX_BATCH_SIZE) and a line of the --config file (max_batch_size: 8).
A flag wins over a variable, a variable over the file, the file over the default."""


def build() -> App:
    """The parser with all verbs."""
    from paceline.cli import chat, doctor, generate, models, prove, serve, show

    app = App(
        name="paceline",
        help=_HELP,
        help_format="plaintext",
        version=__version__,
        version_flags=["--version"],
        suppress_keyboard_interrupt=False,
    )
    app.meta.suppress_keyboard_interrupt = False
    origins = Origins()
    app.command(serve.serve)
    app.command(serve.draft_server)
    app.command(generate.generate)
    app.command(chat.chat)
    app.command(prove.prove)
    app.command(models.app, name="models")
    app.command(doctor.doctor)
    app.command(show.config_app(origins), name="config")

    def root(*tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)], config: ConfigFile = None) -> object:
        variable = os.environ.get("PACELINE_CONFIG")
        own = own_names(tokens)
        app.config = sources(config or (Path(variable) if variable else None), origins, own)
        return app(canonical(tokens, own), exit_on_error=False, print_error=False, result_action="return_value")

    app.meta.default(root)
    return app


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code. Errors are printed to stderr as one line, with PACELINE_DEBUG=1 with their trace."""
    for warning in misspelt_variables(os.environ):
        say(f"warning: {warning}")
    return run_command(lambda: build().meta(arguments, exit_on_error=False, print_error=False, result_action="return_value"))


def main() -> None:
    """What the `paceline` script calls."""
    sys.exit(run(sys.argv[1:]))
