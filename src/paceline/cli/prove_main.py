"""The entry point of the wheel `paceline-prove`, which holds the referee alone: one command, no server, no torch."""

import sys

from cyclopts import App
from cyclopts.config import Env

from paceline import __version__
from paceline.cli.outcome import run_command
from paceline.cli.prove import prove


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code. Flags are also `PACELINE_*` variables, and a flag wins."""
    app = App(name="paceline-prove", help_format="plaintext", version=__version__, version_flags=["--version"])
    app.suppress_keyboard_interrupt = False
    app.config = (Env("PACELINE_", command=False),)
    app.default(prove)
    return run_command(lambda: app(arguments, exit_on_error=False, print_error=False, result_action="return_value"))


def main() -> None:
    """What the `paceline-prove` script calls."""
    sys.exit(run(sys.argv[1:]))
