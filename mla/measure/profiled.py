"""One call under torch's profiler: `python -m mla.measure.profiled`, a JSON request on stdin, the answer on stdout."""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from mla.decode import mla_decode, plan_decode
from mla.measure.cases import Case, draw_problems
from mla.measure.implementations import IMPLEMENTATIONS, Prepared
from mla.measure.opponent import check
from mla.problem import Problem

_REPEATS = 5
# Work on the GPU in a trace of torch's profiler.
_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def kernels_of(trace: dict[str, object]) -> list[dict[str, object]]:
    """Kernels, copies and fills on the GPU in the order in which they began.

    Args:
        trace: as torch's profiler exports it for Chrome.

    Returns:
        kernel_name, grid and block (as "x y z", empty for copies) and us of each.
    """
    events = [event for event in trace["traceEvents"] if event.get("cat") in _CATEGORIES]
    return [
        {
            "kernel_name": event["name"],
            **{k: " ".join(map(str, event.get("args", {}).get(k, ()))) for k in ("grid", "block")},
            "us": event["dur"],
        }
        for event in sorted(events, key=lambda event: event["ts"])
    ]


def summarise(step: str, repeats: list[list[dict[str, object]]]) -> list[dict[str, object]]:
    """The kernels of one step, each with the median of its times.

    Args:
        step: `plan` or `call`.
        repeats: `kernels_of` for each repeat.

    Raises:
        ValueError: the repeats launched different kernels, or none.
    """
    names = [[k["kernel_name"] for k in kernels] for kernels in repeats]
    if not names[0] or any(other != names[0] for other in names):
        raise ValueError(f"{step}: expected the same kernels at every repeat, at least one, got {names}")
    return [
        {
            "step": step,
            "position": i,
            **{k: same[0][k] for k in ("kernel_name", "grid", "block")},
            "latency_us_p50": round(statistics.median(k["us"] for k in same), 3),
            "repeats": len(repeats),
        }
        for i, same in enumerate(zip(*repeats, strict=True))
    ]


def profile_step(step: str, calls: list[Callable[[], object]]) -> list[dict[str, object]]:
    """`summarise` of some calls, which take turns; the first use of the profiler is not counted."""
    repeats = []
    for i in range(_REPEATS + 1):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            calls[i % len(calls)]()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            repeats.append(kernels_of(json.loads(path.read_text())))
    return summarise(step, repeats[1:])


@contextmanager
def inductor_account() -> Iterator[dict[str, int]]:
    """Bytes that torch.compile's compiler says its kernels read and write, of what is compiled within.

    Of a product's operands it counts too little where they are large: at most 1e9 numbers if the product is a
    library's, at most as many as it has results if it is a generated one.

    Yields:
        `inductor_read_bytes` and `inductor_written_bytes`, filled while compiling; empty where nothing is compiled.
    """
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    account, original = {}, GraphLowering.compile_to_module

    def compile_to_module(graph):
        module = original(graph)
        for column, sizes in (("read", "get_read_buffer_sizes"), ("written", "get_write_buffer_sizes")):
            name = f"inductor_{column}_bytes"
            # a call of several graphs runs them all
            account[name] = account.get(name, 0) + sum(getattr(node, sizes)() for node in graph.scheduler.nodes)
        return module

    GraphLowering.compile_to_module = compile_to_module
    try:
        # what comes from a cache is not lowered
        with config.patch(force_disable_caches=True):
            yield account
    finally:
        GraphLowering.compile_to_module = original


def allocated_bytes(call: Callable[[], object]) -> tuple[int, int]:
    """Bytes that a call asks of torch's allocator on the GPU, and those of the tensors it returns."""
    before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
    results = call()
    after = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
    return after - before, sum(t.nbytes for t in results if t is not None)


def written_bytes(scratch: list[torch.Tensor], run: Callable[[], object]) -> int:
    """Bytes of floating-point scratch that hold something after a run; filled with NaN before it."""
    for tensor in scratch:
        tensor.fill_(torch.nan)
    run()
    return sum(int((~tensor.isnan()).sum()) * tensor.element_size() for tensor in scratch)


def _scratch_bytes(name: str, problem: Problem) -> int:
    """Of the plan that the Hopper kernel's calls share; other implementations have no scratch between calls."""
    if name != "hopper":
        return 0
    p, plan = problem, plan_decode(problem.seq_lens, problem.config.num_heads)
    return written_bytes(
        [plan.hopper.part_out, plan.hopper.part_lse],
        lambda: mla_decode(
            p.q_absorbed, p.kv_cache, p.block_table, p.seq_lens, softmax_scale=p.softmax_scale,
            kv_lora_rank=p.config.kv_lora_rank, plan=plan,
        ),
    )  # fmt: skip


def count(name: str, case: Case, seed: int) -> dict[str, object]:
    """What one call of an implementation launches and allocates."""
    problems = draw_problems(case, "cuda", seed)
    implementation = IMPLEMENTATIONS[name]
    with inductor_account() as account:
        prepared: Prepared = implementation.prepare(problems)
        for call in prepared.calls:
            call()
    status, rel_err = check(implementation, prepared, problems)
    answer = {"status": status, "rel_err": f"{rel_err:.3e}", "kernels": [], **account}
    if status != "ok":
        return answer
    answer["allocated_bytes"], answer["output_bytes"] = allocated_bytes(prepared.calls[0])
    answer["scratch_bytes"] = _scratch_bytes(name, problems[0])
    if prepared.plan is not None:
        answer["kernels"] += profile_step("plan", [prepared.plan])
    answer["kernels"] += profile_step("call", prepared.calls)
    return answer


def main() -> None:
    request = json.load(sys.stdin)
    try:
        with torch.inference_mode():
            answer = count(request["name"], Case(**request["case"]), request["seed"])
    except Exception as error:  # what an implementation cannot do is a result
        answer = {"status": f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}", "kernels": []}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
