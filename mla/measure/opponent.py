"""One way to write the baseline in torch, checked and timed beside our kernels: `python -m mla.measure.opponent`.

As a process it reads one JSON request from stdin and answers a JSON list of rows. A process an opponent: torch.compile
keeps state, and one that fails costs nothing but itself.
"""

import gc
import json
import random
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields

import torch
from torch.nn.functional import scaled_dot_product_attention

from mla.measure import timing
from mla.measure.cases import Case, draw_problems
from mla.measure.gate import check_result
from mla.measure.implementations import IMPLEMENTATIONS, Implementation, Prepared
from mla.measure.worker import check_replay
from mla.problem import Problem

# Our kernels, timed in the same rounds as each opponent.
OWN = ("portable", "hopper")
# Modes of torch.compile that capture CUDA graphs of their own, which no other graph can hold.
GRAPH_MODES = ("reduce-overhead", "max-autotune")
CHOICES = {
    "form": ("matmul", "sdpa"),
    "cache": ("contiguous", "gathered"),
    "precision": ("bf16", "fp32_scores", "tf32", "fp32"),
    "compile_mode": ("eager", "default", "max-autotune-no-cudagraphs", *GRAPH_MODES),
}


@dataclass(frozen=True)
class Opponent:
    """A baseline that computes the absorbed form in torch.

    Args:
        form: two matrix products with a softmax between (`matmul`), or torch's scaled_dot_product_attention with the
            heads as the rows of one query (`sdpa`).
        cache: read where it is (`contiguous`), or copied from its pages first (`gathered`).
        precision: of the products. `bf16`: of the inputs, scores included; `fp32_scores`: 16-bit operands, scores kept
            in fp32; `fp32` and `tf32`: operands converted to fp32, multiplied as such or on tensor cores in TF32.
        compile_mode: of torch.compile, or `eager`.

    Raises:
        ValueError: a value is unknown.
    """

    form: str = "matmul"
    cache: str = "contiguous"
    precision: str = "bf16"
    compile_mode: str = "default"

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) not in CHOICES[field.name]:
                expected = ", ".join(CHOICES[field.name])
                raise ValueError(f"{field.name}: expected one of {expected}, got {getattr(self, field.name)!r}")

    @property
    def name(self) -> str:
        return "/".join(asdict(self).values())

    @property
    def timers(self) -> tuple[str, ...]:
        """How it can be timed: a mode with CUDA graphs of its own by launching those from Python alone."""
        return ("eager",) if self.compile_mode in GRAPH_MODES else ("cuda_graph", "eager")

    @property
    def implementation(self) -> Implementation:
        """What the benchmark's checks take."""
        # which kernel sdpa comes to, and whether its scores leave it, is torch's choice
        return Implementation(self.prepare, rounds_scores=self.precision == "bf16", needs_gpu=True)

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor | None,
        tokens: int,
        rank: int,
        scale: float,
    ) -> torch.Tensor:
        """What is compiled.

        Args:
            q: (batch_size, num_heads, cache_dim).
            cache: (batch_size, tokens, cache_dim), or pages where there is a block_table.
            block_table: (batch_size, max_pages), or None.
            tokens: cached tokens of each request.
            rank: kv_lora_rank.
            scale: softmax_scale.

        Returns:
            out (batch_size, num_heads, kv_lora_rank).
        """
        dtype = q.dtype
        if block_table is not None:
            # torch 2.11 multiplies an int32 page id by the page's size in 32 bits
            cache = cache[block_table.long()].flatten(1, 2)[:, :tokens]
        if self.form == "sdpa":
            return scaled_dot_product_attention(q[:, None], cache[:, None], cache[:, None, :, :rank], scale=scale)[:, 0]
        if self.precision in ("tf32", "fp32"):
            q, cache = q.float(), cache.float()
        keys = cache.transpose(1, 2)
        in_fp32 = self.precision == "fp32_scores"
        scores = torch.bmm(q, keys, out_dtype=torch.float32) if in_fp32 else torch.bmm(q, keys)
        probabilities = torch.softmax(scores.float() * scale, dim=-1).to(q.dtype)
        return torch.bmm(probabilities, cache[..., :rank]).to(dtype)

    def prepare(self, problems: list[Problem]) -> Prepared:
        """Compile and warm up; one call a problem, which gives (out, None)."""
        first = problems[0]
        sizes = first.kv.shape[1], first.config.kv_lora_rank, first.softmax_scale

        def attend(q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor | None) -> torch.Tensor:
            return self.attend(q, cache, block_table, *sizes)

        if self.compile_mode != "eager":
            attend = torch.compile(attend, mode=self.compile_mode, fullgraph=True, dynamic=False)

        def call(p: Problem) -> tuple[torch.Tensor, None]:
            with _matmul_precision("high" if self.precision == "tf32" else "highest"):
                if self.cache == "gathered":
                    return attend(p.q_absorbed, p.kv_cache, p.block_table), None
                return attend(p.q_absorbed, p.kv, None), None

        # CUDA graphs of torch.compile are run, then captured, and only the third call is a replay
        for _ in range(3):
            call(first)
        return Prepared([lambda p=p: call(p) for p in problems])


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    """Of fp32 matrix products, for the opponent alone: the reference is computed in full fp32."""
    if torch.get_float32_matmul_precision() == precision:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check(implementation: Implementation, prepared: Prepared, problems: list[Problem]) -> tuple[str, float]:
    """Status and relative error of the first or the last problem, whichever is worse."""
    verdicts = []
    for i in sorted({0, len(problems) - 1}):
        out, lse = prepared.calls[i]()
        verdicts.append(
            check_result(out, lse, problems[i], rounds_scores=implementation.rounds_scores, is_per_head=False)
        )
        del out, lse
    worst = max(verdicts, key=lambda v: (not v.passed, v.rel_err))
    return worst.status, worst.rel_err


def time_opponent(opponent: Opponent, case: Case, own: list[str], seed: int) -> list[dict[str, object]]:
    """Check one opponent and time it in the same rounds as our kernels; a row a timer."""
    problems = draw_problems(case, "cuda", seed)
    prepared = opponent.prepare(problems)
    status, rel_err = check(opponent.implementation, prepared, problems)
    common = {"rel_err": f"{rel_err:.3e}", "status": status}
    if status != "ok":
        return [{**common, "timer": timer} for timer in opponent.timers]
    ours = {name: IMPLEMENTATIONS[name].prepare(problems) for name in own}
    ceilings = timing.ceiling_stretches(seed)
    rows = []
    for timer in opponent.timers:
        gc.collect()
        torch.cuda.empty_cache()
        stretches = _stretches({"opponent": prepared, **ours}, opponent.implementation, timer, problems[-1])
        times = timing.time_in_rounds({**stretches, **ceilings}, random.Random(seed), rounds=6)
        medians = {name: statistics.median(values) for name, values in times.items()}
        rows.append(
            {
                **common,
                "timer": timer,
                "repeats": len(times["opponent"]),
                **timing.quantiles_us(times["opponent"]),
                **{f"{name}_us_p50": round(medians[name] * 1e3, 3) for name in own},
                "matmul_tflops": round(timing.matmul_tflops(medians["matmul"]), 2),
                "read_gbps": round(timing.read_gbps(medians["read"]), 2),
            }
        )
    return rows


def _stretches(
    prepared: dict[str, Prepared], opponent: Implementation, timer: str, last: Problem
) -> dict[str, timing.Stretch]:
    """Calls of the opponent and of ours, as one timer takes them; each captured graph is checked."""
    if timer == "eager":
        return {name: timing.eager_stretch(p.calls) for name, p in prepared.items()}
    pool = torch.cuda.graph_pool_handle()
    stretches = {}
    for name, p in prepared.items():
        stretches[name] = timing.graph_stretch(p.calls, pool)
        check_replay(opponent if name == "opponent" else IMPLEMENTATIONS[name], stretches[name], last)
    return stretches


def main() -> None:
    request = json.load(sys.stdin)
    opponent, case = Opponent(**request["opponent"]), Case(**request["case"])
    try:
        with torch.inference_mode():
            rows = time_opponent(opponent, case, request["own"], request["seed"])
    except torch.OutOfMemoryError:
        rows = [{"timer": timer, "status": "out_of_memory"} for timer in opponent.timers]
    except Exception as error:  # what an opponent cannot do is a result
        status = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        rows = [{"timer": timer, "status": status} for timer in opponent.timers]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
