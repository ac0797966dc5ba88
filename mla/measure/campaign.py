"""`triton-mla-bench campaign`: random decode steps, each kernel's result held against the reference.

Lengths, heads, batches, splits, scales of the logits, shared pages, garbage in what is unused: all of a case follows
from its seed, so that `--first-seed S --cases 1` repeats it. What a kernel is compiled for comes from the few
`CONFIGURATIONS`; the rest must not compile it again.
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mla.config import PRESETS
from mla.decode import mla_decode, plan_decode
from mla.measure import records
from mla.measure.gate import Verdict, check_result
from mla.problem import Problem, make_problem
from mla.schema import CAMPAIGN_COLUMNS


@dataclass(frozen=True)
class Configuration:
    """What kernels are compiled for.

    Args:
        dtype: of q, cache and output.
        page_size: tokens a page.
        gap: slots between two pages in memory.
    """

    dtype: torch.dtype
    page_size: int
    gap: int = 0


CONFIGURATIONS = (
    Configuration(torch.bfloat16, 64),
    Configuration(torch.bfloat16, 16, gap=1),
    Configuration(torch.float16, 32),
    # of no kernel but the portable one
    Configuration(torch.float16, 7, gap=2),
)
_SPLITS = (1, 3, 16)
# What unused table entries hold: ids that lead nowhere, or to a page that no request owns.
_GARBAGE = (-1, 2**31 - 1, "a page of nobody")


@dataclass(frozen=True)
class Drawn:
    """One case.

    Args:
        problem: with lengths, pages and strides as drawn.
        num_splits: for the portable kernel.
        batch_invariant: how the Hopper kernel divides the work.
        has_plan: whether two calls share a plan, as two layers do; the second is then a prepared launch.
        text: what was drawn, for a failure's line.
    """

    problem: Problem
    num_splits: int
    batch_invariant: bool
    has_plan: bool
    text: str


def _draw_lengths(rng: random.Random, longest: int) -> list[int]:
    """Up to 12 requests; around whole tiles, log-uniform, even, many empty, or one long among short ones."""
    count, kind = rng.randint(1, 12), rng.choice(("tiles", "log-uniform", "even", "empty", "one-long"))

    def spread(limit: int) -> int:
        return round(limit ** rng.random())

    if kind == "tiles":
        return [min(max(64 * rng.randint(0, 8) + rng.choice((-1, 0, 1)), 0), longest) for _ in range(count)]
    if kind == "even":
        return [spread(longest)] * count
    if kind == "empty":
        return [rng.choice((0, 0, spread(longest))) for _ in range(count)]
    if kind == "one-long":
        return [longest, *(spread(100) for _ in range(count - 1))]
    return [spread(longest) for _ in range(count)]


def draw_case(seed: int, device: str) -> Drawn:
    """The case of a seed; on the CPU small widths and lengths in fp16, for the interpreter."""
    rng = random.Random(seed)
    on_gpu = device == "cuda"
    configuration = rng.choice(CONFIGURATIONS)
    lengths = _draw_lengths(rng, rng.choice((300, 2000, 6000)) if on_gpu else 150)
    num_heads = rng.choice((1, 8, 16, 64, 128, rng.randint(1, 128))) if on_gpu else rng.randint(1, 20)
    logit_scale = rng.choice((0.1, 1.0, 10.0, 60.0))
    problem = make_problem(
        replace(PRESETS["deepseek-v3" if on_gpu else "tiny"], num_heads=num_heads), lengths,
        page_size=configuration.page_size, dtype=configuration.dtype if on_gpu else torch.float16, device=device,
        seed=seed, logit_scale=logit_scale,
    )  # fmt: skip
    if rng.random() < 0.25:
        _share_first_page(problem)
    problem = _spread_out(problem, configuration, rng.choice(_GARBAGE), rng.choice((0, 50)))
    drawn = Drawn(problem, rng.choice(_SPLITS), rng.random() < 0.3, rng.random() < 0.5, "")
    text = (
        f"{configuration}, lengths {lengths}, {num_heads} heads, logits times {logit_scale}, {drawn.num_splits} "
        f"splits, batch_invariant {drawn.batch_invariant}, plan {drawn.has_plan}"
    )
    return replace(drawn, text=text)


def _share_first_page(p: Problem) -> None:
    """Let all requests that have a whole page begin with the same one, in place."""
    page_size = p.kv_cache.shape[1]
    long = (p.seq_lens >= page_size).nonzero()[:, 0]
    if len(long):
        p.kv[long, :page_size] = p.kv[long[0], :page_size].clone()
        p.block_table[long, 0] = p.block_table[long[0], 0].clone()


def _spread_out(p: Problem, configuration: Configuration, garbage: int | str, added: int) -> Problem:
    """The same cache and table with gaps between pages and rows, and with garbage where no token lives."""
    num_pages, page_size, width = p.kv_cache.shape
    unused = p.block_table >= num_pages
    if garbage == "a page of nobody":
        is_owned = torch.zeros(num_pages, dtype=torch.bool, device=p.kv.device)
        is_owned[p.block_table[~unused].long()] = True
        garbage = int((~is_owned).int().argmax())
    max_pages = p.block_table.shape[1] + added
    # row strides are multiples of 16, as an allocator of tables would make them
    table = torch.full((len(unused), -(-max_pages // 16) * 16 + 16), garbage, dtype=torch.int32, device=p.kv.device)
    table[:, : unused.shape[1]] = p.block_table.masked_fill(unused, garbage)
    pool = p.kv_cache.new_full((num_pages, page_size + configuration.gap, width), torch.nan)
    pool[:, :page_size] = p.kv_cache
    return replace(p, kv_cache=pool[:, :page_size], block_table=table[:, :max_pages])


def check_kernel(kernel: str, drawn: Drawn) -> Verdict:
    """One kernel on one case, into an output of NaN with a guard band, which must stay."""
    p = drawn.problem
    batch_size, num_heads, _ = p.q_absorbed.shape
    guarded = p.q_absorbed.new_full((batch_size, num_heads + 1, p.config.kv_lora_rank), 7.0)
    out = guarded[:, :num_heads]
    options = {"num_splits": drawn.num_splits}
    if kernel == "hopper":
        options = {"batch_invariant": drawn.batch_invariant}
        if drawn.has_plan:
            options["plan"] = plan_decode(p.seq_lens, num_heads, batch_invariant=drawn.batch_invariant)
    for _ in range(2 if drawn.has_plan else 1):
        _, lse = mla_decode(
            p.q_absorbed, p.kv_cache, p.block_table, p.seq_lens, softmax_scale=p.softmax_scale,
            kv_lora_rank=p.config.kv_lora_rank, out=out.fill_(torch.nan), **options,
        )  # fmt: skip
    verdict = check_result(out, lse, p, rounds_scores=False, is_per_head=False)
    if not (guarded[:, num_heads] == 7.0).all():
        return Verdict(verdict.rel_err, False, "failed: wrote past its output", float("inf"))
    return verdict


def takes(kernel: str, drawn: Drawn) -> bool:
    """Whether `mla_decode` dispatches such a call to the kernel."""
    if kernel == "portable":
        return True
    # imported where it is needed: Gluon has no interpreter
    from mla.kernels.hopper_launch import hopper_fits

    p = drawn.problem
    return hopper_fits(p.q_absorbed, p.kv_cache, p.block_table, p.q_absorbed[..., : p.config.kv_lora_rank])


def run(first_seed: int, cases: int, kernels: list[str], device: str) -> dict[str, object]:
    """Check that many cases and print each failure; the columns of the summary."""
    begin = time.monotonic()
    results, failures, worst, worst_seed = 0, 0, -1.0, None
    with torch.inference_mode():
        for seed in range(first_seed, first_seed + cases):
            drawn = draw_case(seed, device)
            for kernel in kernels:
                if not takes(kernel, drawn):
                    continue
                verdict = check_kernel(kernel, drawn)
                results += 1
                if verdict.over_bound > worst:
                    worst, worst_seed = verdict.over_bound, seed
                if not verdict.passed:
                    failures += 1
                    print(
                        f"{kernel}: {verdict.status}; {drawn.text}; repeat it with `triton-mla-bench campaign "
                        f"--first-seed {seed} --cases 1 --kernels {kernel}`",
                        flush=True,
                    )
    return {
        "kernels": " ".join(kernels), "cases": cases, "results": results, "failures": failures,
        "worst_over_bound": f"{worst:.3f}", "worst_seed": worst_seed, "first_seed": first_seed,
        "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="triton-mla-bench campaign", description=__doc__)
    parser.add_argument("--output", type=Path, metavar="PATH", help="a CSV file, or a folder; default: only print")
    parser.add_argument("--cases", type=int, default=2000, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="S", help="of the first case; the next has S + 1")
    parser.add_argument(
        "--kernels", nargs="+", choices=("portable", "hopper"), help="default: portable, and hopper on a Hopper GPU"
    )
    return parser


def main(argv: list[str]) -> int:
    """Run, print and keep the summary; returns the exit code, 1 where a case failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    has_gpu = torch.cuda.is_available()
    has_hopper = has_gpu and torch.cuda.get_device_capability() == (9, 0)
    if args.kernels and "hopper" in args.kernels and not has_hopper:
        parser.error("--kernels: expected a GPU of compute capability 9.0 for hopper, got another; leave it out")
    if args.output and not has_gpu:
        parser.error("--output: expected a CUDA GPU, since data files are named by it, found none; leave it out")
    kernels = args.kernels or (["portable", "hopper"] if has_hopper else ["portable"])
    if args.output:
        path = records.output_path(args.output, "campaign")
        try:
            records.check_columns(path, CAMPAIGN_COLUMNS)
            run_id = records.start_run(path, ["campaign", *argv], args.first_seed)
        except ValueError as error:
            parser.error(str(error))
    summary = run(args.first_seed, args.cases, kernels, "cuda" if has_gpu else "cpu")
    print(", ".join(f"{name} {value}" for name, value in summary.items()))
    if args.output:
        records.append_rows(path, CAMPAIGN_COLUMNS, [{**summary, "run_id": run_id}])
    return 1 if summary["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
