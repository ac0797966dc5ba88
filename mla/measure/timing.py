"""Timing on a GPU: all contestants of a shape in random order in the same rounds.

The card's speed drifts by up to 20% with heat, so that figures taken one after another cannot be compared. Inputs
rotate through several times the bytes that L2 holds.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mla.kernels.launch import device_facts
from mla.kernels.read import read_once

# A timed stretch of eager calls lasts about this long, so that the events' resolution (0.5 us) does not matter; the
# same calls in a graph may be shorter.
_STRETCH_MS = 2.0
_MAX_CALLS = 400
# Calls slower than this are timed in fewer rounds.
_SLOW_MS = 20.0


@dataclass(frozen=True)
class Stretch:
    """A run of calls that is timed as one.

    Args:
        run: enqueues the calls.
        num_calls: how many.
        calls: what a graph was captured from; kept, since the graph knows its inputs by address only.
        last_result: of a graph, what its last call writes, on the last of the inputs.
    """

    run: Callable[[], None]
    num_calls: int
    calls: Sequence[Callable[[], object]]
    last_result: object = None


def _estimate_ms(calls: Sequence[Callable[[], object]]) -> float:
    """Milliseconds a call, after one warm-up of each."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3 / len(calls)


def _calls_per_stretch(num_inputs: int, call_ms: float) -> int:
    """A multiple of the number of inputs that lasts about `_STRETCH_MS`."""
    rounds = min(_STRETCH_MS / (call_ms * num_inputs), _MAX_CALLS / num_inputs)
    return num_inputs * max(1, math.floor(rounds))


def eager_stretch(calls: Sequence[Callable[[], object]]) -> Stretch:
    """Calls enqueued one by one by Python: what a caller without CUDA graphs gets."""
    num_calls = _calls_per_stretch(len(calls), _estimate_ms(calls))

    def run() -> None:
        for i in range(num_calls):
            calls[i % len(calls)]()

    return Stretch(run, num_calls, calls)


def graph_stretch(calls: Sequence[Callable[[], object]], pool=None) -> Stretch:
    """The calls captured in one CUDA graph: no launch cost of the host, no overlap between calls.

    Args:
        calls: one a set of inputs.
        pool: memory pool shared with other graphs, whose intermediate results may then overwrite each other's.
    """
    num_calls = _calls_per_stretch(len(calls), _estimate_ms(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for i in range(num_calls):
            result = calls[i % len(calls)]()
    return Stretch(graph.replay, num_calls, calls, result)


def time_in_rounds(
    stretches: dict[str, Stretch], rng: random.Random, rounds: int = 10, repeats: int = 2
) -> dict[str, list[float]]:
    """Milliseconds a call of every stretch, all of them in random order in each round.

    Args:
        stretches: by name.
        rng: shuffles each round.
        rounds: passes over all stretches; a slow one takes part in every third only.
        repeats: timed runs a round, after one run that is not timed.

    Returns:
        name -> one value a timed run.
    """
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in stretches}
    is_slow = {name: _run_ms(stretch) > _SLOW_MS for name, stretch in stretches.items()}
    for i in range(rounds):
        taking_part = [name for name in stretches if i % 3 == 0 or not is_slow[name]]
        for name in rng.sample(taking_part, len(taking_part)):
            run = stretches[name].run
            if not is_slow[name]:
                run()
            for _ in range(repeats):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                events[name].append((begin, end))
            torch.cuda.synchronize()
    return {
        name: [begin.elapsed_time(end) / stretches[name].num_calls for begin, end in pairs]
        for name, pairs in events.items()
    }


def _run_ms(stretch: Stretch) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    stretch.run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def quantiles_us(values_ms: Sequence[float]) -> dict[str, float]:
    """p20, p50 and p80 in microseconds, by the columns' names."""
    cuts = statistics.quantiles(values_ms, n=5, method="inclusive")
    p20, p50, p80 = cuts[0], statistics.median(values_ms), cuts[3]
    return {f"latency_us_{name}": round(v * 1e3, 3) for name, v in (("p20", p20), ("p50", p50), ("p80", p80))}


def host_us(call: Callable[[], object], repeats: int = 20) -> float:
    """Median wall time of one call and the wait for its result, in microseconds."""
    call()
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples) * 1e6


# The ceilings, timed in the same rounds as the contestants.
MATMUL_SIZE = 8192
READ_BYTES = 2**30


def ceiling_stretches(seed: int) -> dict[str, Stretch]:
    """`matmul` (8192³ bf16, random data) and `read` (1 GiB, once through), each as a CUDA graph."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator) for _ in range(2))
    c = torch.empty_like(a)
    x = torch.randint(2**31 - 1, (READ_BYTES // 4,), dtype=torch.int32, device="cuda", generator=generator)
    parities = torch.empty(8 * device_facts(x.device).num_sms, dtype=torch.int32, device="cuda")
    return {
        "matmul": graph_stretch([lambda: torch.mm(a, b, out=c)]),
        "read": graph_stretch([lambda: read_once(x, parities)]),
    }


def matmul_tflops(call_ms: float) -> float:
    """Rate of the matmul ceiling, TFLOPS."""
    return 2 * MATMUL_SIZE**3 / call_ms / 1e9


def read_gbps(call_ms: float) -> float:
    """Rate of the read ceiling, GB/s (10^9 bytes)."""
    return READ_BYTES / call_ms / 1e6
