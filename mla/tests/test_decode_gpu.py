"""What only a GPU can show: bf16 at real widths, CUDA graphs, streams, devices, no synchronisation."""

import dataclasses

import pytest
import torch

from mla import PRESETS, mla_decode
from mla.measure.gate import check_result
from mla.problem import make_problem

pytestmark = pytest.mark.gpu
LENGTHS = [1, 63, 64, 65, 0, 1000, 4097, 129]


def _problem(num_heads=128, lengths=LENGTHS, dtype=torch.bfloat16, page_size=64, device="cuda", **options):
    config = dataclasses.replace(PRESETS["deepseek-v3"], num_heads=num_heads)
    return make_problem(config, lengths, page_size=page_size, dtype=dtype, device=device, **options)


def _decode(p, **options):
    return mla_decode(p.q_absorbed, p.kv_cache, p.block_table, p.seq_lens, softmax_scale=p.softmax_scale, **options)


def _check(out, lse, p):
    verdict = check_result(out, lse, p, rounds_scores=False, is_per_head=False)
    assert verdict.passed, verdict.status


@pytest.mark.parametrize("num_heads", [1, 8, 16, 17, 64, 100, 128], ids=lambda h: f"h{h}")
@pytest.mark.parametrize("page_size", [1, 16, 32, 48, 64, 128], ids=lambda p: f"p{p}")
def test_heads_and_pages(num_heads, page_size):
    p = _problem(num_heads, page_size=page_size)
    _check(*_decode(p), p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("logit_scale", [1.0, 10.0, 60.0])
@pytest.mark.parametrize("num_splits", [None, 1, 5, 200])
def test_dtypes_logits_and_splits(dtype, logit_scale, num_splits):
    p = _problem(dtype=dtype, logit_scale=logit_scale)
    _check(*_decode(p, num_splits=num_splits), p)


def test_graph_replays_with_lengths_and_tables_changed_in_place():
    first, second = _problem(seed=1), _problem(seed=2, lengths=[4097, 0, 5, 700, 64, 1, 129, 3000])
    width = max(p.block_table.shape[1] for p in (first, second))
    pages = max(len(p.kv_cache) for p in (first, second))
    q, kv_cache = torch.empty_like(first.q_absorbed), first.kv_cache.new_full((pages, 64, 576), torch.nan)
    table = torch.full((len(LENGTHS), width), -1, dtype=torch.int32, device="cuda")
    seq_lens = torch.zeros_like(first.seq_lens)

    def fill(p):
        q.copy_(p.q_absorbed)
        kv_cache.fill_(torch.nan)[: len(p.kv_cache)] = p.kv_cache
        table.fill_(-1)[:, : p.block_table.shape[1]] = p.block_table
        seq_lens.copy_(p.seq_lens)

    fill(first)
    mla_decode(q, kv_cache, table, seq_lens, softmax_scale=first.softmax_scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = mla_decode(q, kv_cache, table, seq_lens, softmax_scale=first.softmax_scale)
    for p in (first, second, first):
        fill(p)
        out.fill_(torch.nan)
        graph.replay()
        _check(out, lse, p)


def test_never_synchronises():
    p = _problem()
    _decode(p)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = _decode(p)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    _check(out, lse, p)


def test_two_streams_do_not_meet():
    problems = [_problem(lengths=[3000] * 8, seed=s) for s in (1, 2)]
    expected = [_decode(p) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(30):
        got = []
        for p, stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(_decode(p))
        torch.cuda.synchronize()
        for (out, lse), (out0, lse0) in zip(got, expected, strict=True):
            assert torch.equal(out, out0)
            assert torch.equal(lse, lse0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_tensors_device():
    p = _problem(device="cuda:1")
    assert torch.cuda.current_device() == 0
    out, lse = _decode(p)
    assert out.device == p.q_absorbed.device
    _check(out, lse, p)


def test_same_input_same_bits_200_times():
    p = _problem()
    first = _decode(p)
    for _ in range(200):
        out, lse = _decode(p)
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])


def test_inside_compiled_code():
    p = _problem()

    @torch.compile(fullgraph=True)
    def step(q, kv_cache, block_table, seq_lens):
        out, lse = mla_decode(q * 1, kv_cache, block_table, seq_lens, softmax_scale=p.softmax_scale)
        return out, lse

    _check(*step(p.q_absorbed, p.kv_cache, p.block_table, p.seq_lens), p)


def test_more_than_65535_requests():
    p = _problem(num_heads=1, lengths=[3] * 70_000, page_size=16)
    out, lse = _decode(p)
    few = dataclasses.replace(
        p, q_absorbed=p.q_absorbed[-50:], kv=p.kv[-50:], block_table=p.block_table[-50:], seq_lens=p.seq_lens[-50:]
    )
    _check(out[-50:], lse[-50:], few)


def test_pool_of_more_than_2_to_31_elements():
    """Pages beyond element 2^31 of the pool: offsets must be 64 bits wide."""
    p = _problem(lengths=[200, 64])
    num_pages = 2**31 // (64 * 576) + 100
    pool = torch.full((num_pages, 64, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    pool[-len(p.kv_cache) :] = p.kv_cache
    used = p.block_table < len(p.kv_cache)
    table = torch.where(used, p.block_table + (num_pages - len(p.kv_cache)), p.block_table)
    moved = dataclasses.replace(p, kv_cache=pool, block_table=table)
    _check(*_decode(moved), p)
