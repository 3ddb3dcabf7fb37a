"""Log lines of both shapes."""

import json
import logging
import sys

from paceline.server.log import formatter


def record(message: str, *, with_error: bool = False) -> logging.LogRecord:
    if not with_error:
        return logging.LogRecord("paceline.server", logging.WARNING, __file__, 1, message, None, None)
    try:
        raise ValueError("broken")
    except ValueError:
        return logging.LogRecord("paceline.server", logging.ERROR, __file__, 1, message, None, sys.exc_info())


def test_json_is_one_object_on_one_line() -> None:
    line = formatter("json").format(record('two\nlines "quoted"', with_error=True))
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["message"] == 'two\nlines "quoted"'
    assert (fields["level"], fields["logger"]) == ("error", "paceline.server")
    assert fields["exception"].endswith("ValueError: broken")


def test_console_is_for_people() -> None:
    assert formatter("console").format(record("something happened")).endswith("WARNING something happened")
