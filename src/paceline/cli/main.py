"""The entry point: registers the verbs, and turns every error into one line and an exit code.

Verbs import what they need when they run, so that `--help` and `--version` are quick.
"""

import errno
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from paceline import __version__
from paceline.cli.settings import ConfigFile, Origins, canonical, misspelt_variables, sources
from paceline.errors import PacelineError

_HELP = """An LLM inference server that decodes speculatively: the same tokens, sooner.

Every flag is also a variable (--max-batch-size is PACELINE_MAX_BATCH_SIZE) and a line of the --config file (max_batch_size: 8).
A flag wins over a variable, a variable over the file, the file over the default."""


def build() -> App:
    """The parser with all verbs."""
    from paceline.cli import chat, doctor, generate, models, serve, show

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
    app.command(models.app, name="models")
    app.command(doctor.doctor)
    app.command(show.config_app(origins), name="config")

    def root(*tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)], config: ConfigFile = None) -> object:
        variable = os.environ.get("PACELINE_CONFIG")
        app.config = sources(config or (Path(variable) if variable else None), origins)
        return app(canonical(tokens), exit_on_error=False, print_error=False, result_action="return_value")

    app.meta.default(root)
    return app


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code. Errors are printed to stderr as one line, with PACELINE_DEBUG=1 with their trace."""
    for warning in misspelt_variables(os.environ):
        _say(f"warning: {warning}")
    try:
        code = build().meta(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`paceline models list | head -1`): nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("PACELINE_DEBUG"):
            traceback.print_exc()
        message, code = explain(error)
        _say(f"paceline: {message}")
    return code if isinstance(code, int) else 0


def explain(error: Exception) -> tuple[str, int]:
    """One line for an error, and the exit code that goes with it."""
    if isinstance(error, PacelineError):
        return str(error), error.exit_code
    if isinstance(error, CycloptsError):
        return str(error), 2
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full ({error.filename or 'while writing'}); free some space or set PACELINE_CACHE to another disk", 3
    return f"internal error, {type(error).__name__}: {error}; PACELINE_DEBUG=1 shows where", 1


def _say(line: str) -> None:
    print(" ".join(line.split()), file=sys.stderr)


def main() -> None:
    """What the `paceline` script calls."""
    sys.exit(run(sys.argv[1:]))
