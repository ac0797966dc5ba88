import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from mla import PRESETS, DecodePlan, mla_decode, plan_decode
from mla.measure.gate import check_result
from mla.problem import make_problem
from mla.tests.conftest import dtype_id, kernel_dtypes

LENGTHS = [0, 1, 16, 37, 131]
DTYPE = torch.float16


def _problem(device, lengths=LENGTHS, num_heads=4, dtype=DTYPE, page_size=16, **options):
    config = dataclasses.replace(PRESETS["tiny"], num_heads=num_heads)
    return make_problem(config, lengths, page_size=page_size, dtype=dtype, device=device, **options)


def _arguments(p):
    return (p.q_absorbed, p.kv_cache, p.block_table, p.seq_lens), dict(softmax_scale=p.softmax_scale, kv_lora_rank=32)


def _decode(p, **options):
    tensors, keywords = _arguments(p)
    return mla_decode(*tensors, **keywords, **options)


def _check(out, lse, p):
    verdict = check_result(out, lse, p, rounds_scores=False, is_per_head=False)
    assert verdict.passed, verdict.status


@pytest.mark.parametrize("dtype", kernel_dtypes(), ids=dtype_id)
def test_matches_the_reference(dtype, device):
    p = _problem(device, dtype=dtype)
    _check(*_decode(p), p)


def test_strided_inputs_and_output(device):
    """Query, cache and table cut out of larger tensors whose other parts are NaN or garbage; guard bands stay."""
    p = _problem(device)
    q = torch.full((len(LENGTHS), 4, 3, 48), torch.nan, dtype=DTYPE, device=device)
    q[:, :, 1] = p.q_absorbed
    kv_cache = torch.full((len(p.kv_cache), 20, 56), torch.nan, dtype=DTYPE, device=device)
    kv_cache[:, 2:18, :48] = p.kv_cache
    table = torch.full((len(LENGTHS), p.block_table.shape[1] + 3), -7, dtype=torch.int32, device=device)
    table[:, :-3] = p.block_table
    guarded = torch.full((len(LENGTHS) + 2, 6, 40), 7.0, dtype=DTYPE, device=device)
    out = guarded[1:-1, 1:5, 4:36]
    strided = dataclasses.replace(
        p, q_absorbed=q[:, :, 1], kv_cache=kv_cache[:, 2:18, :48], block_table=table[:, : p.block_table.shape[1]]
    )
    for num_splits in (1, 3):
        out.fill_(torch.nan)
        returned, lse = _decode(strided, out=out, num_splits=num_splits)
        assert returned.data_ptr() == out.data_ptr()
        _check(out, lse, p)
        inside = torch.zeros_like(guarded, dtype=torch.bool)
        inside[1:-1, 1:5, 4:36] = True
        assert (guarded[~inside] == 7.0).all()


def test_same_input_same_bits(device):
    p = _problem(device)
    first = _decode(p)
    for _ in range(5):
        again = _decode(p)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_empty_batch_and_empty_pool(device):
    p = _problem(device)
    nothing = dataclasses.replace(
        p, q_absorbed=p.q_absorbed[:0], block_table=p.block_table[:0], seq_lens=p.seq_lens[:0]
    )
    out, lse = _decode(nothing)
    assert out.shape == (0, 4, 32)
    assert lse.shape == (0, 4)
    out, lse = _decode(_problem(device, [0, 0]))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_operator_passes_torchs_own_checks(device):
    p = _problem(device)
    tensors, _ = _arguments(p)
    torch.library.opcheck(torch.ops.mla.decode, (*tensors, p.softmax_scale, 32, None))


def test_inside_torch_compile(device):
    p = _problem(device)
    tensors, keywords = _arguments(p)
    expected = mla_decode(*tensors, **keywords)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, kv_cache, block_table, seq_lens):
        out, lse = mla_decode(q, kv_cache, block_table, seq_lens, **keywords)
        return out * 2, lse

    out, lse = step(*tensors)
    torch.testing.assert_close(out, expected[0] * 2)
    assert torch.equal(lse, expected[1])


WRONG = {
    "q is 2-d": (ValueError, "q: expected 3 dimensions", dict(q=lambda p: p.q_absorbed[0])),
    "cache is 4-d": (ValueError, "kv_cache: expected 3 dimensions", dict(kv_cache=lambda p: p.kv_cache[:, :, None])),
    "cache is too narrow": (ValueError, "48", dict(kv_cache=lambda p: p.kv_cache[..., :40])),
    "table of another batch": (ValueError, "block_table: expected", dict(block_table=lambda p: p.block_table[1:])),
    "lengths of another batch": (ValueError, "seq_lens: expected shape", dict(seq_lens=lambda p: p.seq_lens[1:])),
    "rank is no power of two": (ValueError, "powers of two", dict(kv_lora_rank=lambda p: 24)),
    "rope part is missing": (ValueError, "powers of two", dict(kv_lora_rank=lambda p: 48)),
    "no splits": (ValueError, "num_splits", dict(num_splits=lambda p: 0)),
    "channels are strided": (ValueError, "contiguous", dict(q=lambda p: torch.cat((p.q_absorbed,) * 2, -1)[..., ::2])),
    "lengths are strided": (ValueError, "contiguous", dict(seq_lens=lambda p: torch.stack((p.seq_lens,) * 2, 1)[:, 0])),
    "out has the wrong shape": (ValueError, "out: expected shape", dict(out=lambda p: p.q_absorbed.clone())),
    "out is expanded": (ValueError, "memory of its own", dict(out=lambda p: p.q_absorbed[:1, :, :32].expand(5, 4, 32))),
    "fp64": (TypeError, "float16 or float32", dict(q=lambda p: p.q_absorbed.double())),
    "cache of another dtype": (TypeError, "kv_cache: expected q's dtype", dict(kv_cache=lambda p: p.kv_cache.float())),
    "lengths are int64": (TypeError, "seq_lens: expected torch.int32", dict(seq_lens=lambda p: p.seq_lens.long())),
    "table is int64": (TypeError, "block_table: expected", dict(block_table=lambda p: p.block_table.long())),
    "another device": (RuntimeError, "seq_lens: expected q's device", dict(seq_lens=lambda p: p.seq_lens.to("meta"))),
    "needs a gradient": (RuntimeError, "no gradient", dict(q=lambda p: p.q_absorbed.clone().requires_grad_())),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_unsupported_input_is_refused(case, device):
    """The message names the argument, what was expected, what came and what to do."""
    error, message, changes = WRONG[case]
    p = _problem(device)
    tensors, keywords = _arguments(p)
    arguments = dict(zip(("q", "kv_cache", "block_table", "seq_lens"), tensors, strict=True)) | keywords
    arguments |= {name: make(p) for name, make in changes.items()}
    with pytest.raises(error, match=message) as caught:
        mla_decode(**arguments)
    assert "got" in str(caught.value)
    assert "expected" in str(caught.value)


def test_no_gradient_is_needed_under_no_grad(device):
    p = _problem(device)
    tensors, keywords = _arguments(p)
    with torch.no_grad():
        out, lse = mla_decode(tensors[0].clone().requires_grad_(), *tensors[1:], **keywords)
    _check(out, lse, p)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU multiplies bf16")
def test_bf16_is_refused_on_the_interpreter():
    with pytest.raises(TypeError, match="interpreter"):
        _decode(_problem("cpu", dtype=torch.bfloat16))


def test_cpu_tensors_are_refused_without_the_interpreter():
    """In a process of its own, since the choice is made on import."""
    code = """
import torch, mla
q = torch.zeros(1, 4, 48)
try:
    mla.mla_decode(q, torch.zeros(1, 16, 48), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32),
                   softmax_scale=1.0, kv_lora_rank=32)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"}
    )
    assert "expected a CUDA tensor, got one on cpu" in done.stdout, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the order of imports does not matter")
def test_importing_triton_first_is_a_clear_error():
    done = subprocess.run(
        [sys.executable, "-c", "import triton, mla; mla.mla_decode"],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )
    assert "expected to be imported before triton" in done.stderr


def test_a_plan_is_taken_everywhere(device):
    """Where no kernel needs a plan it is empty, and changes nothing."""
    p = _problem(device)
    plan = plan_decode(p.seq_lens, 4)
    assert isinstance(plan, DecodePlan)
    out, lse = _decode(p, plan=plan)
    expected_out, expected_lse = _decode(p)
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)
    with pytest.raises(TypeError, match="plan: expected a DecodePlan"):
        _decode(p, plan=3)


@pytest.mark.parametrize(
    ("seq_lens", "num_heads", "error", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int32), 4, ValueError, r"expected contiguous seq_lens of shape \(batch_size,\)"),
        (torch.zeros(4, dtype=torch.int32)[::2], 4, ValueError, "with strides"),
        (torch.zeros(2, dtype=torch.int32), 0, ValueError, "a positive num_heads"),
        (torch.zeros(2, dtype=torch.int64), 4, TypeError, "seq_lens: expected torch.int32, got torch.int64"),
    ],
    ids=["shape", "stride", "heads", "dtype"],
)
def test_plan_decode_refuses_bad_input(seq_lens, num_heads, error, message):
    with pytest.raises(error, match=message):
        plan_decode(seq_lens, num_heads)


def test_checks_are_not_skipped_after_a_good_call(device):
    """What was checked once is known by shapes, strides and dtypes; a call that differs in any is checked anew."""
    p = _problem(device)
    _decode(p)
    with pytest.raises(TypeError, match=r"seq_lens: expected torch\.int32"):
        _decode(dataclasses.replace(p, seq_lens=p.seq_lens.long()))
    with pytest.raises(ValueError, match="block_table: expected shape"):
        _decode(dataclasses.replace(p, block_table=p.block_table[:-1]))
    with pytest.raises(RuntimeError, match="need no gradient"):
        _decode(dataclasses.replace(p, q_absorbed=p.q_absorbed.clone().requires_grad_()))
