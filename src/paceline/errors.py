"""Every error a user can meet. Each says what happened, the numbers, and the remedy; the CLI and the server map them to codes.

Raise these at the edge and for the environment. Our own invariants use `assert`.
"""


class PacelineError(Exception):
    """Root of the vocabulary. `exit_code` is what the CLI ends with."""

    exit_code = 1


class BadInputError(PacelineError):
    """The user's input cannot be served: a flag, a file, a request field. HTTP 400; exit 2."""

    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # the request field at fault, as OpenAI's error.param
        self.code = code  # a stable machine-readable name, as OpenAI's error.code


class NotFoundError(BadInputError):
    """A model or file that does not exist here. HTTP 404; exit 2."""


class MissingError(PacelineError):
    """The environment lacks something: disk, network, a device, a port, a package. HTTP 503; exit 3."""

    exit_code = 3


class UnsupportedModelError(BadInputError):
    """A model folder or file that this build cannot run, with what it can."""


class EngineDeadError(PacelineError):
    """The engine process ended or stopped answering. Streams end with an error event; HTTP 500; exit 3."""

    exit_code = 3
