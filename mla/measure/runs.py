"""`triton-mla-bench runs`: the sixteen shapes several times, to see how far a ratio differs from run to run.

Each run is a process of its own, which draws, compiles, captures and times everything anew; within it the contestants
of a shape are timed in the same rounds, as always. Runs that the file has already are not made again.
"""

import argparse
import statistics
import sys
from dataclasses import asdict

from mla.measure import records
from mla.measure.cases import SIXTEEN_SHAPES, Case
from mla.measure.command import command_parser, run_command
from mla.measure.implementations import available
from mla.measure.subprocesses import answers_in_fresh_processes
from mla.schema import RUN_COLUMNS

NAMES = ("hopper", "flashmla")
TIMER = "cuda_graph"


def measure(args: argparse.Namespace, argv: list[str]) -> int:
    """Make the runs that are missing; returns the number of rows that failed."""
    names = list(available(list(NAMES), has_gpu=True))
    path = records.output_path(args.output, "runs")
    records.check_columns(path, RUN_COLUMNS)
    run_id = records.start_run(path, ["runs", *argv], args.seed)
    done = {int(row["run"]) for row in records.read_rows(path)}
    todo = [run for run in range(1, args.runs + 1) if run not in done]
    request = {
        "cases": [asdict(case) for case in SIXTEEN_SHAPES],
        "names": names,
        "timers": [TIMER],
        "seed": args.seed,
    }
    answers = answers_in_fresh_processes("mla.measure.worker", [request] * len(todo), timeout_s=args.timeout)
    num_failed = 0
    for run, (_, answer, reason) in zip(todo, answers, strict=True):
        answer = answer or [[{"implementation": n, "timer": TIMER, "status": reason} for n in names]] * len(
            SIXTEEN_SHAPES
        )
        rows = [
            make_row(run, case, timing, run_id)
            for case, timings in zip(SIXTEEN_SHAPES, answer, strict=True)
            for timing in timings
        ]
        records.append_rows(path, RUN_COLUMNS, rows)
        num_failed += sum(row["status"] != "ok" for row in rows)
        _print_run(run, rows)
    return num_failed


def make_row(run: int, case: Case, timing: dict[str, object], run_id: str) -> dict[str, object]:
    """The row of one contestant of one shape in one run; `timing` is of `mla.measure.worker`."""
    columns = {**case.to_columns(), **timing, "run": run, "l2_state": "cold", "flops": case.flops, "run_id": run_id}
    return {name: columns.get(name) for name in RUN_COLUMNS}


def _print_run(run: int, rows: list[dict[str, object]]) -> None:
    us = {(r["batch_size"], r["context_len"], r["implementation"]): r["latency_us_p50"] for r in rows}
    ours, theirs = ([us[c.batch_size, c.context_len, name] for c in SIXTEEN_SHAPES] for name in NAMES)
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a and b]
    if not pairs:
        print(f"run {run}: {rows[0]['status']}", flush=True)
        return
    ratios = [b / a for a, b in pairs]
    print(
        f"run {run}: {NAMES[0]} is {min(ratios):.3f} to {max(ratios):.3f} times as fast as {NAMES[1]} at "
        f"{len(ratios)} shapes, geometric mean {statistics.geometric_mean(ratios):.3f}",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("runs", __doc__)
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    parser.add_argument("--timeout", type=float, default=400.0, metavar="S", help="limit of one run")
    return parser


def main(argv: list[str]) -> int:
    """Measure; returns the exit code, 1 where a row failed."""
    return run_command(_parser(), argv, measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
