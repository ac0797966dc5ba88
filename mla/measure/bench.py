"""`triton-mla-bench`: check and time MLA decode implementations on this machine's GPU.

By default the 16 shapes with everything that is installed. Each case is checked against the fp32 reference before it
is timed; a case that fails or is refused is reported, kept and not counted.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from mla.measure import records, selection
from mla.measure.cases import Case
from mla.measure.gate import Verdict
from mla.measure.gates import Progress, gate_group
from mla.measure.subprocesses import time_in_process
from mla.measure.worker import TIMERS
from mla.schema import DECODE_COLUMNS

# What has a main function of its own, and what it does.
_COMMANDS = {
    "tune": "sweeps configurations",
    "first-call": "times compilation",
    "opponents": "times ways to write the baseline in torch",
    "prefill": "times the prefill kernel",
    "generate": "times whole models",
    "runs": "times the sixteen shapes several times",
    "campaign": "checks random cases",
    "sanitize": "runs compute-sanitizer",
    "intermediates": "counts the kernels of one call and the bytes between them",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triton-mla-bench",
        description=__doc__,
        epilog="Commands of their own, each with its --help: "
        + ", ".join(f"`triton-mla-bench {name}` {what}" for name, what in _COMMANDS.items())
        + ".",
    )
    selection.add_arguments(parser)
    parser.add_argument("--timer", choices=TIMERS, nargs="+", default=list(TIMERS))
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="a CSV file, or a folder for a file named by GPU and date; finished cases in it are skipped",
    )
    parser.add_argument(
        "--time-budget",
        type=float,
        default=float("inf"),
        metavar="S",
        help="start no further batch of cases after this many seconds",
    )
    parser.add_argument(
        "--group",
        type=int,
        default=4,
        metavar="N",
        help="cases that are checked before the first of them is timed; fewer waste less where a run is cut short",
    )
    parser.add_argument("--gate-timeout", type=float, default=180.0, metavar="S", help="limit of one check")
    parser.add_argument("--time-timeout", type=float, default=300.0, metavar="S", help="limit of timing one case")
    parser.add_argument(
        "--again", action="store_true", help="measure again what has rows; the old go to FILE.replaced.csv"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="only check; without a GPU on Triton's interpreter")
    return parser


def _row(case: Case, name: str, timer: str, verdict: Verdict, timing: dict[str, object], run_id: str) -> dict:
    columns = {
        **case.to_columns(),
        "implementation": name,
        "timer": timer,
        "l2_state": "cold",
        "bytes_moved": case.bytes_moved,
        "flops": case.flops,
        "rel_err": None if verdict.rel_err is None else f"{verdict.rel_err:.3e}",
        "passed": verdict.passed,
        "status": verdict.status,
        "run_id": run_id,
    }
    row = {**dict.fromkeys(DECODE_COLUMNS), **columns, **timing}
    # what failed after the gate did not pass either
    return {**row, "passed": verdict.passed and row["status"] == "ok"}


def _print_rows(rows: list[dict[str, object]]) -> None:
    for row in rows:
        head = f"{row['implementation']:23} b{row['batch_size']:<4} n{row['context_len']:<7} h{row['num_heads']:<4} "
        head += "" if row["lengths"] == "even" else f"{row['lengths']} "
        if row["status"] != "ok":
            print(f"{head}{row['timer']:10} {row['status']}", flush=True)
            continue
        us = float(row["latency_us_p50"])
        tflops, gbps = row["flops"] / us / 1e6, row["bytes_moved"] / us / 1e3
        print(
            f"{head}{row['timer']:10} {us / 1e3:9.4f} ms [{float(row['latency_us_p20']) / 1e3:.4f}, "
            f"{float(row['latency_us_p80']) / 1e3:.4f}]  {tflops:6.1f} TFLOPS ({tflops / row['matmul_tflops']:4.0%} of "
            f"matmul)  {gbps:6.0f} GB/s ({gbps / row['read_gbps']:4.0%} of read)",
            flush=True,
        )


def _key(row: dict[str, object]) -> tuple[str, ...]:
    """What names a row: shape, implementation and timer."""
    return tuple(str(row[k]) for k in (*Case(1, 1).to_columns(), "implementation", "timer"))


def run_benchmark(args: argparse.Namespace, command: list[str]) -> int:
    """Gate and time, group by group; returns the number of rows that failed."""
    selected = selection.select(args, has_gpu=True)
    path, run_id, done = None, "not-kept", set()
    if args.output:
        path = records.output_path(args.output, "decode")
        records.check_columns(path, DECODE_COLUMNS)
        print(f"writing {path}; to go on with it another day, name the file", file=sys.stderr)
        run_id = records.start_run(path, command, args.seed, args.part)
        done = set() if args.again else {_key(row) for row in records.read_rows(path)}

    def missing(case: Case, names: list[str]) -> list[tuple[str, str]]:
        """(implementation, timer) that have no row yet."""
        columns = case.to_columns()
        pairs = itertools.product(names, args.timer)
        return [(n, t) for n, t in pairs if _key({**columns, "implementation": n, "timer": t}) not in done]

    todo = {case: pairs for case, names in selected.items() if (pairs := missing(case, names))}
    begin, num_failed = time.monotonic(), 0
    progress = Progress(sum(len(_names(pairs)) + 1 for pairs in todo.values()))
    for group in _batched(list(todo), args.group):
        if time.monotonic() - begin > args.time_budget:
            print("time budget spent: run the same command again to go on", file=sys.stderr)
            break
        verdicts = gate_group(
            {case: _names(todo[case]) for case in group}, "cuda", args.seed, args.gate_timeout, progress
        )
        for case in group:
            contestants = [n for n in _names(todo[case]) if verdicts[n, case].passed]
            timings = time_in_process(case, contestants, timers=args.timer, seed=args.seed, timeout_s=args.time_timeout)
            by_key = {(t.pop("implementation"), t.pop("timer")): t for t in timings}
            rows = [_row(case, n, t, verdicts[n, case], by_key.get((n, t), {}), run_id) for n, t in todo[case]]
            num_failed += sum(str(row["status"]).startswith("failed") for row in rows)
            if path:
                if args.again:
                    keys = {_key(row) for row in rows}
                    records.set_aside(path, DECODE_COLUMNS, lambda row, keys=keys: _key(row) in keys)
                records.append_rows(path, DECODE_COLUMNS, rows)
            progress.step(f"time {case.name}")
            _print_rows(rows)
    progress.close()
    return num_failed


def _names(pairs: list[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for name, _ in pairs))


def _batched(items: list, size: int):
    return (items[i : i + size] for i in range(0, len(items), size))


def run_check(args: argparse.Namespace) -> int:
    """Only the gate; returns the number of cases that failed."""
    has_gpu = torch.cuda.is_available()
    selected = selection.select(args, has_gpu)
    progress = Progress(sum(map(len, selected.values())))
    verdicts = gate_group(selected, "cuda" if has_gpu else "cpu", args.seed, args.gate_timeout, progress)
    progress.close()
    for (name, case), verdict in verdicts.items():
        error = "" if verdict.rel_err is None else f"  relative error {verdict.rel_err:.2e}"
        print(f"{name:23} {case.name:24} page {case.page_size:<4} {case.dtype}  {verdict.status}{error}")
    return sum(not v.passed and not v.status.startswith("refused") for v in verdicts.values())


def _command(name: str) -> Callable[[list[str]], int] | None:
    """The main function of a command of its own."""
    module = {"generate": "pipeline"}.get(name, name.replace("-", "_"))
    return import_module(f"mla.measure.{module}").main if name in _COMMANDS else None


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and (command := _command(arguments[0])):
        sys.exit(command(arguments[1:]))
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        if args.check:
            sys.exit(1 if run_check(args) else 0)
        if not torch.cuda.is_available():
            sys.exit(
                "triton-mla-bench: no CUDA GPU here, so nothing can be timed; --check runs the correctness gate on "
                "Triton's interpreter"
            )
        sys.exit(1 if run_benchmark(args, arguments) else 0)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
