"""The plan covers every tile once, gives each divided request its own slots, and shares the work evenly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla.kernels.work_plan import make_work_plan


def _check(lengths, num_parts):
    """Returns tiles a part, counting a run's constant cost."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = make_work_plan(torch.tensor(lengths, dtype=torch.int32, device=device), num_parts)
    parts, items, requests = (t.tolist() for t in (plan.parts, plan.items, plan.requests))
    covered = {r: [] for r in range(len(lengths))}
    slots = {r: [] for r in range(len(lengths))}
    loads, expected_first = [], 0
    for first, end, request, first_tile, tokens, *_ in parts:
        assert first == expected_first
        assert end >= first
        expected_first = end
        if end > first:
            assert [request, first_tile, tokens] == items[first][:3]
        load = 0
        for r, tile, count, slot, *_ in items[first:end]:
            covered[r].append((tile, count))
            slots[r].append(slot)
            load += max(-(-count // 64), 1) + 5
        loads.append(load)
    assert expected_first <= len(items)
    used = []
    for r, length in enumerate(lengths):
        # runs follow each other without gap or overlap, whole tiles all but the last
        position = 0
        for tile, count in covered[r]:
            assert tile * 64 == position
            position += count
            assert count % 64 == 0 or position == length
            assert count > 0 or length == 0
        assert position == length
        if len(covered[r]) == 1:
            assert slots[r] == [-1]
            assert requests[r][1] == 0
        else:
            assert slots[r] == list(range(requests[r][0], requests[r][0] + len(covered[r])))
            assert requests[r][1] == len(covered[r])
            used += slots[r]
    assert len(set(used)) == len(used)
    assert all(0 <= slot < plan.num_slots for slot in used)
    return loads


@pytest.mark.parametrize(
    ("lengths", "num_parts", "dearest"),
    [
        ([1024] * 8, 66, 2 + 5),
        ([32768] * 32, 66, 256 + 5),
        ([1024] * 64, 66, 16 + 5),
        ([4096] * 128, 66, 2 * (64 + 5)),
        ([131072], 66, 32 + 5),
        ([131072] * 2, 66, 64 + 5),
        ([8192] * 128, 132, 128 + 5),
        ([131072] + [1024] * 127, 66, 82),
    ],
    ids=str,
)
def test_dearest_part(lengths, num_parts, dearest):
    assert max(_check(lengths, num_parts)) <= dearest


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [1], [0, 5, 0, 700], [64, 65, 63, 128, 129]], ids=str)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 66, 132])
def test_small_batches(lengths, num_parts):
    _check(lengths, num_parts)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 40_000)), min_size=1, max_size=40),
    num_parts=st.integers(1, 140),
)
def test_any_lengths(lengths, num_parts):
    _check(lengths, num_parts)


@settings(max_examples=3, deadline=None)
@given(lengths=st.lists(st.integers(4096, 32_768), min_size=100, max_size=128))
def test_ragged_batches_are_shared_evenly(lengths):
    """The dearest part costs at most 15% more than the mean."""
    loads = _check(lengths, 66)
    assert max(loads) <= 1.15 * sum(loads) / len(loads)
