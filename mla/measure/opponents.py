"""`triton-mla-bench opponents`: which way to write the baseline in torch gives which lead over it.

The source compares its kernel with torch.compile and says neither whether the cache was paged nor in which precision
the scores were kept. Each opponent runs in a process of its own, beside our kernels in the same rounds, after the
correctness gate. What has no rows in the file yet is measured; run it again to go on.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import asdict

from mla.measure import records
from mla.measure.cases import Case
from mla.measure.command import command_parser, run_command
from mla.measure.implementations import IMPLEMENTATIONS
from mla.measure.opponent import OWN, Opponent
from mla.measure.subprocesses import answers_in_fresh_processes
from mla.schema import OPPONENT_COLUMNS

# The source's largest lead, a middle one, and its one loss.
LARGE, MIDDLE, SMALL = Case(128, 32768), Case(32, 4096), Case(8, 1024)
_TUNED, _TUNED_GRAPH = "max-autotune-no-cudagraphs", "max-autotune"
# By importance. The modes that tune share the choices of the first of them, which the cache of a run keeps.
STUDY: tuple[tuple[Opponent, Case], ...] = (
    *((Opponent(compile_mode=mode), LARGE) for mode in (_TUNED, _TUNED_GRAPH, "default", "eager")),
    *((Opponent(cache="gathered", compile_mode=mode), LARGE) for mode in (_TUNED, _TUNED_GRAPH, "default", "eager")),
    *((Opponent(precision=precision), LARGE) for precision in ("fp32_scores", "tf32", "fp32")),
    (Opponent(form="sdpa"), LARGE),
    *((Opponent(compile_mode=mode), case) for case in (SMALL, MIDDLE) for mode in (_TUNED, _TUNED_GRAPH, "eager")),
    (Opponent(compile_mode="reduce-overhead"), LARGE),
    (Opponent(precision="fp32", compile_mode="eager"), LARGE),
)


def _columns(opponent: Opponent, case: Case) -> dict[str, object]:
    columns = {**asdict(opponent), **case.to_columns(), "l2_state": "cold", "flops": case.flops}
    columns.pop("q_len")
    return columns


def _key(row: dict[str, object]) -> tuple[str, ...]:
    return tuple(str(row[k]) for k in ("form", "cache", "precision", "compile_mode", "batch_size", "context_len"))


def measure(args: argparse.Namespace, argv: list[str]) -> None:
    """Measure what has no rows yet; an opponent that failed is a result too."""
    path = records.output_path(args.output, "opponents")
    records.check_columns(path, OPPONENT_COLUMNS)
    run_id = records.start_run(path, ["opponents", *argv], args.seed)
    done = {_key(row) for row in records.read_rows(path)}
    todo = [(opponent, case) for opponent, case in STUDY if _key(_columns(opponent, case)) not in done]
    own = [name for name in OWN if IMPLEMENTATIONS[name].version() is not None]
    requests = [{"opponent": asdict(o), "case": asdict(c), "own": own, "seed": args.seed} for o, c in todo]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        answers = answers_in_fresh_processes(
            "mla.measure.opponent", requests, timeout_s=args.timeout, environment={"TORCHINDUCTOR_CACHE_DIR": cache}
        )
        for (opponent, case), (_, answer, reason) in zip(todo, answers, strict=False):
            answer = answer or [{"timer": timer, "status": reason} for timer in opponent.timers]
            rows = [
                {**dict.fromkeys(OPPONENT_COLUMNS), **_columns(opponent, case), **row, "run_id": run_id}
                for row in answer
            ]
            records.append_rows(path, OPPONENT_COLUMNS, rows)
            _print_rows(opponent, case, rows)
            if time.monotonic() - begin > args.time_budget:
                print("time budget spent: run the same command again to go on", file=sys.stderr)
                break
        answers.close()


def _print_rows(opponent: Opponent, case: Case, rows: list[dict[str, object]]) -> None:
    for row in rows:
        head = f"{opponent.name:48} {case.name:18} {row['timer']:10} "
        if row["status"] != "ok":
            print(head + str(row["status"]), flush=True)
            continue
        us = row["latency_us_p50"]
        ratios = [f"{us / row[f'{name}_us_p50']:.2f} x {name}" for name in OWN if row[f"{name}_us_p50"]]
        print(f"{head}{us:10.1f} us {row['flops'] / us / 1e6:6.1f} TFLOPS  {', '.join(ratios)}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("opponents", __doc__)
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="limit of one opponent at one shape")
    parser.add_argument(
        "--time-budget", type=float, default=float("inf"), metavar="S", help="start no further one after this long"
    )
    return parser


def main(argv: list[str]) -> int:
    """Measure; returns the exit code."""
    return run_command(_parser(), argv, measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
