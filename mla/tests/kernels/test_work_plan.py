"""The plan covers every tile once, gives divided requests their slots, and shares the work evenly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla.kernels.work_plan import MAX_SEQ_LEN, PART_FIELDS, make_work_plan
from mla.tests.kernel_cases import SHARED_ENDS

RUN_COST = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _walk(lengths, plan):
    """(part, request, first tile, tokens, slot or None) of every run, as the kernel walks them."""
    runs = []
    for part, (num_runs, request, first_tile, end_request, end_tile, tokens, *_) in enumerate(plan.parts.tolist()):
        for w in range(num_runs):
            r = request + w
            tile = first_tile if w == 0 else 0
            count = (min(lengths[r], end_tile * 64) if r == end_request else lengths[r]) - tile * 64
            if w == 0:
                assert count == tokens
            slot = 2 * part if tile > 0 else 2 * part + 1 if r == end_request else None
            runs.append((part, r, tile, count, slot))
    return runs


def _check(lengths, num_parts, seq_lens=None, mode=None):
    """Returns tiles a part, counting a run's constant cost."""
    if seq_lens is None:
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan = make_work_plan(seq_lens, num_parts, head_blocks=3, mode=mode)
    assert plan.requests.shape == (len(lengths), 2 + 3)
    assert not plan.requests[:, 2:].any()
    runs = _walk(lengths, plan)
    loads = [sum(max(-(-n // 64), 1) + RUN_COST for p, _, _, n, _ in runs if p == part) for part in range(num_parts)]
    for r, (first_part, last_part) in enumerate(plan.requests[:, :2].tolist()):
        own = [run for run in runs if run[1] == r]
        # runs follow each other without gap or overlap, whole tiles all but the last
        position = 0
        for _, _, tile, tokens, _ in own:
            assert tile * 64 == position
            assert tokens > 0 or lengths[r] == 0
            position += tokens
            assert tokens % 64 == 0 or position == lengths[r]
        assert position == lengths[r]
        parts = [run[0] for run in own]
        assert (first_part, last_part) == (parts[0], parts[-1])
        assert parts == list(range(first_part, last_part + 1))
        # the slots that the merge looks for: the first run's and, from there, the first slot of each part
        if len(own) == 1:
            assert own[0][4] is None
        else:
            assert [run[4] for run in own] == [2 * p + (p == parts[0]) for p in parts]
    return loads


@pytest.mark.parametrize(
    ("lengths", "num_parts", "dearest"),
    [
        ([1024] * 8, 66, 2 + RUN_COST),
        ([32768] * 32, 66, 256 + RUN_COST),
        ([1024] * 64, 66, 16 + RUN_COST),
        ([4096] * 128, 66, 2 * (64 + RUN_COST)),
        ([131072], 66, 32 + RUN_COST),
        ([131072] * 2, 66, 64 + RUN_COST),
        ([8192] * 128, 132, 128 + RUN_COST),
        ([131072] + [1024] * 127, 66, 82),
    ],
    ids=["8x1K", "32x32K", "64x1K", "128x4K", "1x128K", "2x128K", "128x8K-few-heads", "one-long"],
)
def test_dearest_part(lengths, num_parts, dearest):
    assert max(_check(lengths, num_parts)) <= dearest


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [1], [0, 5, 0, 700], [64, 65, 63, 128, 129]], ids=str)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 66])
def test_small_batches(lengths, num_parts):
    _check(lengths, num_parts)


@pytest.mark.parametrize("mode", range(3))
@pytest.mark.parametrize("num_parts", [1, 3, 6])
def test_a_first_request_of_one_tile(num_parts, mode):
    """It belongs to the first part, however the work is divided: the cut before it stays where it is."""
    _check([1, 3000, 0, 700], num_parts, mode=mode)


@pytest.mark.parametrize("num_parts", [66, 57], ids=["132 SMs", "114 SMs"])
def test_shared_ends_are_reached(num_parts):
    """Parts that end inside a request that they did not begin with, for which the Hopper kernel has these lengths."""
    plan = make_work_plan(torch.tensor(SHARED_ENDS, dtype=torch.int32, device=DEVICE), num_parts, head_blocks=2)
    runs = _walk(SHARED_ENDS, plan)
    ends_inside = [(part, r) for part, r, tile, n, _ in runs if tile == 0 and n < SHARED_ENDS[r]]
    first = {(part, request) for part, (_, request, *_) in enumerate(plan.parts.tolist())}
    assert len(set(ends_inside) - first) > num_parts // 2


@pytest.mark.parametrize("mode", [None, *range(3)])
def test_lengths_out_of_range_count_as_the_nearest(mode):
    """Sums of them do not overflow, even for the largest batch; a plan that did would write outside the output."""
    lengths = torch.tensor([2**31 - 1, -(2**31), -1, 5, 2**31 - 64] + [2**31 - 1] * 4091, dtype=torch.int32)
    width = len(PART_FIELDS)
    raw, nearest = (
        make_work_plan(x.to(DEVICE), 3, head_blocks=1, mode=mode)
        for x in (lengths, lengths.clamp(0, MAX_SEQ_LEN.value))
    )
    assert torch.equal(raw.parts[:, :width], nearest.parts[:, :width])
    assert torch.equal(raw.requests, nearest.requests)
    assert int(raw.parts[:, 0].min()) >= 0
    assert int(raw.parts[:, 0].sum()) in range(4096, 4096 + 3)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 40_000)), min_size=1, max_size=40),
    num_parts=st.integers(1, 24),
)
def test_any_lengths(lengths, num_parts):
    _check(lengths, num_parts)


@settings(max_examples=5, deadline=None)
@given(lengths=st.lists(st.integers(4096, 32_768), min_size=100, max_size=128))
def test_ragged_batches_are_shared_evenly(lengths):
    """The dearest part costs at most 10% more than the mean."""
    loads = _check(lengths, 66)
    assert max(loads) <= 1.10 * sum(loads) / len(loads)


def test_later_plans_follow_size_and_address():
    """On a GPU all but the first launch are prepared; what the kernel was compiled for must hold for them, too."""
    lengths = [100, 3000, 0, 64, 700]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    # the second begins at an address that is no multiple of 16
    for part in (slice(0, 4), slice(1, 5), slice(0, 3), slice(0, 4)):
        _check(lengths[part], 6, seq_lens[part])
