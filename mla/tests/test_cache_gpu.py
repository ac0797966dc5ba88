"""`PagedCache` on a GPU: a serving loop through one CUDA graph, nothing synchronised."""

import dataclasses

import pytest
import torch

from mla import PRESETS, PagedCache, mla_decode, plan_decode
from mla.measure.gate import check_result
from mla.tests.test_cache import append, as_problem, draw_rows

pytestmark = pytest.mark.gpu
CONFIG = PRESETS["kimi-k2"]
NUM_LAYERS, MAX_BATCH_SIZE, MAX_PAGES = 2, 6, 8


def _cache(**options) -> PagedCache:
    return PagedCache(24, num_layers=NUM_LAYERS, dtype=torch.bfloat16, device="cuda", **options)


def test_serving_loop_in_a_graph():
    """One captured step writes a row and decodes, in two layers; requests come, fork, end and wait between replays."""
    cache = _cache(poison=True)
    q = torch.randn(NUM_LAYERS, MAX_BATCH_SIZE, CONFIG.num_heads, CONFIG.cache_dim, device="cuda").bfloat16()
    new_rows = torch.zeros(NUM_LAYERS, MAX_BATCH_SIZE, CONFIG.cache_dim, dtype=torch.bfloat16, device="cuda")
    slots = torch.full((MAX_BATCH_SIZE,), cache.spare_slot, device="cuda")
    table = torch.full((MAX_BATCH_SIZE, MAX_PAGES), 2_147_480_000, dtype=torch.int32, device="cuda")
    seq_lens = torch.zeros(MAX_BATCH_SIZE, dtype=torch.int32, device="cuda")

    def step():
        plan, results = plan_decode(seq_lens, CONFIG.num_heads), []
        for layer in range(NUM_LAYERS):
            cache.write(layer, slots, new_rows[layer])
            results.append(
                mla_decode(
                    q[layer], cache.kv_cache[layer], table, seq_lens, softmax_scale=CONFIG.softmax_scale, plan=plan
                )
            )
        return results

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    rows: dict[int, torch.Tensor] = {}

    def prompt(length, seed):
        request = cache.allocate()
        (rows[request],) = append(cache, [request], [length], seed)

    def fork(request, length):
        rows[cache.fork(request, length)] = rows[request][:, :length]

    def end(request):
        cache.free([request])
        del rows[request]

    changes = [
        lambda: (prompt(100, 1), prompt(63, 2), prompt(300, 3)),
        lambda: (fork(2, 101), fork(0, 64)),
        lambda: (),
        lambda: (end(0), prompt(64, 4)),
        lambda: (end(2), end(1)),
    ]
    for i, change in enumerate(changes):
        change()
        requests = list(rows)
        torch.cuda.set_sync_debug_mode("error")
        try:
            cache.reserve(requests, out=slots)
            cache.update_tables(requests, table, seq_lens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        new_rows.copy_(draw_rows(cache, MAX_BATCH_SIZE, 100 + i))
        graph.replay()
        for n, request in enumerate(requests):
            rows[request] = torch.cat((rows[request], new_rows[:, n : n + 1]), dim=1)
        for layer, (out, lse) in enumerate(results):
            expected = [rows[r][layer] for r in requests] + [rows[requests[0]][layer, :0]] * (
                MAX_BATCH_SIZE - len(requests)
            )
            assert seq_lens.tolist() == [len(r) for r in expected]
            p = as_problem(expected, cache.kv_cache[layer], table, seq_lens, CONFIG)
            _check(out, lse, p, q[layer])


def _check(out, lse, p, q):
    verdict = check_result(out, lse, dataclasses.replace(p, q_absorbed=q), rounds_scores=False, is_per_head=False)
    assert verdict.passed, verdict.status


def test_never_synchronises():
    """Copy on write, tables and poisoning included; the first round takes pinned memory from the system."""
    cache = _cache(poison=True)
    for mode in ("default", "error"):
        rows = draw_rows(cache, 73, seed=0)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            parent = cache.allocate()
            slots = cache.reserve([parent], 70)
            for layer in range(NUM_LAYERS):
                cache.write(layer, slots, rows[layer, :70])
            child = cache.fork(parent)
            cache.write(0, cache.reserve([child, parent], [1, 2]), rows[0, 70:])
            cache.tables([child, parent])
            cache.free([child, parent])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert cache.num_free_pages == 24
