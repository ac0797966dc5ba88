import dataclasses

import pytest
import torch

from mla import PRESETS
from mla.kernels import portable
from mla.measure.cases import CPU_CASES, draw_problems
from mla.measure.gate import LSE_TOLERANCE, check_case, check_result, relative_error
from mla.measure.implementations import IMPLEMENTATIONS, Implementation, Prepared, Refused, available
from mla.problem import make_problem
from mla.reference import absorbed_reference


@pytest.fixture(scope="module")
def solved():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p = make_problem(PRESETS["tiny"], [0, 1, 70, 130], page_size=16, dtype=torch.float16, device=device)
    return p, *portable.decode(p)


def _verdict(out, lse, problem):
    return check_result(out, lse, problem, rounds_scores=False, is_per_head=False)


def test_right_result_passes(solved):
    problem, out, lse = solved
    assert _verdict(out, lse, problem).passed


FAULTS = {
    "a token too many in the sum": lambda out, lse: (out * (1 - 1 / 70), lse),
    "one element off": lambda out, lse: (_changed(out, (2, 1, 5), 0.1), lse),
    "three times the rounding error": lambda out, lse: (out + (out.float() * 1e-3).to(out.dtype), lse),
    "lse off by 3e-4": lambda out, lse: (out, lse * (1 + 3e-4)),
    "one NaN": lambda out, lse: (_changed(out, (3, 0, 0), torch.nan), lse),
    "one request not written": lambda out, lse: (_changed(out, (1,), 0.0), lse),
    "empty request not zero": lambda out, lse: (_changed(out, (0, 0, 0), 1e-6), lse),
    "another request's result": lambda out, lse: (out.roll(1, 0), lse),
    "lse in base 2": lambda out, lse: (out, lse / torch.log(torch.tensor(2.0))),
    "lse of an empty request is 0": lambda out, lse: (out, _changed(lse, (0, 0), 0.0)),
    "lse is NaN": lambda out, lse: (out, _changed(lse, (2, 3), torch.nan)),
}


def _changed(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_fails(fault, solved):
    problem, out, lse = solved
    verdict = _verdict(*FAULTS[fault](out, lse), problem)
    assert not verdict.passed
    assert verdict.status.startswith("failed: ")


def test_lse_is_allowed_the_rounding_of_its_terms():
    """Where large terms cancel, a logit is as uncertain as they are, and no other row's is."""
    p = make_problem(PRESETS["tiny"], [70, 70], page_size=16, dtype=torch.float16, logit_scale=60.0)
    out, lse = absorbed_reference(
        p.q_absorbed, p.kv, p.seq_lens, softmax_scale=p.softmax_scale, kv_lora_rank=p.config.kv_lora_rank,
        compute_dtype=torch.float32,
    )  # fmt: skip
    assert _verdict(out, lse, p).passed
    assert not _verdict(out, _changed(lse, (1, 2), lse[1, 2] * (1 + 3e-4)), p).passed
    # one token whose terms are 2000 and whose logit is 0
    q, kv = torch.zeros_like(p.q_absorbed), torch.zeros_like(p.kv)
    q[:, :, :2] = torch.tensor([40.0, -40.0])
    kv[0, :1, :2] = 50.0 / p.softmax_scale / 2
    one = dataclasses.replace(p, q_absorbed=q, kv=kv, seq_lens=torch.ones_like(p.seq_lens))
    values, zero = kv[:, :1, : p.config.kv_lora_rank].expand(-1, q.shape[1], -1), torch.zeros(q.shape[:2])
    rounding = torch.finfo(torch.float32).eps * 40.0 * 50.0
    assert _verdict(values, _changed(zero, (0,), LSE_TOLERANCE + 0.9 * rounding), one).passed
    assert not _verdict(values, _changed(zero, (0,), LSE_TOLERANCE + 1.1 * rounding), one).passed
    assert not _verdict(values, _changed(zero, (1,), 1.1 * LSE_TOLERANCE), one).passed


def test_relative_error_takes_the_worst_row():
    expected = torch.ones(3, 4, 5)
    got = expected.clone()
    got[1, 2] *= 1.5
    assert relative_error(got, expected) == pytest.approx(0.5)


def test_whatever_a_contestant_does_is_its_result():
    problems = draw_problems(CPU_CASES[1], "cuda" if torch.cuda.is_available() else "cpu", seed=0, at_most=1)

    def raising(error):
        def prepare(problems):
            raise error

        return Implementation(prepare)

    assert check_case(raising(torch.OutOfMemoryError("no memory")), problems).status == "out_of_memory"
    assert check_case(raising(RuntimeError("bad\nthing")), problems).status == "failed: RuntimeError: bad thing"
    assert check_case(raising(Refused("ragged")), problems).status == "refused: ragged"
    nan = Implementation(lambda problems: Prepared([lambda: (problems[0].q_absorbed[..., :32] * torch.nan, None)]))
    assert "relative error of out nan" in check_case(nan, problems).status


def test_torch_compile_refuses_ragged_batches():
    (problem,) = draw_problems(CPU_CASES[-1], "cpu", seed=0, at_most=1)
    for name in ("torch_compile", "torch_compile_paged"):
        assert check_case(IMPLEMENTATIONS[name], [problem]).status == (
            "refused: expected requests of equal length, got ragged ones"
        )


def test_only_what_can_run_is_offered():
    found = available(None, has_gpu=False)
    assert {"naive", "absorbed", "online_softmax", "split_kv", "portable"} <= set(found)
    assert "torch_compile" not in found
    with pytest.raises(ValueError, match="expected one of"):
        available(["flash"], has_gpu=True)
    with pytest.raises(ValueError, match="lacks a CUDA GPU"):
        available(["torch_compile"], has_gpu=False)
    assert set(IMPLEMENTATIONS) >= set(found)
