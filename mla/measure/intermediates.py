"""`triton-mla-bench intermediates`: the kernels that one decode call launches, and the bytes it leaves between them.

torch's profiler names every kernel with its grid and its time on the GPU. Bytes are counted three ways: what a call
asks of torch's allocator (its output among it); for scratch that was allocated before the call, how much of it is
written; for torch.compile, what its compiler says its kernels read and write. Hardware counters are not read.
"""

import argparse
import sys
from dataclasses import asdict

from mla.measure import records
from mla.measure.cases import Case
from mla.measure.command import command_parser, run_command
from mla.measure.implementations import IMPLEMENTATIONS
from mla.measure.subprocesses import answers_in_fresh_processes
from mla.schema import INTERMEDIATE_COLUMNS

NAMES = ("absorbed", "torch_compile", "torch_compile_paged", "portable", "hopper")
CASES = (Case(128, 32768), Case(8, 1024))


def measure(args: argparse.Namespace, argv: list[str]) -> None:
    """Count what has no rows in the file yet."""
    path = records.output_path(args.output, "intermediates")
    records.check_columns(path, INTERMEDIATE_COLUMNS)
    run_id = records.start_run(path, ["intermediates", *argv], args.seed)
    keys = ("implementation", "batch_size", "context_len")
    done = {tuple(row[k] for k in keys) for row in records.read_rows(path)}
    names = [name for name in NAMES if IMPLEMENTATIONS[name].version() is not None]
    todo = [(n, c) for c in CASES for n in names if (n, str(c.batch_size), str(c.context_len)) not in done]
    requests = [{"name": name, "case": asdict(case), "seed": args.seed} for name, case in todo]
    answers = answers_in_fresh_processes("mla.measure.profiled", requests, timeout_s=args.timeout)
    for (name, case), (_, answer, reason) in zip(todo, answers, strict=True):
        answer = answer or {"status": reason, "kernels": []}
        rows = make_rows(name, case, answer, run_id)
        records.append_rows(path, INTERMEDIATE_COLUMNS, rows)
        _print_rows(name, case, answer)


def make_rows(name: str, case: Case, answer: dict[str, object], run_id: str) -> list[dict[str, object]]:
    """A row a kernel; one without a kernel where nothing was counted.

    Args:
        name: implementation id.
        case: its shape.
        answer: of `mla.measure.profiled`: the columns of the call, and `kernels`, a list of the columns of each.
        run_id: the run's.
    """
    call = {k: v for k, v in answer.items() if k != "kernels"}
    columns = {**case.to_columns(), "implementation": name, "bytes_moved": case.bytes_moved, "flops": case.flops}
    columns.pop("q_len")
    return [
        {**dict.fromkeys(INTERMEDIATE_COLUMNS), **columns, **call, **kernel, "run_id": run_id}
        for kernel in answer["kernels"] or [{}]
    ]


def _print_rows(name: str, case: Case, answer: dict[str, object]) -> None:
    print(f"{name} {case.name}: {answer['status']}", flush=True)
    for k in answer["kernels"]:
        head = f"  {k['step']:4} {k['position']} {k['latency_us_p50']:10.1f} us  grid {k['grid']:12} "
        print(head + k["kernel_name"][:80])
    if answer["kernels"]:
        between = answer["allocated_bytes"] - answer["output_bytes"]
        print(f"  allocated beside the output {between:,} bytes, scratch written {answer['scratch_bytes']:,} bytes")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("intermediates", __doc__)
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="limit of one implementation")
    return parser


def main(argv: list[str]) -> int:
    """Count; returns the exit code."""
    return run_command(_parser(), argv, measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
