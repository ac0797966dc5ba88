"""What the sweep tries with the Hopper kernel: each way to divide the work, with and without L2 prefetch.

The kernel chooses by a rule (`mla.kernels.work_plan`). Its choice is marked among the ways that were timed, so that the
data judges it.
"""

from collections.abc import Callable
from functools import partial

import torch

from mla.kernels import hopper_launch, work_plan
from mla.measure.cases import GROUPS, Case
from mla.measure.implementations import Call, prepare_hopper
from mla.problem import Problem

CASES = tuple(case for group in ("sixteen", "long", "ragged") for case in GROUPS[group])
MODES = {
    "whole": work_plan.WHOLE.value,
    "equal_runs": work_plan.EQUAL_RUNS.value,
    "even_shares": work_plan.EVEN_SHARES.value,
}


def _is_same_plan(a: work_plan.WorkPlan, b: work_plan.WorkPlan) -> bool:
    # what follows the fields is not written
    width = len(work_plan.PART_FIELDS)
    return torch.equal(a.parts[:, :width], b.parts[:, :width])


def variants(case: Case, problems: list[Problem]) -> list[tuple[dict[str, object], Callable[[], list[Call]]]]:
    """Columns of each variant, and what makes its calls; `by_rule` where it is what the kernel does by itself."""
    first = problems[0]
    q, out = first.q_absorbed, first.q_absorbed[..., : first.config.kv_lora_rank]
    own_prefetch = hopper_launch.HopperLaunch(q, first.kv_cache, first.block_table, out).prefetch
    own_plan = hopper_launch.plan_hopper(first.seq_lens, case.num_heads).work
    found = []
    for name, mode in MODES.items():
        # one run a request is no division, and leaves all but num_parts requests to the last part
        if name == "equal_runs" and 2 * case.batch_size > len(own_plan.parts):
            continue
        plan = hopper_launch.plan_hopper(first.seq_lens, case.num_heads, mode=mode).work
        is_own = _is_same_plan(plan, own_plan)
        for prefetch in (True, False):
            columns = {
                "kernel": "hopper",
                "mode": name,
                "prefetch": "on" if prefetch else "off",
                "by_rule": is_own and prefetch == own_prefetch,
            }
            prepare = partial(prepare_hopper, problems, mode=mode, prefetch=prefetch)
            found.append((columns, lambda prepare=prepare: prepare().calls))
    return found
