"""`triton-mla-bench prefill`: the fused prefill kernel beside torch's scaled_dot_product_attention, by backend.

Whole prompts, and chunks against a cache that holds tokens already. A case's contestants are checked against an fp32
reference and then timed in random order in the same rounds. Torch's attention takes keys in one piece, and its flash
backend values as wide as keys: it is timed with putting them together, as a layer has to, and without. For whole
prompts the first call at a length that the process has not had is timed once, by the clock: cuDNN makes a plan for
each.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from mla.kernels.prefill import PrefillConfig, fitting_configs
from mla.measure import records, timing
from mla.measure.command import command_parser, run_command
from mla.measure.prefill_cases import CASES, Gate, Inputs, PrefillCase, draw_inputs
from mla.prefill import SDPA_BACKENDS, assemble, mla_prefill, sdpa_prefill
from mla.schema import PREFILL_COLUMNS

Call = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
# Tokens by which a prompt of a new length is longer than its case.
_LONGER = 8


def contestants(case: PrefillCase, sets: Sequence[Inputs]) -> Iterator[tuple[dict[str, object], list[Call]]]:
    """Columns of each contestant, and its calls, one a data set."""
    c = case.config
    element_size, device = sets[0][0].element_size(), sets[0][0].device
    for config in fitting_configs(c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, element_size, device):
        columns = {"implementation": "fused", "config": config_name(config), "assembly": "none"}
        yield (
            columns,
            [lambda x=x, config=config: mla_prefill(*x, softmax_scale=c.softmax_scale, config=config) for x in sets],
        )
    for name in SDPA_BACKENDS:

        def attend(q, k, v, name=name):
            out = sdpa_prefill(q, k, v, softmax_scale=c.softmax_scale, backends=(name,))
            return out[..., : c.v_head_dim], None

        for_flash = name == "flash"
        columns = {"implementation": f"sdpa_{name}"}
        yield (
            {**columns, "assembly": "timed"},
            [lambda x=x, attend=attend, for_flash=for_flash: attend(*assemble(*x, for_flash=for_flash)) for x in sets],
        )
        if name == "math":
            # it holds the square matrix twice over then, for nothing that a layer could use
            continue
        assembled = [assemble(*x, for_flash=for_flash) for x in sets]
        yield {**columns, "assembly": "untimed"}, [lambda x=x, attend=attend: attend(*x) for x in assembled]


def config_name(config: PrefillConfig) -> str:
    """Such as "m128-n64-w8-s3": query tokens, keys, warps, stages."""
    return f"m{config.block_m}-n{config.block_n}-w{config.num_warps}-s{config.num_stages}"


def measure_case(case: PrefillCase, seed: int) -> list[dict[str, object]]:
    """Check and time every contestant of one case; one row each, failed ones included."""
    sets = draw_inputs(case, "cuda", seed)
    gate = Gate(case, sets[0])
    rows, stretches = [], {}
    pool = torch.cuda.graph_pool_handle()
    for columns, calls in contestants(case, sets):
        row = {**case.to_columns(), **columns, "timer": "cuda_graph", "l2_state": "cold", "flops": case.flops}
        rows.append({**row, "passed": False})
        try:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out, lse = calls[0]()
            rows[-1] |= gate.check(out, lse)
            del out, lse
            gc.collect()
            torch.cuda.empty_cache()
            if torch.cuda.max_memory_allocated() - before > torch.cuda.mem_get_info()[0]:
                # a capture that runs out of memory may leave the stream unusable
                raise torch.OutOfMemoryError
            if rows[-1]["passed"]:
                stretches[len(rows) - 1] = timing.graph_stretch(calls, pool)
        except torch.OutOfMemoryError:
            rows[-1] |= {"status": "out_of_memory", "passed": False}
        except Exception as error:  # whatever a contestant does is its result, not our crash
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            # torch says so where a backend does not take widths, mask or dtype
            kind = "refused" if "No available kernel" in str(error) else "failed"
            rows[-1] |= {"status": f"{kind}: {reason}", "passed": False}
        gc.collect()
        torch.cuda.empty_cache()
    times = timing.time_in_rounds({**stretches, **timing.ceiling_stretches(seed)}, random.Random(seed), rounds=8)
    matmul = timing.matmul_tflops(statistics.median(times["matmul"]))
    for i in stretches:
        rows[i] |= {"repeats": len(times[i]), "matmul_tflops": round(matmul, 2), **timing.quantiles_us(times[i])}
    return rows


def measure_new_length(case: PrefillCase, seed: int) -> list[dict[str, object]]:
    """What the first call takes at a new length, for the fused kernel and cuDNN; to be called after `measure_case`.

    The kernels are compiled then, and what is new is the length, a few tokens longer than the case's; its results are
    not checked again.
    """
    longer = replace(case, q_len=case.q_len + _LONGER, context_len=case.context_len + _LONGER)
    (inputs,), scale = draw_inputs(longer, "cuda", seed, at_most=1), case.config.softmax_scale
    calls = {
        "fused": lambda: mla_prefill(*inputs, softmax_scale=scale),
        "sdpa_cudnn": lambda: sdpa_prefill(
            *assemble(*inputs, for_flash=False), softmax_scale=scale, backends=("cudnn",)
        ),
    }
    rows = []
    for name, call in calls.items():
        row = {**case.to_columns(), "implementation": name, "assembly": "none" if name == "fused" else "timed"}
        rows.append({**row, "timer": "new_length", "flops": longer.flops, "passed": False})
        try:
            rows[-1] |= {"latency_us_p50": round(_wall_us(call), 3), "repeats": 1, "passed": True, "status": "ok"}
        except Exception as error:  # whatever a contestant does is its result, not our crash
            rows[-1]["status"] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return rows


def _wall_us(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6


def _print_rows(case: PrefillCase, rows: list[dict[str, object]]) -> None:
    for row in rows:
        label = f"{case.name:24} {row['implementation']:15} {row.get('config', ''):16} {row['assembly']:8}"
        if row["status"] != "ok":
            print(label, row["status"], flush=True)
            continue
        us = row["latency_us_p50"]
        if row["timer"] == "new_length":
            print(f"{label} {us / 1e3:9.3f} ms at a new length", flush=True)
            continue
        tflops = row["flops"] / us / 1e6
        share = tflops / row["matmul_tflops"]
        print(f"{label} {us / 1e3:9.3f} ms  {tflops:6.1f} TFLOPS ({share:4.0%} of matmul)", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("prefill", __doc__)
    parser.add_argument("--max-context", type=int, default=32768, metavar="N", help="leave longer cases out")
    return parser


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure what has no rows in the file yet; returns the number of rows that failed."""
    path = records.output_path(args.output, "prefill")
    records.check_columns(path, PREFILL_COLUMNS)
    run_id = records.start_run(path, ["prefill", *argv], args.seed)
    keys = tuple(CASES[0].to_columns())
    done = {tuple(row[k] for k in keys) for row in records.read_rows(path)}
    num_failed = 0
    for case in CASES:
        if case.context_len > args.max_context or tuple(map(str, case.to_columns().values())) in done:
            continue
        with torch.inference_mode():
            rows = measure_case(case, args.seed)
            gc.collect()
            torch.cuda.empty_cache()
            if case.q_len == case.context_len:
                rows += measure_new_length(case, args.seed)
        filled = [{**dict.fromkeys(PREFILL_COLUMNS), **row, "run_id": run_id} for row in rows]
        records.append_rows(path, PREFILL_COLUMNS, filled)
        _print_rows(case, rows)
        num_failed += sum(row["status"].startswith("failed") for row in rows)
    return num_failed


def main(argv: list[str]) -> int:
    """Measure; returns the exit code."""
    return run_command(_parser(), argv, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
