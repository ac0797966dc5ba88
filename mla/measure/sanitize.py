"""`triton-mla-bench sanitize`: compute-sanitizer's tools over each kernel, over planted faults and over controls.

A planted fault that a tool does not see is a blind spot: there, "clean" says nothing. A control is a correct kernel
with one mechanism of the Hopper kernel: a report on one is a false alarm of the tool, so that its errors in the Hopper
kernel prove nothing. All are kept; a line for each tool says which of its verdicts cannot be trusted.

Exit code: 1 where a tool finds errors in a kernel, unless it is the Hopper kernel and a control of the same tool gives
a false alarm (memcheck and synccheck have no controls); 1 where a kernel or a control fails, without a tool or under
one; else 0. A run that passes its limit (timeout) found nothing.

torch's caching allocator is off, so that an allocation ends where it ends. Kernels and controls run once without a
tool, which fills Triton's cache, then under it. What the tools know of TMA and mbarriers changes with their version, so
that is kept: by NVIDIA's release notes, initcheck knows cp.async.bulk from 2025.4 on and memcheck TMA loads from 2026.2
on; racecheck lost false alarms at mbarriers in 2025.4 and at the synchronisation of warpgroups in 2026.1.

Reference: https://docs.nvidia.com/compute-sanitizer/ReleaseNotes/index.html.
"""

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from mla.measure import records
from mla.measure.sanitize_reports import describe_sites, find_sites, is_finding, judge, untrusted
from mla.schema import SANITIZER_COLUMNS

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Errors that a tool prints: more than a small call has threads and loads, so that the place of each is known.
_PRINT_LIMIT = 100_000


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


def find_version(sanitizer: str) -> str:
    """Version of compute-sanitizer, such as 2025.3.0.0; "" where it does not say."""
    output, _ = _run([sanitizer, "--version"], 60.0)
    found = re.search(r"Version (\S+)", output or "")
    return found[1] if found else ""


def sanitize(sanitizer: str, tool: str, target: str, kind: str, limit_s: float) -> dict[str, object]:
    """One target under one tool; a row of the data file without its version and run_id, and `sites` (`find_sites`)."""
    begin = time.monotonic()
    suite = [sys.executable, "-m", "mla.measure.sanitize_suite", target]
    options = ["--tool", tool, "--target-processes", "application-only", "--show-backtrace", "no"]
    output, returncode = _run([sanitizer, *options, "--print-limit", str(_PRINT_LIMIT), *suite], limit_s)
    errors, verdict = judge(output, returncode, kind)
    sites = find_sites(output) if errors else Counter()
    return {
        "tool": tool, "target": target, "kind": kind, "errors": errors, "verdict": verdict,
        "where": describe_sites(sites), "seconds": round(time.monotonic() - begin, 1), "sites": sites,
    }  # fmt: skip


def _run_without_a_tool(target: str, limit_s: float) -> None:
    """Run a target by itself, so that none compiles under a tool; ValueError where it fails."""
    output, returncode = _run([sys.executable, "-m", "mla.measure.sanitize_suite", target], limit_s)
    if output is None or returncode != 0:
        reason = f"nothing within {limit_s:.0f} s" if output is None else output.strip()[-300:]
        raise ValueError(f"{target}: expected a call that passes without a tool, got {reason}")


def _plan(tools: list[str]) -> list[tuple[str, str, str]]:
    """(tool, target, kind) in order: every kernel under every tool, every fault and every control under its own."""
    # Gluon has no interpreter, so it is imported where there is a GPU
    from mla.measure.sanitize_suite import CONTROLS, KERNELS, PLANTED

    has_hopper = torch.cuda.get_device_capability() == (9, 0)
    kernels = [name for name in KERNELS if has_hopper or "hopper" not in name]
    planted = [(tool, name, "planted") for name, (tool, _) in PLANTED.items() if tool in tools]
    controls = [(tool, name, "control") for name, (tool, _) in CONTROLS.items() if tool in tools and has_hopper]
    return [(tool, name, "kernel") for tool in tools for name in kernels] + planted + controls


def _print(rows: list[dict]) -> None:
    """The table, under a row the places of its errors, at the end what cannot be trusted."""
    for row in rows:
        errors = f" ({row['errors']})" if row["errors"] else ""
        print(f"{row['tool']:10} {row['kind']:8} {row['target']:42} {row['verdict']}{errors}")
        for site, count in row["sites"].most_common():
            print(f"           {count:8} x {site}")
    for line in untrusted(rows):
        print(line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triton-mla-bench sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="PATH", help="a CSV file, or a folder; default: only print")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument(
        "--limit", type=float, default=60.0, metavar="S", help="of one run; one that passes it: timeout"
    )
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="runs at a time")
    return parser


def main(argv: list[str]) -> int:
    """Run, print and keep the table; returns the exit code, for which see the module's docstring."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("expected a CUDA GPU to run kernels on, found none")
    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            sanitizer = find_sanitizer()
            path = run_id = None
            if args.output:
                path = records.output_path(args.output, "sanitizer")
                records.check_columns(path, SANITIZER_COLUMNS)
                run_id = records.start_run(path, ["sanitize", *argv], 0)
            planned = _plan(args.tools)
            targets = dict.fromkeys(target for _, target, kind in planned if kind != "planted")
            list(pool.map(lambda target: _run_without_a_tool(target, 2 * args.limit), targets))
        except ValueError as error:
            parser.error(str(error))
        rows = list(pool.map(lambda job: sanitize(sanitizer, *job, args.limit), planned))
    version = find_version(sanitizer)
    print(f"compute-sanitizer {version}")
    _print(rows)
    if path:
        told = {"tool_version": version, "run_id": run_id}
        kept = [{name: value for name, value in row.items() if name != "sites"} | told for row in rows]
        records.append_rows(path, SANITIZER_COLUMNS, kept)
    return int(any(is_finding(row, rows) for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
