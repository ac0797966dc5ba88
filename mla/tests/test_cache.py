import dataclasses
import pickle

import pytest
import torch

from mla import PRESETS, PagedCache, mla_decode
from mla.cache import OutOfPages
from mla.measure.gate import check_result
from mla.problem import Problem, make_problem

DTYPE = torch.float16


def make_cache(device, num_pages=8, page_size=4, num_layers=1, **options) -> PagedCache:
    return PagedCache(
        num_pages, page_size, 48, num_layers=num_layers, dtype=DTYPE, device=device, poison=True, **options
    )


def draw_rows(cache: PagedCache, num_tokens: int, seed: int) -> torch.Tensor:
    """(num_layers, num_tokens, cache_dim)"""
    shape = (len(cache.kv_cache), num_tokens, cache.kv_cache.shape[-1])
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return rows.to(cache.kv_cache)


def append(cache: PagedCache, requests, counts, seed: int) -> tuple[torch.Tensor, ...]:
    """Lengthen requests by random rows in all layers; the rows of each, (num_layers, count, cache_dim)."""
    rows = draw_rows(cache, sum(counts), seed)
    slots = cache.reserve(requests, counts)
    for layer in range(len(rows)):
        cache.write(layer, slots, rows[layer])
    return rows.split(list(counts), dim=1)


def as_problem(rows: list[torch.Tensor], kv_cache, block_table, seq_lens, config=PRESETS["tiny"]) -> Problem:
    """The decode step that a cache should hold: the requests' rows (tokens, cache_dim), under a random query."""
    p = make_problem(config, [len(r) for r in rows], page_size=1, dtype=kv_cache.dtype, device=kv_cache.device)
    kv = torch.full_like(p.kv, torch.nan)
    for i, row in enumerate(rows):
        kv[i, : len(row)] = row
    return dataclasses.replace(p, kv=kv, kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens)


def check_decode(p: Problem) -> None:
    out, lse = mla_decode(
        p.q_absorbed,
        p.kv_cache,
        p.block_table,
        p.seq_lens,
        softmax_scale=p.softmax_scale,
        kv_lora_rank=p.config.kv_lora_rank,
    )
    # against the rows that were appended, never through the table
    lengths = torch.tensor([int(torch.isfinite(kv[:, 0]).sum()) for kv in p.kv])
    verdict = check_result(out, lse, dataclasses.replace(p, seq_lens=lengths), rounds_scores=False, is_per_head=False)
    assert verdict.passed, verdict.status


def test_decodes_forked_requests_in_every_layer(device):
    """A prompt, two continuations of it and one of a part of it that ends inside a page; a freed request's pages."""
    cache = make_cache(device, num_pages=12, num_layers=2)
    gone, prompt = cache.allocate(), cache.allocate()
    append(cache, [gone], [7], seed=0)
    (shared,) = append(cache, [prompt], [10], seed=1)
    cache.free([gone])
    other, early = cache.fork(prompt), cache.fork(prompt, 5)
    rows = dict.fromkeys((prompt, other), shared) | {early: shared[:, :5]}
    for seed, count in ((2, 1), (3, 6)):
        added = append(cache, list(rows), [count] * 3, seed)
        rows = {r: torch.cat((old, new), dim=1) for (r, old), new in zip(rows.items(), added, strict=True)}
    cache.free([prompt])
    del rows[prompt]
    empty = cache.allocate()
    block_table, seq_lens = cache.tables([early, empty, other])
    assert block_table.dtype == seq_lens.dtype == torch.int32
    assert seq_lens.tolist() == [12, 0, 17]
    for layer in range(2):
        expected = [rows[early][layer], shared[layer, :0], rows[other][layer]]
        check_decode(as_problem(expected, cache.kv_cache[layer], block_table, seq_lens))


def test_full_pages_are_shared_and_a_partly_filled_one_is_copied_when_written(device):
    cache = make_cache(device)
    parent = cache.allocate()
    append(cache, [parent], [6], seed=0)
    assert cache.num_free_pages == 6
    child = cache.fork(parent)
    assert cache.num_free_pages == 6
    append(cache, [child], [1], seed=1)
    assert cache.num_free_pages == 5
    table, seq_lens = cache.tables([parent, child])
    assert table[0, 0] == table[1, 0]
    assert table[0, 1] != table[1, 1]
    assert seq_lens.tolist() == [6, 7]
    # nobody else holds the old page now
    append(cache, [parent], [1], seed=2)
    assert cache.num_free_pages == 5
    cache.free([parent])
    assert cache.num_free_pages == 6
    cache.free([child])
    assert cache.num_free_pages == 8
    assert cache.requests == []
    assert cache.kv_cache.isnan().all()


def test_of_those_that_share_a_page_one_keeps_it(device):
    cache = make_cache(device)
    parent = cache.allocate()
    append(cache, [parent], [2], seed=0)
    family = [parent, cache.fork(parent), cache.fork(parent)]
    append(cache, family, [1, 1, 1], seed=1)
    assert cache.num_free_pages == 8 - 3


def test_static_tensors_are_written_in_place(device):
    """Rows past the requests have length 0, slots past the tokens are the spare one, which is in no page."""
    cache = make_cache(device)
    requests = [cache.allocate(), cache.allocate()]
    table = torch.full((3, 4), 99, dtype=torch.int32, device=device)
    seq_lens = torch.full((3,), 99, dtype=torch.int32, device=device)
    slots = torch.full((8,), -1, device=device)
    assert cache.reserve(requests, [5, 1], out=slots) is slots
    assert slots[6:].tolist() == [cache.spare_slot] * 2
    rows = draw_rows(cache, 8, seed=0)[0]
    cache.write(0, slots, rows)
    cache.update_tables(requests, table, seq_lens)
    assert seq_lens.tolist() == [5, 1, 0]
    expected_table, expected_lens = cache.tables(requests)
    assert torch.equal(table[:2, :2], expected_table)
    assert torch.equal(seq_lens[:2], expected_lens)
    flat = cache.kv_cache[0].flatten(0, 1)
    assert torch.equal(flat[slots[:6]], rows[:6])
    assert flat.isnan().all(dim=1).sum() == len(flat) - 6


def test_out_of_pages_names_both_numbers_and_changes_nothing(device):
    cache = make_cache(device, num_pages=4)
    a, b = cache.allocate(), cache.allocate()
    append(cache, [a, b], [6, 3], seed=0)
    fork = cache.fork(a)
    before, pool = cache.tables([a, b, fork]), cache.kv_cache.clone()
    # a copy of the shared page, one page for a and one for b
    with pytest.raises(OutOfPages, match="1 free pages, got one that needs 3") as caught:
        cache.reserve([a, b], [4, 2])
    assert (caught.value.needed, caught.value.free) == (3, 1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.needed, again.free, str(again)) == (3, 1, str(caught.value))
    for old, new in zip(before, cache.tables([a, b, fork]), strict=True):
        assert torch.equal(old, new)
    torch.testing.assert_close(cache.kv_cache, pool, rtol=0, atol=0, equal_nan=True)
    # what fits is still taken
    append(cache, [b], [5], seed=1)
    assert cache.num_free_pages == 0


def test_a_cache_made_under_inference_mode_can_be_written_outside(device):
    with torch.inference_mode():
        cache = make_cache(device)
        request = cache.allocate()
        append(cache, [request], [2], seed=0)
    append(cache, [request], [2], seed=1)
    assert not cache.kv_cache[0, 0].isnan().any()


def _rows(device, **options):
    return torch.zeros(2, 48, device=device, **({"dtype": DTYPE} | options))


# each is called with a cache, a live request of 2 tokens, a freed one, slots for 2 tokens and the device
WRONG = {
    "double free": (ValueError, "got 1, which was freed", lambda c, r, gone, s, d: c.free([gone])),
    "free named twice": (ValueError, "got 0 more than once", lambda c, r, gone, s, d: c.free([r, r])),
    "free unknown": (ValueError, "got 9, which was never allocated", lambda c, r, gone, s, d: c.free([r, 9])),
    "fork freed": (ValueError, "got 1, which was freed", lambda c, r, gone, s, d: c.fork(gone)),
    "fork too long": (ValueError, "expected 0 to 2", lambda c, r, gone, s, d: c.fork(r, 3)),
    "length of freed": (ValueError, "got 1, which was freed", lambda c, r, gone, s, d: c.length(gone)),
    "reserve twice": (ValueError, "got 0 more than once", lambda c, r, gone, s, d: c.reserve([r, r])),
    "reserve freed": (ValueError, "got 1, which was freed", lambda c, r, gone, s, d: c.reserve([r, gone])),
    "negative": (ValueError, "from 0 up", lambda c, r, gone, s, d: c.reserve([r], [-1])),
    "counts missing": (ValueError, "each of 1 requests", lambda c, r, gone, s, d: c.reserve([r], [1, 2])),
    "slots too few": (ValueError, "out: expected a shape", lambda c, r, gone, s, d: c.reserve([r], 3, out=s)),
    "slots int32": (TypeError, "out: expected torch.int64", lambda c, r, gone, s, d: c.reserve([r], out=s.int())),
    "tables of freed": (ValueError, "got 1, which was freed", lambda c, r, gone, s, d: c.tables([gone])),
    "layer": (ValueError, "expected 0 to 0, got 1", lambda c, r, gone, s, d: c.write(1, s, _rows(d))),
    "rows missing": (ValueError, r"rows: expected \(2, 48\)", lambda c, r, gone, s, d: c.write(0, s, _rows(d)[:1])),
    "rows fp32": (TypeError, "float16, got torch.float32", lambda c, r, gone, s, d: c.write(0, s, _rows(d).float())),
    "other device": (RuntimeError, "pool's device", lambda c, r, gone, s, d: c.write(0, s, _rows("meta"))),
    "gradient": (RuntimeError, "no gradient", lambda c, r, gone, s, d: c.write(0, s, _rows(d, requires_grad=True))),
    "static rows": (ValueError, "seq_lens: .* at least", lambda c, r, gone, s, d: _update(c, [r, r], (2, 1), 1, d)),
    "static pages": (ValueError, "block_table: .* at least", lambda c, r, gone, s, d: _update(c, [r], (1, 0), 1, d)),
    "static batch": (ValueError, "block_table: .* at least", lambda c, r, gone, s, d: _update(c, [r], (1, 1), 2, d)),
}  # fmt: skip


def _update(cache, requests, table_shape, num_lengths, device):
    table = torch.zeros(table_shape, dtype=torch.int32, device=device)
    cache.update_tables(requests, table, torch.zeros(num_lengths, dtype=torch.int32, device=device))


@pytest.mark.parametrize("case", WRONG)
def test_misuse_is_refused_and_changes_nothing(case, device):
    error, message, call = WRONG[case]
    cache = make_cache(device)
    request, gone = cache.allocate(), cache.allocate()
    append(cache, [request, gone], [2, 3], seed=0)
    cache.free([gone])
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    before, pool = cache.tables([request]), cache.kv_cache.clone()
    with pytest.raises(error, match=message) as caught:
        call(cache, request, gone, slots, device)
    assert "expected" in str(caught.value)
    assert "got" in str(caught.value)
    assert cache.requests == [request]
    assert cache.num_free_pages == 7
    for old, new in zip(before, cache.tables([request]), strict=True):
        assert torch.equal(old, new)
    torch.testing.assert_close(cache.kv_cache, pool, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("sizes", [(0, 4, 48, 1), (8, 0, 48, 1), (8, 4, 0, 1), (8, 4, 48, 0)])
def test_sizes_must_be_positive(sizes):
    with pytest.raises(ValueError, match=r"expected .*positive.*got"):
        PagedCache(*sizes[:3], num_layers=sizes[3], device="cpu")


def test_rows_are_floating_point():
    with pytest.raises(TypeError, match=r"floating-point one, got torch\.int8"):
        PagedCache(8, 4, 48, dtype=torch.int8, device="cpu")
