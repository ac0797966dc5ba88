"""No CTA merges a divided request before all of its runs are there, and none waits forever, in any order tried.

A plain-Python model of the counters of `mla.kernels.hopper_merge`. What a CTA does behind its runs is not written again
here: `_end_of_cta` executes the end of the kernel's source with stand-ins for Gluon, which note each operation. `_play`
executes the CTAs of a launch in a random order, each as two warps that run apart and stand for the two consumers:

    write     half of a run's partial result
    barrier   passed when both warps have come to it
    count     added to a request's counter, a 32-bit integer, by the first warp
    wait      passed when the kernel's loop would end
    merge     reads the partial results of all runs, which must have been written and counted in this launch
"""

import ast
import functools
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from mla.kernels.work_plan import PART_FIELDS, PART_WIDTH, make_work_plan
from mla.tests.kernels.barrier_machine import HazardError

KERNELS = Path(__file__).parents[2] / "kernels"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARPS = range(2)
# two blocks of heads, the second with fewer heads than some requests have runs
HEADS = [64, 3]
ROW_WIDTH = 2 + len(HEADS)


def _random_division(seed):
    rng = random.Random(seed)
    lengths = [rng.choice([0, 64, rng.randint(65, 2000), rng.randint(2000, 6000)]) for _ in range(rng.randint(1, 6))]
    return lengths, rng.randint(len(lengths), 9)


# Lengths and number of parts. In "chain" and "ragged" a part ends one divided request and begins the next.
DIVISIONS = {
    "1-request": ([64 * 40], 7),
    "2-requests": ([4000, 4000], 6),
    "in-one-part": ([64 * 60, 100, 64, 3000], 5),
    "chain": ([3000, 100, 4000, 5000, 50], 8),
    "ragged": ([700, 0, 2900, 1500, 6000, 64], 10),
    **{f"random-{seed}": _random_division(seed) for seed in range(4)},
}


def _source(name):
    return ast.parse((KERNELS / name).read_text()).body


def _compiled(statements):
    """Statements as plain Python: without decorators and imports."""
    kept = [n for n in statements if not isinstance(n, ast.Import | ast.ImportFrom)]
    for node in kept:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    return compile(ast.Module(kept, type_ignores=[]), "<kernel>", "exec")


_FUNCTIONS = {n.name: n for f in ("hopper.py", "hopper_merge.py") for n in _source(f) if isinstance(n, ast.FunctionDef)}
_BODY = _FUNCTIONS["mla_decode_hopper_kernel"].body
_JOIN = next(i for i, n in enumerate(_BODY) if ast.unparse(n).startswith("gl.warp_specialize("))
_MERGE, _FIELD, _END = (
    _compiled(_source("hopper_merge.py")),
    _compiled([_FUNCTIONS["_field"]]),
    _compiled(_BODY[_JOIN + 1 :]),
)
_LOOP = next(n for n in ast.walk(_FUNCTIONS["merge_request"]) if isinstance(n, ast.While))
_LOOP_TEST = compile(ast.Expression(_LOOP.test), "<kernel>", "eval")
_CONSTANTS = {"gl": SimpleNamespace(constexpr=lambda value: value)}
exec(_MERGE, _CONSTANTS)
FULL_COUNT = _CONSTANTS["_FULL_COUNT"]


def _is_waiting(counter) -> bool:
    """Whether the kernel's loop goes on."""
    names = {"_load_acquire": lambda _: counter, "plan_row": 0, "head_block": 0, "_FULL_COUNT": FULL_COUNT}
    return eval(_LOOP_TEST, names)


def _end_of_cta(plan, head_block, part) -> list[tuple]:
    """The operations behind the runs of a CTA: (kind, ...); a counter is named by its place in plan.requests."""
    operations = []
    memory = plan.requests.flatten().tolist() + plan.parts.flatten().tolist()

    def note(*operation):
        operations.append(operation)

    def atomic_add(counter, amount, sem):
        assert sem == "release"
        note("count", counter, amount)

    def load_acquire(counter):
        assert operations[-1] != ("wait", counter), "the loop goes on at a multiple of FULL_COUNT"
        note("wait", counter)
        return 0

    gl = SimpleNamespace(
        constexpr=lambda value: value,
        program_id=(head_block, part).__getitem__,
        num_programs=(len(HEADS), len(plan.parts)).__getitem__,
        load=memory.__getitem__,
        where=lambda condition, a, b: a if condition else b,
        minimum=min,
        thread_barrier=lambda: note("barrier"),
        atomic_add=atomic_add,
    )
    names = {"gl": gl, "PART_WIDTH": PART_WIDTH.value, **{name.upper(): i for i, name in enumerate(PART_FIELDS)}}
    exec(_MERGE, names)
    exec(_FIELD, names)
    # request, first part, number of runs, first and last row of the merge's arguments
    names |= {"_load_acquire": load_acquire, "_merge_rows": lambda *arguments: note("merge", *arguments[4:9])}
    tensors = ("part_out_ptr", "part_lse_ptr", "out_ptr", "lse_ptr", "stride_out_batch", "stride_out_head")
    names |= {"requests_ptr": 0, "parts_ptr": plan.requests.numel(), **dict.fromkeys(tensors)}
    exec(_END, names | {"head_block": head_block, "num_heads": sum(HEADS)})
    return operations


class Cta(NamedTuple):
    """A CTA's place in the grid and what it does."""

    head_block: int
    part: int
    operations: list[tuple]


@functools.cache
def _plan(division):
    lengths, num_parts = DIVISIONS[division]
    return make_work_plan(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), num_parts, len(HEADS))


@functools.cache
def _launch(division) -> list[Cta]:
    plan, ctas = _plan(division), []
    for part, (num_runs, request, first_tile, end_request, *_) in enumerate(plan.parts.tolist()):
        # as `_finish` in the kernel decides it
        runs = range(request, request + num_runs)
        writes = [("write", r) for r in runs if (r == request and first_tile > 0) or r == end_request]
        ctas += [Cta(block, part, writes + _end_of_cta(plan, block, part)) for block in range(len(HEADS))]
    return ctas


def _play(ctas, counters, seed, num_resident=None):
    """One launch in a random order of its warps; raise HazardError if something is read early or never comes.

    Args:
        counters: place -> value; those that are divided requests' are changed.
        num_resident: CTAs that run at a time, the next when one has ended; None for all.
    """
    rng = random.Random(seed)
    weights = [[rng.choice([1, 1, 5, 30]) for _ in WARPS] for _ in ctas]
    done = [[0 for _ in WARPS] for _ in ctas]
    written, counts, rows = set(), Counter(), {}

    def is_ready(c, w):
        if done[c][w] == len(ctas[c].operations):
            return False
        kind, *arguments = ctas[c].operations[done[c][w]]
        if kind == "barrier":
            return min(done[c]) >= done[c][w]
        return kind != "wait" or not _is_waiting(counters[arguments[0]])

    while True:
        running = [c for c, cta in enumerate(ctas) if min(done[c]) < len(cta.operations)][:num_resident]
        ready = [(c, w) for c in running for w in WARPS if is_ready(c, w)]
        if not ready:
            break
        ((c, w),) = rng.choices(ready, [weights[c][w] for c, w in ready])
        block, part, operations = ctas[c]
        kind, *arguments = operations[done[c][w]]
        done[c][w] += 1
        if kind == "write":
            written.add((block, *arguments, part, w))
        elif kind == "count" and w == 0:
            counter, amount = arguments
            counters[counter] = (counters[counter] + amount + 2**31) % 2**32 - 2**31
            counts[counter] += 1
        elif kind == "merge":
            request, first_part, num_runs, row, end_row = arguments
            needed = {(block, request, first_part + i, v) for i in range(num_runs) for v in WARPS}
            if counts[request * ROW_WIDTH + 2 + block] != num_runs or not needed <= written:
                raise HazardError(f"early: part {part} merges request {request} before all of its runs are there")
            rows.setdefault((block, request, w), []).extend(range(row, end_row))
    if running:
        raise HazardError(f"deadlock: parts {sorted({ctas[c].part for c in running})} wait")
    for block, request, _, w in written:
        if sorted(rows.get((block, request, w), [])) != list(range(HEADS[block])):
            raise HazardError(f"wrong: not every row of request {request} is merged once")


def _counters(start):
    return dict.fromkeys(range(ROW_WIDTH * max(len(lengths) for lengths, _ in DIVISIONS.values())), start)


def test_the_divisions_have_every_kind_of_part():
    """Such as share no request, one, or two; and a request has more runs than heads in its second block."""
    shared = {sum(kind == "wait" for kind, *_ in cta.operations) for d in DIVISIONS for cta in _launch(d)}
    assert shared == {0, 1, 2}
    num_runs = {op[3] for d in DIVISIONS for cta in _launch(d) for op in cta.operations if op[0] == "merge"}
    assert min(num_runs) == 2
    assert max(num_runs) > min(HEADS)


# new counters, one addition from 0, and from overflow, where many launches lead
@pytest.mark.parametrize("start", [0, -FULL_COUNT, 2**31 - FULL_COUNT], ids=lambda n: f"from{n}")
@pytest.mark.parametrize("division", DIVISIONS)
def test_launches_in_random_orders(division, start):
    ctas = _launch(division)
    divided = {op[1] for cta in ctas for op in cta.operations if op[0] == "count"}
    for seed in range(6):
        counters = _counters(start)
        for launch in range(3):
            _play(ctas, counters, 3 * seed + launch)
        end = (start + 3 * FULL_COUNT + 2**31) % 2**32 - 2**31
        assert counters == _counters(start) | dict.fromkeys(divided, end)


def _with_first_amount(change):
    """The first run of a request, which alone does not add 1, adds something else."""

    def fault(operations):
        return [("count", op[1], change(op[2])) if op[0] == "count" and op[2] != 1 else op for op in operations]

    return fault


def _without_barrier(number):
    def fault(operations):
        places = [i for i, op in enumerate(operations) if op[0] == "barrier"]
        return [op for i, op in enumerate(operations) if i != places[number]]

    return fault


def _counts_last(operations):
    """Counts its runs when it has waited for the others, and merged."""
    counts = [op for op in operations if op[0] == "count"]
    return [op for op in operations if op[0] != "count"] + counts


# a name, what it must be reported as, what becomes of a CTA's operations, where counters start, CTAs that are resident
FAULTS = {
    "first-run-adds-one": ("deadlock", _with_first_amount(lambda amount: 1), 0, None),
    "first-run-adds-too-much": ("early", _with_first_amount(lambda amount: amount + 1), 0, None),
    "first-run-adds-too-little": ("deadlock", _with_first_amount(lambda amount: amount - 1), 0, None),
    "waits-before-it-counts": ("early", _counts_last, 0, None),
    "no-barrier-before-counting": ("early", _without_barrier(0), 0, None),
    "no-barrier-behind-counting": ("early", _without_barrier(1), 0, None),
    "counter-starts-above-a-multiple": ("early", list, 1, None),
    "counter-starts-below-a-multiple": ("early", list, -1, None),
    "counter-starts-half-way": ("deadlock", list, FULL_COUNT // 2, None),
    "not-all-resident": ("deadlock", list, 0, 3),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name):
    expected, fault, start, num_resident = FAULTS[name]
    reports = set()
    for seed in range(10):
        for division in DIVISIONS:
            ctas = [cta._replace(operations=fault(cta.operations)) for cta in _launch(division)]
            try:
                _play(ctas, _counters(start), seed, num_resident)
            except HazardError as error:
                reports.add(str(error).split(":")[0])
    assert expected in reports


def test_loads_of_the_counter_are_acquiring():
    assert '"ld.acquire.gpu.global.u32 $0, [$1];"' in ast.unparse(_FUNCTIONS["_load_acquire"]).replace("'", '"')
