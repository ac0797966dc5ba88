"""`triton-mla-bench tune`: sweeps the portable kernel's configurations and the ways to divide the Hopper kernel's work.

All variants of a kernel at a shape run in random order in the same rounds. Of the portable kernel only what wins a
shape is kept in `mla.kernels.portable_config.CONFIGS`.
"""

import argparse
import gc
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import torch

from mla.kernels import portable, portable_config
from mla.kernels.launch import device_facts
from mla.kernels.portable_config import PortableConfig
from mla.measure import records, timing
from mla.measure.cases import SIXTEEN_SHAPES, Case, draw_problems
from mla.measure.command import command_parser, run_command
from mla.measure.gate import check_result
from mla.measure.implementations import IMPLEMENTATIONS, Call
from mla.problem import Problem
from mla.schema import TUNE_COLUMNS

# The usual one of inference engines: 16 heads x 32 tokens, 4 warps, 2 stages, plain pointers.
FIRST_GUESS = PortableConfig(16, 32, num_warps=4, num_stages=2)

CANDIDATES = (
    FIRST_GUESS,
    PortableConfig(16, 64, num_warps=4, num_stages=2, use_descriptors=True),
    PortableConfig(16, 64, num_warps=8, num_stages=2, use_descriptors=True),
    PortableConfig(32, 64, num_warps=8, num_stages=2, use_descriptors=True),
    PortableConfig(64, 16, num_warps=8, num_stages=4, use_descriptors=True),
    PortableConfig(64, 32, num_warps=8, num_stages=2),
    PortableConfig(64, 32, num_warps=8, num_stages=2, use_descriptors=True),
    PortableConfig(64, 32, num_warps=8, num_stages=3, use_descriptors=True),
    PortableConfig(64, 64, num_warps=8, num_stages=1),
    PortableConfig(64, 64, num_warps=8, num_stages=1, use_descriptors=True),
    PortableConfig(64, 64, num_warps=8, num_stages=2, use_descriptors=True),
)

# Few heads are another regime, bound by reading; pages smaller than a tile need another way to load.
MORE_CASES = (
    Case(32, 8192, num_heads=16),
    Case(128, 8192, num_heads=16),
    Case(128, 8192, num_heads=64),
    Case(32, 8192, num_heads=128, page_size=32),
    Case(32, 8192, num_heads=128, page_size=16),
    Case(32, 8192, num_heads=16, page_size=16),
)


# Columns of a variant, and what makes its calls, one a problem.
Variant = tuple[dict[str, object], Callable[[], list[Call]]]
# What names the rows of one sweep of a kernel at a case.
_KEYS = ("kernel", "batch_size", "context_len", "lengths", "num_heads", "page_size")
_VARIANT_COLUMNS = (
    "block_h", "block_n", "num_warps", "num_stages", "loads", "num_splits", "mode", "prefetch", "by_rule",
)  # fmt: skip


def portable_variants(case: Case, problems: list[Problem]) -> list[Variant]:
    """All candidates at one program a SM, the kept ones also with half and twice the splits."""
    kv_cache = problems[0].kv_cache
    kept = {replace(c, programs_per_sm=1) for configs in portable_config.CONFIGS.values() for c in configs}
    chosen = []
    for config in CANDIDATES:
        if config.use_descriptors and not portable_config.descriptors_fit(kv_cache, config.block_n):
            continue
        chosen.append((config, None))
        if config in kept:
            head_blocks = -(-case.num_heads // config.block_h)
            default = max(1, device_facts(kv_cache.device).num_sms // (case.batch_size * head_blocks))
            chosen += [(config, n) for n in sorted({max(1, default // 2), 2 * default} - {default})]
    return [_portable_variant(problems, config, num_splits) for config, num_splits in chosen]


def _portable_variant(problems: list[Problem], config: PortableConfig, num_splits: int | None) -> Variant:
    columns = {
        "kernel": "portable",
        "block_h": config.block_h,
        "block_n": config.block_n,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "loads": "descriptor" if config.use_descriptors else "pointer",
        "num_splits": num_splits,
    }
    return columns, lambda: [lambda p=p: portable.decode(p, config, num_splits) for p in problems]


def tune_case(
    case: Case, seed: int, make_variants: Callable[[Case, list[Problem]], list[Variant]]
) -> list[dict[str, object]]:
    """Check and time every variant of one case; one row a variant, failed ones included."""
    problems = draw_problems(case, "cuda", seed)
    rows, stretches = [], {}
    pool = torch.cuda.graph_pool_handle()
    for i, (columns, make_calls) in enumerate(make_variants(case, problems)):
        row = {**case.to_columns(), **columns}
        row.pop("q_len")
        rows.append(row)
        try:
            calls = make_calls()
            out, lse = calls[0]()
            verdict = check_result(out, lse, problems[0], rounds_scores=False, is_per_head=False)
            row |= {"status": verdict.status, "rel_err": f"{verdict.rel_err:.3e}"}
            if verdict.passed:
                stretches[i] = timing.graph_stretch(calls, pool)
        except Exception as error:  # a configuration that does not compile or fit is a result
            row["status"] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    times = timing.time_in_rounds({**stretches, **timing.ceiling_stretches(seed)}, random.Random(seed), rounds=8)
    matmul = timing.matmul_tflops(statistics.median(times["matmul"]))
    for i in stretches:
        rows[i] |= {"repeats": len(times[i]), "matmul_tflops": round(matmul, 2), **timing.quantiles_us(times[i])}
    return rows


def _chosen_sweeps(asked: list[str] | None) -> list[tuple[str, Case]]:
    """(kernel, case) in order; ValueError where a kernel was asked for that this GPU cannot run."""
    has_hopper = IMPLEMENTATIONS["hopper"].version() is not None
    if asked and "hopper" in asked and not has_hopper:
        raise ValueError("--kernels: expected a GPU of compute capability 9.0 for hopper, got another; leave it out")
    kernels = asked or (["portable", "hopper"] if has_hopper else ["portable"])
    cases = {"portable": (*SIXTEEN_SHAPES, *MORE_CASES)}
    if "hopper" in kernels:
        cases["hopper"] = import_module("mla.measure.tune_hopper").CASES
    return [(kernel, case) for kernel in kernels for case in cases[kernel]]


def _variants_of(kernel: str) -> Callable[[Case, list[Problem]], list[Variant]]:
    # imported where it is needed: Gluon has no interpreter
    return portable_variants if kernel == "portable" else import_module("mla.measure.tune_hopper").variants


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("tune", __doc__)
    parser.add_argument(
        "--kernels", nargs="+", choices=("portable", "hopper"), help="default: portable, and hopper on a Hopper GPU"
    )
    return parser


def sweep(args: argparse.Namespace, argv: list[str]) -> None:
    """Sweep what has no rows in the file yet, and print the best of each case."""
    sweeps = _chosen_sweeps(args.kernels)
    path = records.output_path(args.output, "tune")
    records.check_columns(path, TUNE_COLUMNS)
    run_id = records.start_run(path, ["tune", *argv], args.seed)
    done = {tuple(row[k] for k in _KEYS) for row in records.read_rows(path)}
    for kernel, case in sweeps:
        if tuple(str(v) for v in (kernel, *(getattr(case, k) for k in _KEYS[1:]))) in done:
            continue
        with torch.inference_mode():
            rows = tune_case(case, args.seed, _variants_of(kernel))
        records.append_rows(path, TUNE_COLUMNS, [{**dict.fromkeys(TUNE_COLUMNS), **r, "run_id": run_id} for r in rows])
        timed = [r for r in rows if "latency_us_p50" in r]
        best = min(timed, key=lambda r: r["latency_us_p50"], default=None)
        if best is None:
            print(f"{kernel} {case.name}: no variant was right", flush=True)
        else:
            winner = " ".join(f"{c}={best[c]}" for c in _VARIANT_COLUMNS if best.get(c) is not None)
            print(f"{kernel} {case.name}: {best['latency_us_p50']:.1f} us with {winner}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def main(argv: list[str]) -> int:
    """Sweep; returns the exit code."""
    return run_command(_parser(), argv, sweep)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
