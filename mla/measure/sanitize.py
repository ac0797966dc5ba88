"""`triton-mla-bench sanitize`: compute-sanitizer's four tools over each kernel, and over faults planted for each tool.

A planted fault that a tool does not see is a blind spot: there, "clean" says nothing. torch's caching allocator is off,
so that an allocation ends where it ends. Each call runs once without a tool, which fills Triton's cache, then under it.
"""

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from mla.measure import records
from mla.schema import SANITIZER_COLUMNS

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def find_sanitizer() -> str:
    """compute-sanitizer on PATH, in CUDA_HOME/bin or in /usr/local/cuda*/bin, in this order.

    Raises:
        ValueError: it is in none of them.
    """
    folders = [f"{os.environ['CUDA_HOME']}/bin"] if "CUDA_HOME" in os.environ else []
    folders += sorted(glob.glob("/usr/local/cuda*/bin"))
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if found is None:
        raise ValueError(
            "expected compute-sanitizer on PATH, in CUDA_HOME/bin or in /usr/local/cuda*/bin, found none; install the "
            "CUDA toolkit or set CUDA_HOME"
        )
    return found


def _run(command: list[str], limit_s: float) -> tuple[str | None, int]:
    """Output and exit code of a process; None where it passed its limit."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_INTERPRET": "0"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=limit_s)[0], process.returncode
        except subprocess.TimeoutExpired:
            # the tool and what it watches
            os.killpg(process.pid, 9)
            process.communicate()
            return None, process.returncode


def judge(output: str | None, returncode: int, is_planted: bool) -> tuple[int | None, str]:
    """Errors that a tool counted, and the verdict.

    Returns:
        errors (None where there is no count) and "clean" or "errors" for a kernel, "seen" or "not seen" for a planted
        fault, "timeout", or "failed: <reason>" where there is no count or the call itself failed.
    """
    if output is None:
        return None, "timeout"
    counts = [int(count) for count in re.findall(r"SUMMARY: (\d+) (?:error|hazard)", output)]
    errors = max(counts, default=None)
    if errors:
        return errors, "seen" if is_planted else "errors"
    if errors is None or returncode != 0:
        lines = [line for line in output.splitlines() if line.strip(" =")]
        last = [line for line in lines if not line.startswith("=")] or lines or ["no output"]
        return errors, f"failed: {last[-1].strip()[:160]}"
    return 0, "not seen" if is_planted else "clean"


def sanitize(sanitizer: str, tool: str, target: str, is_planted: bool, limit_s: float) -> dict[str, object]:
    """One target under one tool; a row of the data file without its run_id."""
    begin = time.monotonic()
    suite = [sys.executable, "-m", "mla.measure.sanitize_suite", target]
    options = ["--tool", tool, "--target-processes", "application-only", "--print-limit", "5"]
    errors, verdict = judge(*_run([sanitizer, *options, *suite], limit_s), is_planted)
    return {
        "tool": tool, "target": target, "is_planted": is_planted, "errors": errors, "verdict": verdict,
        "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip


def _fill_cache(targets: list[str], limit_s: float) -> None:
    """Run kernels without a tool, so that none compiles under one; ValueError where one fails by itself."""
    for target in targets:
        output, returncode = _run([sys.executable, "-m", "mla.measure.sanitize_suite", target], limit_s)
        if output is None or returncode != 0:
            reason = f"nothing within {limit_s:.0f} s" if output is None else output.strip()[-300:]
            raise ValueError(f"{target}: expected a call that passes without a tool, got {reason}")


def _plan(tools: list[str]) -> list[tuple[str, str, bool]]:
    """(tool, target, is_planted) in order: every kernel under every tool, every fault under its own."""
    # Gluon has no interpreter, so it is imported where there is a GPU
    from mla.measure.sanitize_suite import KERNELS, PLANTED

    has_hopper = torch.cuda.get_device_capability() == (9, 0)
    kernels = [name for name in KERNELS if has_hopper or "hopper" not in name]
    planted = [(tool, name, True) for name, (tool, _) in PLANTED.items() if tool in tools]
    return [(tool, name, False) for tool in tools for name in kernels] + planted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="triton-mla-bench sanitize", description=__doc__)
    parser.add_argument("--output", type=Path, metavar="PATH", help="a CSV file, or a folder; default: only print")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument(
        "--limit", type=float, default=60.0, metavar="S", help="of one run; one that passes it: timeout"
    )
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="runs at a time")
    return parser


def main(argv: list[str]) -> int:
    """Run, print and keep the table; returns the exit code, 1 where a tool found something in a kernel or failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("expected a CUDA GPU to run kernels on, found none")
    try:
        sanitizer = find_sanitizer()
        path = run_id = None
        if args.output:
            path = records.output_path(args.output, "sanitizer")
            records.check_columns(path, SANITIZER_COLUMNS)
            run_id = records.start_run(path, ["sanitize", *argv], 0)
        planned = _plan(args.tools)
        _fill_cache(list(dict.fromkeys(target for _, target, is_planted in planned if not is_planted)), 2 * args.limit)
    except ValueError as error:
        parser.error(str(error))
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(lambda job: sanitize(sanitizer, *job, args.limit), planned))
    for row in rows:
        print(
            f"{row['tool']:10} {row['target']:42} {row['verdict']}" + (f" ({row['errors']})" if row["errors"] else "")
        )
    if path:
        records.append_rows(path, SANITIZER_COLUMNS, [{**row, "run_id": run_id} for row in rows])
    return int(any(not row["is_planted"] and row["verdict"] not in ("clean", "timeout") for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
