"""`triton-mla-bench tune`: sweeps the portable kernel's configurations against the first guess.

All configurations of a shape run in random order in the same rounds. Only what wins a shape is kept in
`mla.kernels.portable.CONFIGS`.
"""

import argparse
import gc
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch

from mla.kernels import portable
from mla.kernels.launch import device_facts
from mla.kernels.portable import PortableConfig
from mla.measure import records, timing
from mla.measure.cases import SIXTEEN_SHAPES, Case, draw_problems
from mla.measure.gate import check_result
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


def _variants(case: Case, problem: Problem) -> list[tuple[PortableConfig, int | None]]:
    """What can run a case: all candidates at one program a SM, the kept ones also with half and twice the splits."""
    kept = {replace(c, programs_per_sm=1) for configs in portable.CONFIGS.values() for c in configs}
    variants = []
    for config in CANDIDATES:
        if config.use_descriptors and not portable.descriptors_fit(problem.kv_cache, config.block_n):
            continue
        variants.append((config, None))
        if config in kept:
            head_blocks = -(-case.num_heads // config.block_h)
            default = max(1, device_facts(problem.kv_cache.device).num_sms // (case.batch_size * head_blocks))
            variants += [(config, n) for n in sorted({max(1, default // 2), 2 * default} - {default})]
    return variants


def tune_case(case: Case, seed: int) -> list[dict[str, object]]:
    """Check and time every variant of one case; one row a variant, failed ones included."""
    problems = draw_problems(case, "cuda", seed)
    rows, stretches = [], {}
    pool = torch.cuda.graph_pool_handle()
    for i, (config, num_splits) in enumerate(_variants(case, problems[0])):
        row = {
            **case.to_columns(),
            "block_h": config.block_h,
            "block_n": config.block_n,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "loads": "descriptor" if config.use_descriptors else "pointer",
            "num_splits": num_splits,
        }
        row.pop("q_len")
        rows.append(row)
        try:
            out, lse = portable.decode(problems[0], config, num_splits)
            verdict = check_result(out, lse, problems[0], rounds_scores=False, is_per_head=False)
            row |= {"status": verdict.status, "rel_err": f"{verdict.rel_err:.3e}"}
            if verdict.passed:
                calls = [lambda p=p, c=config, n=num_splits: portable.decode(p, c, n) for p in problems]
                stretches[i] = timing.graph_stretch(calls, pool)
        except Exception as error:  # a configuration that does not compile or fit is a result
            row["status"] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    times = timing.time_in_rounds({**stretches, **timing.ceiling_stretches(seed)}, random.Random(seed), rounds=8)
    matmul = timing.matmul_tflops(statistics.median(times["matmul"]))
    for i in stretches:
        rows[i] |= {"repeats": len(times[i]), "matmul_tflops": round(matmul, 2), **timing.quantiles_us(times[i])}
    return rows


def main(argv: list[str]) -> int:
    """Sweep; returns the exit code."""
    parser = argparse.ArgumentParser(prog="triton-mla-bench tune", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="PATH", help="a CSV file, or a folder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("expected a CUDA GPU to sweep on, found none")
    path = records.output_path(args.output, "tune")
    run_id = records.start_run(path, ["tune", *argv], args.seed)
    keys = ("batch_size", "context_len", "num_heads", "page_size")
    done = {tuple(row[k] for k in keys) for row in records.read_rows(path)}
    for case in (*SIXTEEN_SHAPES, *MORE_CASES):
        if tuple(str(getattr(case, k)) for k in keys) in done:
            continue
        with torch.inference_mode():
            rows = tune_case(case, args.seed)
        records.append_rows(path, TUNE_COLUMNS, [{**dict.fromkeys(TUNE_COLUMNS), **r, "run_id": run_id} for r in rows])
        timed = [r for r in rows if "latency_us_p50" in r]
        best = min(timed, key=lambda r: r["latency_us_p50"])
        winner = " ".join(f"{c}={best[c]}" for c in TUNE_COLUMNS[5:11])
        print(f"{case.name}: {best['latency_us_p50']:.1f} us with {winner}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
