"""`paceline prove`: measures a server plainly and accelerated, judges it, and writes the report. Without `--url` it starts the server.

Also what the wheel `paceline-prove` runs, which has no server to start. Exit codes: 0 PASS, 1 FAIL, 4 INVALID, 5 INCONCLUSIVE.
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from cyclopts import Parameter

from paceline.errors import BadInputError, MissingError
from paceline.prove.options import ProveConfig, check

if TYPE_CHECKING:
    from paceline.prove.run import Outcome

_LINE_INTERVAL_S = 20.0  # where there is no terminal: a line per stage, and one more for each of these
_LOG_LINES = 40  # of a server that was started here, shown if something goes wrong

Parameter(name="*", group="Proof")(ProveConfig)


def prove(*, config: ProveConfig = ProveConfig()) -> int:  # noqa: B008 - frozen
    """Measure a server plainly and accelerated on the same prompts, and judge it.

    Any server with OpenAI's interface; without --url `paceline serve` is started for it. Exit 0 PASS, 1 FAIL, 4 INVALID, 5 INCONCLUSIVE.
    """
    check(config)
    _need_packages(config)
    if config.from_records is not None:
        from paceline.prove.options import objectives_of
        from paceline.prove.run import judge_again

        return _report(judge_again(config.from_records, config.criteria, objectives_of(config)), config)
    if config.soak is not None:
        return _soak(config)
    from paceline.prove.environment import own_command
    from paceline.prove.options import plan_of
    from paceline.prove.run import Job, dataset_of, records_path
    from paceline.prove.run import prove as run_proof

    started_s = time.monotonic()
    dataset, records = dataset_of(config), records_path(config)
    plan_of(config, config.url or "http://127.0.0.1", dataset)  # mistakes show before a server is started
    with _server(config) as (url, pid), _Bar() as bar:
        drafting_server = partial(_drafting_server, config) if config.url is None else None
        job = Job(config, url, dataset, records, tuple(own_command()), pid, drafting_server)
        outcome = asyncio.run(run_proof(job, bar.update))
    print(f"took {time_text(time.monotonic() - started_s)}, raw records in {records}", file=sys.stderr)
    return _report(outcome, config)


def _need_packages(config: ProveConfig) -> None:
    """Say at once what is missing, not after the measurement."""
    needed = {"aiohttp": config.from_records is None, "matplotlib": config.html is not None}
    missing = [name for name, is_needed in needed.items() if is_needed and find_spec(name) is None]
    if missing:
        raise MissingError(f"`prove` needs {' and '.join(missing)}: pip install 'paceline[prove]'")


@contextmanager
def _drafting_server(config: ProveConfig, is_stopped: Event) -> Generator[str]:
    """The URL of another server that drafts wherever it can; `is_stopped` ends the wait for it."""
    with _server(config, "--speculation=on", is_stopped=is_stopped) as (url, _):
        yield url


@contextmanager
def _server(config: ProveConfig, *flags: str, is_stopped: Event | None = None) -> Generator[tuple[str, int | None]]:
    """The URL to measure, and the server's process if it is started here; it is ended in any case."""
    if config.url is not None:
        yield config.url, None
        return
    if find_spec("paceline.engine") is None:
        raise BadInputError("give the server to measure as --url; `paceline-prove` has none to start (`pip install paceline` has)")
    from paceline.cli.child_server import running_server

    arguments = [*([config.model] if config.model else []), "--port=0", *([f"--draft={config.draft}"] if config.draft else []), *flags]
    print(f"starting `paceline serve {' '.join(arguments)}`", file=sys.stderr)
    log: deque[str] = deque(maxlen=_LOG_LINES)
    is_whole = False
    try:
        with running_server(arguments, log.append, merges_errors=True, is_stopped=is_stopped) as server:
            yield server.url, server.pid
        is_whole = True
    finally:
        if not is_whole and log:
            print("the server's last words:", *(f"  {line.rstrip()}" for line in log), sep="\n", file=sys.stderr)


class _Bar:
    """Progress with the time left: a bar in a terminal, a line now and then elsewhere. A context manager."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = None if self._progress is None else self._progress.add_task("", total=None, left="")
        self._stage = ""
        self._begun_s = self._printed_s = 0.0
        self._begun_at = 0

    def __enter__(self) -> "_Bar":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, stage: str, num_done: int, num_total: int, seconds_left: float | None) -> None:
        """Without `seconds_left` the stage's own pace tells how long the rest of it takes."""
        now_s = time.monotonic()
        is_new = stage != self._stage
        if is_new:
            self._stage, self._begun_s, self._begun_at = stage, now_s, num_done
        if seconds_left is None and num_done > self._begun_at:
            seconds_left = (now_s - self._begun_s) / (num_done - self._begun_at) * (num_total - num_done)
        left = "" if seconds_left is None else f"{time_text(seconds_left)} left"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=stage, completed=num_done, total=num_total, left=left)
        elif is_new or now_s - self._printed_s >= _LINE_INTERVAL_S:
            self._printed_s = now_s
            print(f"{stage}: {num_done} of {num_total}{f', {left}' if left else ''}", file=sys.stderr, flush=True)


def time_text(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = max(round(seconds), 0)
    minutes, rest = divmod(whole, 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _report(outcome: "Outcome", config: ProveConfig) -> int:
    """Write what was asked for, print the tables; the exit code of the verdict."""
    from rich.console import Console

    from paceline.prove.report.document import write_document
    from paceline.prove.report.page import write_page
    from paceline.prove.report.table import print_proof
    from paceline.prove.save_result import save_result

    proof = outcome.proof
    print_proof(proof, Console())
    if config.json is not None:
        _write("--json", config.json, lambda path: write_document(proof, path))
    if config.html is not None:
        _write("--html", config.html, lambda path: write_page(proof, path))
    if config.save_result is not None:
        _write("--save-result", config.save_result, lambda path: save_result(path, outcome.measurement, outcome.dataset, proof.environment))
    return proof.verdict.exit_code


def _write(flag: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise MissingError(
            f"cannot write {flag} {path}: {error.strerror}; the raw records stay, and --from-records judges them again"
        ) from None
    print(f"wrote {path}", file=sys.stderr)


def _soak(config: ProveConfig) -> int:
    from paceline.prove.soak_plan import SoakOptions, parse_duration

    duration_s = parse_duration(config.soak or "")
    from rich.console import Console

    from paceline.prove.report.soak_table import print_soak
    from paceline.prove.soak import soak

    with _server(config) as (url, pid), _Bar() as bar:
        model = config.model if config.url is not None else None
        options = SoakOptions(duration_s, model=model, api_key=config.api_key, pid=pid)
        result = asyncio.run(soak(url, options, lambda stage, done, total: bar.update(f"{stage}, seconds", done, total, total - done)))
    print_soak(result, Console())
    return result.verdict.exit_code
