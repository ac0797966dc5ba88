"""The Hopper kernel against the reference, and what only a GPU can show of it."""

import dataclasses

import pytest
import torch

from mla import PRESETS, mla_decode, plan_decode
from mla.measure.gate import check_result
from mla.problem import make_problem
from mla.tests.kernel_cases import SHARED_ENDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 1000, 4097, 0, 2048, 193, 577]


def _problem(num_heads=128, lengths=LENGTHS, dtype=torch.bfloat16, page_size=64, **options):
    config = dataclasses.replace(PRESETS["deepseek-v3"], num_heads=num_heads)
    return make_problem(config, lengths, page_size=page_size, dtype=dtype, device="cuda", **options)


def _decode(p, plan=None):
    """The kernel itself, on an output full of NaN."""
    from mla.kernels.hopper_launch import mla_decode_hopper

    out = torch.full((*p.q_absorbed.shape[:2], 512), torch.nan, dtype=p.q_absorbed.dtype, device="cuda")
    lse = torch.full(p.q_absorbed.shape[:2], torch.nan, device="cuda")
    return mla_decode_hopper(
        p.q_absorbed, p.kv_cache, p.block_table, p.seq_lens, out, lse, softmax_scale=p.softmax_scale, plan=plan
    )


def _check(out, lse, p):
    verdict = check_result(out, lse, p, rounds_scores=False, is_per_head=False)
    assert verdict.passed, verdict.status


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256], ids=lambda p: f"p{p}")
@pytest.mark.parametrize("num_heads", [1, 16, 63, 64, 65, 128, 200], ids=lambda h: f"h{h}")
def test_heads_and_pages(num_heads, page_size):
    p = _problem(num_heads, page_size=page_size)
    _check(*_decode(p), p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logit_scale", [1.0, 10.0, 60.0])
@pytest.mark.parametrize(
    "lengths",
    [LENGTHS, [3000], [40_000, 0, 70], [512] * 150, SHARED_ENDS],
    ids=["mixed", "one", "long", "many", "shared"],
)
def test_dtypes_logits_and_lengths(dtype, logit_scale, lengths):
    p = _problem(dtype=dtype, logit_scale=logit_scale, lengths=lengths)
    _check(*_decode(p), p)


@pytest.mark.parametrize("page_size", [16, 64, 128], ids=lambda p: f"p{p}")
def test_rising_maxima(page_size):
    """Rows that grow along the context move the maximum again and again."""
    p = _problem(lengths=[2000, 700], page_size=page_size, logit_scale=4.0)
    ramp = torch.linspace(0.1, 4.0, p.kv.shape[1], device="cuda")
    kv = (p.kv.float() * ramp[:, None]).to(p.kv.dtype)
    kv_cache = p.kv_cache.clone()
    for b, n in enumerate(p.seq_lens.tolist()):
        pages = p.block_table[b, : -(-n // page_size)].long()
        flat = kv_cache[pages].flatten(0, 1)
        flat[:n] = kv[b, :n]
        kv_cache[pages] = flat.view(len(pages), page_size, -1)
    p = dataclasses.replace(p, kv=kv, kv_cache=kv_cache)
    _check(*_decode(p), p)


def test_graph_replays_with_other_lengths():
    """The plan is made inside the graph, from the lengths as they are."""
    p = _problem(lengths=[2048] * 8)
    _decode(p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = _decode(p)
    for lengths in ([2048] * 8, [1, 0, 2048, 65, 64, 700, 3, 128], [0] * 8):
        p.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        _check(out, lse, p)


@pytest.mark.parametrize("lengths", [LENGTHS, [1024] * 8, [8000] * 2], ids=["mixed", "even", "long"])
def test_same_input_same_bits_200_times(lengths):
    p = _problem(lengths=lengths)
    first = _decode(p)
    for _ in range(200):
        out, lse = _decode(p)
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])


def _public(p, **options):
    return mla_decode(
        p.q_absorbed, p.kv_cache, p.block_table, p.seq_lens, softmax_scale=p.softmax_scale, **options
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [[1000, 3], [2048] * 8, [300] * 150], ids=["two", "divided", "whole"])
def test_the_public_entry_takes_this_kernel(lengths):
    """The same bits, with and without a plan, on the first call and on prepared ones, into other addresses too."""
    first, second = _problem(lengths=lengths), _problem(lengths=lengths, seed=1)
    plan = plan_decode(first.seq_lens, 128)
    assert plan.hopper is not None
    for p in (first, second, first):
        out, lse = _decode(p)
        for options in ({}, {"plan": plan}, {"plan": plan, "out": torch.full_like(out, torch.nan)}):
            public_out, public_lse = _public(p, **options)
            assert torch.equal(public_out, out)
            assert torch.equal(public_lse, lse)
    # a number of splits asks for the portable kernel
    _check(*_public(first, num_splits=2), first)


def test_a_plan_serves_many_launches():
    """Its counters come back to a multiple of 2^16, whatever was merged before."""
    p = _problem(lengths=[9000, 64, 700])
    plan = plan_decode(p.seq_lens, 128)
    out, lse = _public(p, plan=plan)
    _check(out, lse, p)
    for _ in range(2000):
        again, _ = _public(p, plan=plan)
    assert torch.equal(again, out)
    assert not (plan.hopper.work.requests[:, 2:] % 65536).any()


def test_a_plan_of_another_step_is_refused():
    p = _problem(lengths=[9000, 64, 700])
    for lengths, num_heads in (([9000, 64], 128), ([9000, 64, 700], 64)):
        plan = plan_decode(torch.tensor(lengths, dtype=torch.int32, device="cuda"), num_heads)
        with pytest.raises(ValueError, match="plan: expected one of 3 requests and 128 heads"):
            _public(p, plan=plan)
    with pytest.raises(TypeError, match="plan: expected a DecodePlan"):
        _public(p, plan=[1])


def test_calls_that_do_not_fit_take_the_portable_kernel():
    """Odd addresses, strides, pages and scales are right, too."""
    p = _problem(num_heads=16, lengths=[300, 70])
    shifted = torch.empty(p.q_absorbed.numel() + 1, dtype=p.q_absorbed.dtype, device="cuda")[1:]
    q = shifted.view(p.q_absorbed.shape).copy_(p.q_absorbed)
    _check(*_public(dataclasses.replace(p, q_absorbed=q)), p)
    odd = _problem(num_heads=16, lengths=[300, 70], page_size=48)
    _check(*_public(odd), odd)


def test_two_streams_with_a_plan_each():
    problems = [_problem(lengths=[1024] * 8, seed=i) for i in range(2)]
    expected = [_decode(p) for p in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    results = [[], []]
    for _ in range(50):
        for i, p in enumerate(problems):
            with torch.cuda.stream(streams[i]):
                results[i].append(_public(p))
    torch.cuda.synchronize()
    for i, (out, lse) in enumerate(expected):
        for other_out, other_lse in results[i]:
            assert torch.equal(other_out, out)
            assert torch.equal(other_lse, lse)
