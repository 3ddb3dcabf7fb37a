"""Shape of the server's log lines on stderr: for people, or one JSON object each for collectors. Prompts and answers are never logged."""

import logging
from typing import Literal

import msgspec


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


def formatter(log_format: Literal["console", "json"]) -> logging.Formatter:
    """A line for each record, an exception's trace included."""
    if log_format == "json":
        return _JsonFormatter()
    return logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")


def configure_logging(log_format: Literal["console", "json"]) -> None:
    """Send warnings and errors to stderr; a no-op where the program has set up logging already."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
