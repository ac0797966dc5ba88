"""Times cases: `python -m mla.measure.worker`, a JSON request on stdin, a JSON list of a list of rows a case on stdout.

The benchmark gives each case a process of its own, so that nothing that one leaves behind (memory, compiled code, a
broken context) meets the next; a run of `triton-mla-bench runs` is one process.
"""

import gc
import json
import random
import statistics
import sys

import torch

from mla.measure import timing
from mla.measure.cases import Case, draw_problems
from mla.measure.gate import check_result
from mla.measure.implementations import IMPLEMENTATIONS, Implementation, Prepared
from mla.problem import Problem

TIMERS = ("cuda_graph", "eager")


def _plan_us(prepared: Prepared) -> float | None:
    """Time of the work plan: on the host, or on the GPU where it comes with a decode that is taken off again."""
    if prepared.plan is None:
        return None
    if not prepared.plan_decodes:
        return round(timing.host_us(prepared.plan), 3)
    calls = {"both": prepared.plan, "decode": prepared.calls[0]}
    stretches = {name: timing.graph_stretch([call]) for name, call in calls.items()}
    times = timing.time_in_rounds(stretches, random.Random(0))
    return round((statistics.median(times["both"]) - statistics.median(times["decode"])) * 1e3, 3)


def check_replay(implementation: Implementation, stretch: timing.Stretch, problem: Problem) -> None:
    """Hold what the graph writes against the reference: what is timed was tuned and compiled again since the gate."""
    out, lse = stretch.last_result
    out.fill_(torch.nan)
    stretch.run()
    verdict = check_result(
        out,
        None if lse is None else lse * implementation.lse_factor,
        problem,
        rounds_scores=implementation.rounds_scores,
        is_per_head=implementation.is_per_head,
    )
    if not verdict.passed:
        raise ValueError(f"replayed graph: {verdict.status}")


def _stretches(
    prepared: dict[str, Prepared], timer: str, problem: Problem
) -> tuple[dict[str, timing.Stretch], dict[str, str]]:
    """What can be timed, and why the rest cannot; `problem` is the last of the inputs."""
    stretches, failures = {}, {}
    pool = torch.cuda.graph_pool_handle()
    for name, contestant in prepared.items():
        gc.collect()
        torch.cuda.empty_cache()
        try:
            if timer == "eager":
                stretch = timing.eager_stretch(contestant.calls)
            else:
                stretch = timing.graph_stretch(contestant.calls, pool)
                check_replay(IMPLEMENTATIONS[name], stretch, problem)
            stretches[name] = stretch
        except torch.OutOfMemoryError:
            failures[name] = "out_of_memory"
        except (RuntimeError, ValueError) as error:
            failures[name] = f"failed: {' '.join(str(error).split())[:200]}"
    return stretches, failures


def time_case(case: Case, names: list[str], timers: list[str], seed: int) -> list[dict[str, object]]:
    """One row for every implementation and timer, without the gate's columns."""
    problems = draw_problems(case, "cuda", seed)
    prepared, not_prepared = {}, {}
    for name in names:
        try:
            prepared[name] = IMPLEMENTATIONS[name].prepare(problems)
        except torch.OutOfMemoryError:
            not_prepared[name] = "out_of_memory"
    plans = {name: _plan_us(p) for name, p in prepared.items()}
    ceilings = timing.ceiling_stretches(seed)
    rng = random.Random(seed)
    rows = []
    for timer in timers:
        stretches, failures = _stretches(prepared, timer, problems[-1])
        times = timing.time_in_rounds({**stretches, **ceilings}, rng)
        measured = {
            "matmul_tflops": round(timing.matmul_tflops(statistics.median(times["matmul"])), 2),
            "read_gbps": round(timing.read_gbps(statistics.median(times["read"])), 2),
        }
        for name in names:
            row = {"implementation": name, "timer": timer, "plan_us": plans.get(name), **measured}
            row["num_splits"] = prepared[name].num_splits if name in prepared else None
            if name in stretches:
                row |= {"status": "ok", "repeats": len(times[name]), **timing.quantiles_us(times[name])}
            else:
                row |= {"status": {**not_prepared, **failures}[name]}
            rows.append(row)
        del stretches
    return rows


def main() -> None:
    request = json.load(sys.stdin)
    rows = []
    with torch.inference_mode():
        for case in request["cases"]:
            rows.append(time_case(Case(**case), request["names"], request["timers"], request["seed"]))
            gc.collect()
            torch.cuda.empty_cache()
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
