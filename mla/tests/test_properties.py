"""Properties of `mla_decode` over drawn shapes, lengths, pages and splits (on the CPU: the portable kernel)."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla.tests.kernel_cases import DEVICE, DTYPE, assert_same_bits, check, decode, make, request

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="drawn for the interpreter; on a GPU: the campaign")
_lengths = st.lists(st.integers(0, 130), min_size=1, max_size=3)
_page_sizes = st.one_of(st.sampled_from([1, 16, 32, 64]), st.integers(1, 70))
_splits = st.one_of(st.none(), st.integers(1, 6))


@settings(max_examples=25, deadline=None)
@given(
    lengths=_lengths,
    num_heads=st.integers(1, 20),
    page_size=_page_sizes,
    num_splits=_splits,
    dtype=st.sampled_from([torch.float16, torch.float32]),
    logit_scale=st.sampled_from([0.1, 1.0, 10.0, 60.0]),
    seed=st.integers(0, 2**31),
)
def test_within_the_bound_of_the_reference(lengths, num_heads, page_size, num_splits, dtype, logit_scale, seed):
    p = make(lengths, num_heads, page_size, dtype, logit_scale=logit_scale, seed=seed)
    check(decode("portable", p, num_splits=num_splits), p)


@settings(max_examples=12, deadline=None)
@given(lengths=_lengths, num_splits=st.integers(1, 5), seed=st.integers(0, 2**31), data=st.data())
def test_order_of_requests_and_pages_changes_no_bit(lengths, num_splits, seed, data):
    p = make(lengths, seed=seed)
    order = data.draw(st.permutations(range(len(lengths))))
    pages = torch.randperm(len(p.kv_cache), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    used = p.block_table < len(pages)
    table = torch.where(used, pages.argsort().int()[p.block_table.clamp(max=len(pages) - 1).long()], p.block_table)
    moved = dataclasses.replace(
        p, q_absorbed=p.q_absorbed[order], seq_lens=p.seq_lens[order], block_table=table[order],
        kv_cache=p.kv_cache[pages],
    )  # fmt: skip
    out, lse = decode("portable", p, num_splits=num_splits)
    assert_same_bits(decode("portable", moved, num_splits=num_splits), (out[order], lse[order]))


@settings(max_examples=10, deadline=None)
@given(lengths=_lengths, added=st.integers(0, 40), seed=st.integers(0, 2**31), data=st.data())
def test_batch_invariant_results_do_not_depend_on_the_batch(lengths, added, seed, data):
    """Nor on how wide the table is, which the longest request decides."""
    p = make(lengths, seed=seed)
    b = data.draw(st.sampled_from(range(len(lengths))))
    alone = request(p, b)
    wider = torch.full((1, alone.block_table.shape[1] + added), -1, dtype=torch.int32, device=DEVICE)
    wider[:, : alone.block_table.shape[1]] = alone.block_table
    alone = dataclasses.replace(alone, block_table=wider)
    out, lse = decode("portable", p, num_splits=None, batch_invariant=True)
    assert_same_bits(decode("portable", alone, num_splits=None, batch_invariant=True), (out[b : b + 1], lse[b : b + 1]))


@settings(max_examples=10, deadline=None)
@given(length=st.integers(1, 130), cut=st.integers(0, 130), seed=st.integers(0, 2**31))
def test_two_parts_of_a_context_merge_to_the_whole(length, cut, seed):
    """What a server does that keeps a shared prefix apart: two calls, merged by their lse."""
    from mla.kernels.merge import merge_partials

    cut, page_size = min(cut, length) // 16 * 16, 16
    p = make([length], page_size=page_size, seed=seed)
    parts = []
    for begin, end in ((0, cut), (cut, length)):
        table = p.block_table[:, begin // page_size :].contiguous()
        table = table if table.shape[1] else p.block_table
        lengths = torch.full_like(p.seq_lens, end - begin)
        parts.append(decode("portable", dataclasses.replace(p, block_table=table, seq_lens=lengths)))
    out, lse = (torch.stack([part[i] for part in parts], dim=1).float() for i in range(2))
    merged = torch.empty_like(p.q_absorbed[..., :32], dtype=DTYPE), torch.empty_like(lse[:, 0])
    check(merge_partials(out.contiguous(), lse.contiguous(), *merged), p)
