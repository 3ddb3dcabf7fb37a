"""Decode speed on this machine: `python benchmarks/decode.py [ROW ...] [--record]`, one table; `make bench` in five minutes.

Without a row: those of the table in docs/performance.md that need no other program. Rows beyond it are run by name, or `claims` and
`guard` for all of a kind. Arms run in turn in one process; every figure has its 95 % interval. Rounds in which other processes took the
machine are repeated. `--record` appends the figures with machine, versions, commit and date to benchmarks/results/decode-cpu.jsonl.
"""

import argparse
import time
from pathlib import Path

from claim_rows import CLAIMS
from engines import is_cached
from figures import Row, heading, line
from guard_rows import GUARD
from paired import BusyError, Effort, append_result, environment
from table_rows import TABLE

RESULTS = Path(__file__).parent / "results" / "decode-cpu.jsonl"
ROWS: dict[str, Row] = TABLE | CLAIMS | GUARD
KINDS: dict[str, dict[str, Row]] = {"table": TABLE, "claims": CLAIMS, "guard": GUARD}
LIMIT_S = 8.0  # of a row, so that the table takes five minutes


def chosen(names: list[str]) -> list[str]:
    """Names of rows, those of kinds spelt out."""
    return [row for name in names for row in KINDS.get(name, (name,))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=["table"], help=f"which of {', '.join((*KINDS, *ROWS))}; table, if none is given")
    parser.add_argument("--rounds", type=int, default=20, help="most rounds of a row")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds of a row after which no round begins; at least three run")
    parser.add_argument("--record", type=Path, nargs="?", const=RESULTS, help="append the figures to this file")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.rows if name not in ROWS and name not in KINDS]:
        parser.error(f"unknown row {unknown[0]}; rows are {', '.join((*KINDS, *ROWS))}")
    started_s = time.monotonic()
    print(heading(), flush=True)
    for name in chosen(arguments.rows):
        row = ROWS[name]
        if missing := [model for model in row.needs if not is_cached(model)]:
            print(f"{name:<24} not measured: {missing[0]} is not in the cache; `paceline models pull {missing[0]}` fetches it", flush=True)
            continue
        try:
            figures = row.measure(Effort(arguments.rounds, arguments.limit_s * row.time_share))
        except BusyError as error:
            print(f"{name:<24} not measured: {error}", flush=True)
            continue
        for figure in figures:
            print(line(figure), flush=True)
            if arguments.record:
                append_result(arguments.record, figure.record() | environment())
    print(f"{time.monotonic() - started_s:.0f} s; {', '.join(f'{key} {value}' for key, value in environment().items())}")


if __name__ == "__main__":
    main()
