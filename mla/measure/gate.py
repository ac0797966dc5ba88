"""The correctness gate: an implementation's result against the fp32 reference, before anything is timed.

As a process (`python -m mla.measure.gate NAME`, cases as JSON lines on stdin) it answers one JSON line a case, so that
a hang or a crash costs its caller one implementation.
"""

import gc
import json
import sys
from dataclasses import dataclass

import torch

from mla.measure.cases import Case, draw_problems
from mla.measure.implementations import IMPLEMENTATIONS, Implementation, Refused
from mla.problem import Problem
from mla.reference import absorb_query, absorbed_reference, naive_reference, project_values

LSE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Verdict:
    """What the gate found.

    Args:
        rel_err: largest relative error of a row (a head of a request), Frobenius norm; None where nothing came out.
        passed: whether out and lse are within their bounds.
        status: "ok", "out_of_memory", "refused: <reason>" or "failed: <reason>".
        over_bound: the larger of the errors of out and lse over their bounds, 1 or less where passed; None where
            nothing came out.
    """

    rel_err: float | None
    passed: bool
    status: str
    over_bound: float | None = None


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest `|got - expected| / |expected|` of a row (a head of a request), Frobenius norm; NaN stays NaN."""
    difference = (got.to(expected.dtype) - expected).norm(dim=-1)
    size = expected.norm(dim=-1)
    # a request of length 0 has to give exactly 0
    return torch.where(size > 0, difference / size, difference.where(difference == 0, torch.inf)).max().item()


def _references(problem: Problem, rounds_scores: bool, is_per_head: bool):
    """(out, lse) of the reference, and again computed as well as the problem's dtype allows.

    The first is in fp32 for 16-bit problems and in fp64 for fp32 ones. The second is in fp32 with intermediates
    rounded to the problem's dtype.
    """
    p, dtype = problem, problem.q_absorbed.dtype
    wider = torch.float32 if dtype.itemsize == 2 else torch.float64
    scale, rank = p.softmax_scale, p.config.kv_lora_rank
    if not is_per_head:
        exact, rounded = (
            absorbed_reference(p.q_absorbed, p.kv, p.seq_lens, softmax_scale=scale, kv_lora_rank=rank, **options)
            for options in (
                dict(compute_dtype=wider),
                dict(compute_dtype=torch.float32, round_to=dtype, round_scores=rounds_scores),
            )
        )
        return exact, rounded
    # the same function as the naive form, of which a large case's keys would not fit; from the unrounded query
    q = absorb_query(*(x.to(wider) for x in (p.q_nope, p.q_pe, p.w_uk)))
    latent, lse = absorbed_reference(q, p.kv, p.seq_lens, softmax_scale=scale, kv_lora_rank=rank, compute_dtype=wider)
    inputs = (p.q_nope, p.q_pe, p.kv, p.w_uk, p.w_uv, p.seq_lens)
    rounded = naive_reference(*inputs, softmax_scale=scale, compute_dtype=torch.float32, round_to=dtype)
    return (project_values(latent, p.w_uv.to(wider)), lse), rounded


def _rounding_of_logits(p: Problem) -> torch.Tensor:
    """fp32 rounding of a row's logits (batch_size, num_heads): of the sum of their terms' sizes, the largest token's.

    It is the terms that are rounded as they are added up; a logit may be far smaller than they are. In case 733 of
    the campaign an H200's tensor cores are wrong by 0.51 of it, in torch's product of the same rows as in the kernels.
    """
    sizes = p.q_absorbed.new_zeros(p.q_absorbed.shape[:2], dtype=torch.float32)
    for b, length in enumerate(p.seq_lens.tolist()):
        if length > 0:
            terms = p.q_absorbed[b].float().abs() @ p.kv[b, :length].float().abs().T
            sizes[b] = terms.amax(dim=1)
    return torch.finfo(torch.float32).eps * abs(p.softmax_scale) * sizes


def check_result(
    out: torch.Tensor, lse: torch.Tensor | None, problem: Problem, *, rounds_scores: bool, is_per_head: bool
) -> Verdict:
    """Hold a result against the reference.

    The bound on out is twice the error of plain torch in the problem's dtype (fp32 arithmetic with probabilities and
    output, and scores where `rounds_scores`, rounded to it), plus twice the fp32 rounding of the largest logit; both
    are the largest of a row. lse must be within 1e-4 of the reference, relative above 1, plus the fp32 rounding
    of its row's logits and twice what rounding the scores does to it.

    Args:
        out: (batch_size, num_heads, kv_lora_rank), or v_head_dim wide where is_per_head.
        lse: (batch_size, num_heads), natural logarithm, or None where the implementation has none.
        problem: what was solved.
        rounds_scores, is_per_head: as in `Implementation`.
    """
    (expected, expected_lse), (rounded, rounded_lse) = _references(problem, rounds_scores, is_per_head)
    error = relative_error(out, expected)
    # the fp32 rounding of a logit is an error of its probability, and the log-sum-exp is about the largest logit
    logit = expected_lse[torch.isfinite(expected_lse)].abs().max().item() if torch.isfinite(expected_lse).any() else 0.0
    bound = 2 * relative_error(rounded, expected) + 2 * torch.finfo(torch.float32).eps * logit
    over_bound = _ratio(error, bound)
    if not error <= bound:
        status = f"failed: relative error of out {error:.2e} is above its bound {bound:.2e}"
        return Verdict(error, False, status, over_bound)
    if lse is not None:
        is_empty = torch.isinf(expected_lse)
        if not torch.isinf(lse[is_empty]).all():
            return Verdict(error, False, "failed: lse of an empty request is not infinite", float("inf"))
        x, y, r, rounding = (
            t[~is_empty].double() for t in (lse, expected_lse, rounded_lse, _rounding_of_logits(problem))
        )
        if len(x):
            scale = y.abs().clamp(min=1.0)
            bounds = LSE_TOLERANCE + rounding / scale
            if rounds_scores:
                bounds = bounds + 2 * ((r - y).abs() / scale).max()
            errors = (x - y).abs() / scale
            # NaN is the largest of all
            worst = (errors / bounds).argmax()
            lse_error, lse_bound = errors[worst].item(), bounds[worst].item()
            over_bound = max(over_bound, _ratio(lse_error, lse_bound))
            if not lse_error <= lse_bound:
                status = f"failed: error of lse {lse_error:.2e} is above its bound {lse_bound:.2e}"
                return Verdict(error, False, status, over_bound)
    return Verdict(error, True, "ok", over_bound)


def _ratio(error: float, bound: float) -> float:
    """Error over its bound: 0 where there is no error, infinite where it is NaN or has no bound to be within."""
    if error == 0:
        return 0.0
    return error / bound if bound > 0 and error == error else float("inf")


def check_case(implementation: Implementation, problems: list[Problem]) -> Verdict:
    """Run an implementation once on each problem and check the first and the last result."""
    try:
        calls = implementation.prepare(problems).calls
        verdicts = []
        for i in sorted({0, len(problems) - 1}):
            out, lse = calls[i]()
            lse = None if lse is None else lse * implementation.lse_factor
            verdicts.append(
                check_result(
                    out,
                    lse,
                    problems[i],
                    rounds_scores=implementation.rounds_scores,
                    is_per_head=implementation.is_per_head,
                )
            )
            del out, lse
    except torch.OutOfMemoryError:
        return Verdict(None, False, "out_of_memory")
    except Refused as error:
        return Verdict(None, False, f"refused: {error}")
    except Exception as error:  # whatever a contestant does is its result, not our crash
        return Verdict(None, False, f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return max(verdicts, key=lambda v: (not v.passed, v.rel_err))


def main() -> None:
    implementation = IMPLEMENTATIONS[sys.argv[1]]
    device, seed = sys.argv[2], int(sys.argv[3])
    with torch.inference_mode():
        for line in sys.stdin:
            case = Case(**json.loads(line))
            # two sets are enough to see that a result belongs to its own inputs
            problems = draw_problems(case, device, seed, at_most=2)
            verdict = check_case(implementation, problems)
            del problems
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            print(json.dumps(verdict.__dict__), flush=True)


if __name__ == "__main__":
    main()
