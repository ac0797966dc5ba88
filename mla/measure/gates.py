"""The gates of a group of cases, several at a time where they share the GPU, and the bar that shows their progress."""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from mla.measure.cases import Case
from mla.measure.gate import Verdict
from mla.measure.implementations import IMPLEMENTATIONS
from mla.measure.subprocesses import gate_in_process

# Gates that share the GPU: they check, they do not time.
_GATE_JOBS = 8
# Memory of a gate over that of its inputs: `absorbed` copies a ragged batch's contiguous cache and makes fp32 scores.
_GATE_MEMORY = 4


def _progress(total: int):
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, file=sys.stderr, unit="case", dynamic_ncols=True)


class Progress:
    """A bar on stderr; where tqdm is not installed, a line a step."""

    def __init__(self, total: int):
        self._bar = _progress(total)

    def step(self, text: str) -> None:
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
            return
        self._bar.set_postfix_str(text)
        self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _gate_jobs(cases: list[Case], device: str) -> int:
    """Gates at a time: fewer where their inputs are so large that they would crowd each other out of memory."""
    if device == "cpu":
        return _GATE_JOBS
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(1, min(_GATE_JOBS, memory // (_GATE_MEMORY * max(case.input_bytes for case in cases))))


def gate_group(
    selected: dict[Case, list[str]], device: str, seed: int, timeout_s: float, progress: Progress
) -> dict[tuple[str, Case], Verdict]:
    """Check each case's implementations; those that need the GPU to themselves come last, one by one."""

    def gate(name: str) -> list[tuple[tuple[str, Case], Verdict]]:
        found = []
        cases = [case for case, names in selected.items() if name in names]
        for case, verdict in gate_in_process(name, cases, device=device, seed=seed, timeout_s=timeout_s):
            found.append(((name, case), verdict))
            progress.step(f"check {name} {case.name}: {verdict.status[:60]}")
        return found

    names = [n for n in IMPLEMENTATIONS if any(n in chosen for chosen in selected.values())]
    shared = [n for n in names if not IMPLEMENTATIONS[n].is_exclusive]
    exclusive = [n for n in names if IMPLEMENTATIONS[n].is_exclusive]
    with ThreadPoolExecutor(_gate_jobs(list(selected), device)) as pool:
        results = list(pool.map(gate, shared))
    return dict(itertools.chain(*results, *map(gate, exclusive)))
