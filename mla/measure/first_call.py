"""`triton-mla-bench first-call`: what the first decode of a fresh process takes, and what later ones cost the host.

Each kernel is called twice over, in a process that finds an empty Triton cache and in the next one, which finds what
the first left there. The clock runs from inputs on the GPU to the first result: compiling, the work plan, the call; the
Hopper kernel's modules are imported within it. Importing the package, starting CUDA and drawing the data come before.

The time on the host is that of eager calls one after another, which only enqueue: none waits for the GPU.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from mla.decode import mla_decode
from mla.measure import provenance, records
from mla.measure.cases import Case, draw_problems
from mla.measure.implementations import IMPLEMENTATIONS

CASE = Case(8, 1024)
KERNELS = ("portable", "hopper")
PEERS = ("flashmla",)
# Calls timed together. The GPU's queue has room for all their launches, so that it never holds up the host.
_STRETCH = 200


def time_first_call(name: str) -> float:
    """Seconds from inputs on the GPU to the first result there; to be called once a process."""
    problems = draw_problems(CASE, "cuda", seed=0, at_most=1)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.inference_mode():
        IMPLEMENTATIONS[name].prepare(problems).calls[0]()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _in_process(name: str, cache: str, timeout_s: float) -> float:
    """`time_first_call` in a process of its own, with that folder as Triton's cache."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mla.measure.first_call", name], capture_output=True, text=True, timeout=timeout_s,
            env={**os.environ, "TRITON_CACHE_DIR": cache},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{name}: expected a first call within {timeout_s:.0f} s, got none") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"{name}: expected a first call, got a process that ended with {done.returncode}: {reason}")
    return float(done.stdout.strip().splitlines()[-1])


def measure(names: list[str], repeats: int, timeout_s: float) -> dict[str, dict[str, list[float]]]:
    """Seconds by kernel and state of the cache, one value a repeat; the kernels take turns."""
    seconds = {name: {"empty_cache": [], "filled_cache": []} for name in names}
    for _ in range(repeats):
        for name in names:
            with tempfile.TemporaryDirectory() as cache:
                for values in seconds[name].values():
                    values.append(round(_in_process(name, cache, timeout_s), 3))
    return seconds


def host_us(calls: dict[str, Callable[[], object]], rounds: int = 30) -> dict[str, float]:
    """Microseconds that the host takes for each call, without waiting for its result.

    The median of stretches of calls; each round has one stretch of every call, in random order.
    """
    samples, order = {name: [] for name in calls}, random.Random(0)
    for _ in range(rounds + 1):
        for name in order.sample(list(calls), len(calls)):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(_STRETCH):
                calls[name]()
            samples[name].append((time.perf_counter() - begin) / _STRETCH)
    torch.cuda.synchronize()
    # the first round compiles
    return {name: round(statistics.median(values[1:]) * 1e6, 2) for name, values in samples.items()}


def measure_host(names: list[str]) -> dict[str, float]:
    """`host_us` by implementation; `hopper` makes a work plan at each call, `hopper_planned` is given one."""
    problems = draw_problems(CASE, "cuda", seed=0, at_most=1)
    calls = {name: IMPLEMENTATIONS[name].prepare(problems).calls[0] for name in names}
    if "hopper" in calls:
        p = problems[0]
        arguments = (p.q_absorbed, p.kv_cache, p.block_table, p.seq_lens)
        calls["hopper_planned"], calls["hopper"] = (
            calls["hopper"],
            lambda: mla_decode(*arguments, softmax_scale=p.softmax_scale, kv_lora_rank=p.config.kv_lora_rank),
        )
    with torch.inference_mode():
        return host_us(calls)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="triton-mla-bench first-call", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="for a file named by GPU and date")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="fresh caches a kernel")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="limit of one process")
    parser.add_argument("--again", action="store_true", help="replace the file of this day, if there is one")
    return parser


def main(argv: list[str]) -> int:
    """Measure and write the file, which is left as it is where it exists; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("expected a CUDA GPU to call kernels on, found none")
    path = records.output_path(args.output, "first_call").with_suffix(".json")
    if path.exists() and not args.again:
        print(f"{path} is there already; --again measures anew", file=sys.stderr)
        return 0
    names, peers = (
        [name for name in all_names if IMPLEMENTATIONS[name].version() is not None] for all_names in (KERNELS, PEERS)
    )
    record = {
        **provenance.machine(),
        "command": " ".join(["triton-mla-bench first-call", *argv]),
        **provenance.source_state(),
        "date_utc": provenance.utc_now(),
        "clocks": provenance.clocks(),
        "case": asdict(CASE),
    }
    try:
        record["seconds"] = measure(names, args.repeats, args.timeout)
        record["host_us"] = measure_host(names + peers)
    except ValueError as error:
        parser.error(str(error))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    for name, states in record["seconds"].items():
        print(f"{name:10} {', '.join(f'{state}: {values} s' for state, values in states.items())}")
    print(", ".join(f"{name} {value} us on the host" for name, value in record["host_us"].items()))
    return 0


if __name__ == "__main__":
    print(time_first_call(sys.argv[1]))
