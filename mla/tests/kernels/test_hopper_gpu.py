"""The Hopper kernel against the reference, and what only a GPU can show of it."""

import dataclasses

import pytest
import torch

from mla import PRESETS
from mla.measure.gate import check_result
from mla.problem import make_problem

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
    from mla.kernels.hopper import hopper_fits, mla_decode_hopper

    out = torch.full((*p.q_absorbed.shape[:2], 512), torch.nan, dtype=p.q_absorbed.dtype, device="cuda")
    lse = torch.full(p.q_absorbed.shape[:2], torch.nan, device="cuda")
    assert hopper_fits(p.q_absorbed, p.kv_cache, out, p.softmax_scale)
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
    "lengths", [LENGTHS, [3000], [40_000, 0, 70], [512] * 150], ids=["mixed", "one", "long", "many"]
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
