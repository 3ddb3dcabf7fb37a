"""How a command ends: every error is one line on stderr and an exit code. Shared by `paceline` and `paceline-prove`."""

import errno
import os
import sys
import traceback
from collections.abc import Callable

from cyclopts import CycloptsError

from paceline.errors import PacelineError


def run_command(command: Callable[[], object]) -> int:
    """Run it; its number is the exit code, anything else is 0. With PACELINE_DEBUG=1 errors come with their trace."""
    try:
        code = command()
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
        say(f"paceline: {message}")
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


def say(line: str) -> None:
    print(" ".join(line.split()), file=sys.stderr)
