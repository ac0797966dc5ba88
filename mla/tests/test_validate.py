"""Lengths and page ids out of range: refused with `validate`, and without it never followed out of the cache."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla.checks import check_contents
from mla.tests.kernel_cases import DEVICE, DTYPE, KERNELS, check, decode, make, request

PAGE_SIZE = 16
MAX_PAGES = 9
CAPACITY = PAGE_SIZE * MAX_PAGES
BEYOND = [CAPACITY + 1, 2**31 - 1, 2**31 - 64, -1, -(2**31)]


def _surrounded(p):
    """The same problem cut out of a pool and a table that lead to NaN wherever a kernel reads past their ends."""
    num_pages, page_size, width = p.kv_cache.shape
    pool = torch.full((num_pages + 40, page_size, width), torch.nan, dtype=DTYPE, device=DEVICE)
    pool[20:-20] = p.kv_cache
    # ids of pages that lie behind the pool's end
    table = torch.full(
        (len(p.block_table) + 2, p.block_table.shape[1]), num_pages + 3, dtype=torch.int32, device=DEVICE
    )
    table[1:-1] = p.block_table
    return dataclasses.replace(p, kv_cache=pool[20:-20], block_table=table[1:-1])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=["divided", "whole"])
def test_lengths_out_of_range_read_nothing_outside(kernel, options):
    """They count as 0 and as the table's room."""
    p = make([CAPACITY] * 7, page_size=PAGE_SIZE)
    p = _surrounded(dataclasses.replace(p, kv_cache=p.kv_cache.nan_to_num(1.0)))
    lengths = torch.tensor([*BEYOND, 37, CAPACITY], dtype=torch.int32, device=DEVICE)
    result = decode(kernel, dataclasses.replace(p, seq_lens=lengths), **options)
    check(result, dataclasses.replace(p, seq_lens=lengths.clamp(0, CAPACITY)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("page_size", [16, 64], ids=lambda n: f"p{n}")
@pytest.mark.parametrize("beyond", [-1, -(2**31), 2**31 - 1, 2**26, "first behind"], ids=str)
def test_pages_out_of_range_read_nothing_outside(kernel, page_size, beyond):
    """They count as tokens of zeros, also in the last, partial page; other requests are right."""
    p = _surrounded(make([5 * page_size, 3 * page_size + 7, 2 * page_size, 300], page_size=page_size))
    kv, table = p.kv.clone(), p.block_table.clone()
    beyond = len(p.kv_cache) if beyond == "first behind" else beyond
    for b, entry in ((0, 0), (0, 3), (1, 3)):
        table[b, entry] = beyond
        rows = slice(entry * page_size, min((entry + 1) * page_size, int(p.seq_lens[b])))
        kv[b, rows] = 0.0
    check(decode(kernel, dataclasses.replace(p, block_table=table)), dataclasses.replace(p, kv=kv))


@pytest.mark.parametrize("num_heads", [4, pytest.param(128, marks=pytest.mark.gpu)], ids=lambda h: f"h{h}")
@pytest.mark.parametrize("lengths", [[0, 0], [5, 2**31 - 1]], ids=str)
def test_a_pool_without_pages_is_not_read(num_heads, lengths):
    p = make([0, 0], num_heads, page_size=64)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    result = decode("portable", dataclasses.replace(p, kv_cache=p.kv_cache[:0], seq_lens=lengths), num_splits=None)
    check(result, p)


@pytest.mark.parametrize(
    ("name", "request_", "value", "message"),
    [
        ("seq_lens", 2, -1, r"seq_lens: expected 0 to 144 tokens.*got -1 for request 2"),
        ("seq_lens", 0, CAPACITY + 1, r"seq_lens: expected 0 to 144 tokens.*got 145 for request 0"),
        ("seq_lens", 1, 2**31 - 1, r"got 2147483647 for request 1; correct it or widen block_table"),
        ("block_table", 3, -1, r"block_table: expected ids from 0 to \d+, .*got -1 as page 2 of request 3.*uses 3"),
        ("block_table", 0, 10**6, r"got 1000000 as page 2 of request 0"),
    ],
    ids=["negative", "one too many", "2^31-1", "negative page", "page past the pool"],
)
def test_validate_names_the_request(name, request_, value, message):
    p = make([CAPACITY, 20, 0, 33], page_size=PAGE_SIZE)
    wrong = getattr(p, name).clone()
    wrong[(request_, 2) if name == "block_table" else request_] = value
    wrong = dataclasses.replace(p, **{name: wrong})
    with pytest.raises(ValueError, match=message):
        decode("portable", wrong, validate=True)
    decode("portable", wrong)
    check(decode("portable", p, validate=True), p)


def test_validate_comes_after_the_checks_of_every_call():
    p = make([20, 3])
    for options in ({}, {"validate": True}):
        with pytest.raises(TypeError, match=r"seq_lens: expected torch\.int32"):
            decode("portable", dataclasses.replace(p, seq_lens=p.seq_lens.long()), **options)
    nothing = dataclasses.replace(
        p, q_absorbed=p.q_absorbed[:0], block_table=p.block_table[:0], seq_lens=p.seq_lens[:0]
    )
    assert decode("portable", nothing, validate=True)[0].shape[0] == 0


def test_validate_is_refused_inside_torch_compile(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"validate: expected a call outside torch\.compile"):
        decode("portable", make([20, 3]), validate=True)


def _is_valid(lengths, table, num_pages):
    """The rule in plain Python."""
    for length, row in zip(lengths, table, strict=True):
        if not 0 <= length <= len(row) * PAGE_SIZE:
            return False
        if any(not 0 <= page < num_pages for page in row[: -(-length // PAGE_SIZE)]):
            return False
    return True


_INT32 = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_validate_agrees_with_the_rule(data):
    batch_size, max_pages, num_pages = (data.draw(st.integers(low, 4)) for low in (1, 1, 0))
    # mostly in range, so that all is valid often enough
    length = st.one_of(*[st.integers(0, max_pages * PAGE_SIZE)] * 4, st.integers(-2, 70), _INT32)
    page = st.one_of(*[st.integers(0, max(num_pages - 1, 0))] * 8, _INT32)
    lengths = data.draw(st.lists(length, min_size=batch_size, max_size=batch_size))
    row = st.lists(page, min_size=max_pages, max_size=max_pages)
    table = data.draw(st.lists(row, min_size=batch_size, max_size=batch_size))
    tensors = (torch.empty(num_pages, PAGE_SIZE, 48), *(torch.tensor(x, dtype=torch.int32) for x in (table, lengths)))
    if _is_valid(lengths, table, num_pages):
        check_contents(*tensors)
    else:
        with pytest.raises(ValueError, match="expected"):
            check_contents(*tensors)


@pytest.mark.gpu
def test_validate_synchronises_once_and_never_in_a_capture():
    p = make([20, 3])
    decode("portable", p, validate=True)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as caught:
            decode("portable", p, validate=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchroniz" in str(w.message) for w in caught) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="validate: expected a call outside a CUDA graph"):
            decode("portable", p, validate=True)
        decode("portable", p)


def test_requests_beside_a_wrong_one_keep_their_bits():
    p = make([CAPACITY, 37], page_size=PAGE_SIZE)
    expected = decode("portable", request(p, 1))
    wrong = p.seq_lens.clone()
    wrong[0] = 2**31 - 1
    out, lse = decode("portable", dataclasses.replace(p, seq_lens=wrong))
    assert torch.equal(out[1:], expected[0])
    assert torch.equal(lse[1:], expected[1])
