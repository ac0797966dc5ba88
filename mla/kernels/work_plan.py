"""The work plan of the Hopper kernel, made on the device from the lengths as they are when it runs.

The cost of a request is its tiles plus a constant for starting and writing a run of them. Laid end to end, the
requests form a line of costs that is cut into one part a CTA. Three ways to cut are weighed, and the one with the
cheapest dearest part is taken: whole requests, each request into the same number of equal runs, and an even share of
the line for each part. Requests that a cut divides write partial results to slots, which a merge combines.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE = 64
# Integers of an item (a run of tiles of one request), of a part and of a request, in the order in which they stand.
ITEM_FIELDS = ("request", "first_tile", "tokens", "slot")
PART_FIELDS = ("first_item", "end_item", "request", "first_tile", "tokens")
REQUEST_FIELDS = ("first_slot", "num_slots")
_WIDTH = tl.constexpr(8)

# In units of a tile (about 1.6 us on an H200): starting and writing a run, and the merge of the runs of a request.
_RUN_COST = tl.constexpr(5)
_MERGE_COST = tl.constexpr(3)
# Runs shorter than this are not worth their start: the cut moves to the request's edge.
_SHORTEST_RUN = tl.constexpr(2)
WHOLE, EQUAL_RUNS, EVEN_SHARES = (tl.constexpr(i) for i in range(3))


@dataclass(frozen=True)
class WorkPlan:
    """What the Hopper kernel and its merge read; valid for the lengths it was made from.

    Args:
        parts: (num_parts, 8) int32, PART_FIELDS; the first item's fields stand here too, to save a load.
        items: (batch_size + num_parts, 8) int32, ITEM_FIELDS; slot is -1 for a whole request.
        requests: (batch_size, 2) int32, REQUEST_FIELDS; num_slots is 0 for a whole request.
    """

    parts: torch.Tensor
    items: torch.Tensor
    requests: torch.Tensor

    @property
    def num_slots(self) -> int:
        """Upper bound of the slots in use: every cut inside a request adds one, and its first one more."""
        return 2 * max(len(self.parts) - 1, 1)


@triton.jit
def _cuts(i, edges, costs, tiles, index, batch_size, num_parts, total, per_request, mode):
    """Cut number i (PARTS,): the request it falls into and the tile before which it cuts.

    edges, costs, tiles, index (BATCH,): where each request begins on the line, its cost, its tiles, its number.
    """
    # even shares and whole requests: the request that holds this point of the line
    point = (i.to(tl.int64) * total // num_parts).to(tl.int32)
    ends = edges + costs
    is_before = (ends[None, :] <= point[:, None]) & (index < batch_size)[None, :]
    request = tl.sum(is_before.to(tl.int32), axis=1)
    edge = tl.max(tl.where(is_before, ends[None, :], 0), axis=1)
    own = index[None, :] == request[:, None]
    own_tiles = tl.sum(tl.where(own, tiles[None, :], 0), axis=1)
    own_cost = tl.sum(tl.where(own, costs[None, :], 0), axis=1)

    # pairs of tiles are loaded together
    even = tl.minimum(tl.maximum(point - edge - _RUN_COST, 0), own_tiles) // 2 * 2
    to_start = even < _SHORTEST_RUN
    to_end = (own_tiles - even < _SHORTEST_RUN) & ~to_start
    whole_is_next = point - edge > own_cost // 2

    # equal runs: cut i is run i % per_request of request i // per_request
    equal_request = tl.minimum(i // per_request, batch_size)
    run = i % per_request
    equal_tiles = tl.sum(tl.where(index[None, :] == equal_request[:, None], tiles[None, :], 0), axis=1)
    run_tiles = (equal_tiles + per_request - 1) // per_request
    run_tiles = (run_tiles + 1) // 2 * 2
    equal = run * run_tiles
    is_past = (equal >= equal_tiles) & (run > 0)

    is_inside = request < batch_size
    cut_request = tl.where(
        mode == EQUAL_RUNS,
        tl.where(is_past, equal_request + 1, equal_request),
        tl.where(mode == WHOLE, request + (whole_is_next & is_inside), request + (to_end & is_inside)),
    )
    cut_tile = tl.where(
        mode == EQUAL_RUNS,
        tl.where(is_past | (equal_request >= batch_size), 0, equal),
        tl.where((mode == WHOLE) | to_start | to_end | ~is_inside, 0, even),
    )
    # the first and the last cut are the ends of the line
    is_last = i >= num_parts
    cut_request = tl.where(is_last, batch_size, tl.where(i <= 0, 0, tl.minimum(cut_request, batch_size)))
    cut_tile = tl.where(is_last | (i <= 0), 0, cut_tile)
    return cut_request, cut_tile


@triton.jit
def _work_plan_kernel(
    seq_lens_ptr, parts_ptr, items_ptr, requests_ptr,
    batch_size, num_parts,
    BATCH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    # A program a part; each looks at all lengths and writes its own items.
    part = tl.program_id(0)
    index = tl.arange(0, BATCH)
    seq_len = tl.load(seq_lens_ptr + index, mask=index < batch_size, other=0)
    # a request without tokens is still written
    tiles = tl.where(index < batch_size, tl.maximum((seq_len + 63) // 64, 1), 0)
    costs = tl.where(index < batch_size, tiles + _RUN_COST, 0)
    ends = tl.cumsum(costs, axis=0)
    edges = ends - costs
    total = tl.sum(costs, axis=0)

    i = tl.arange(0, PARTS)
    per_request = tl.maximum(num_parts // batch_size, 1)
    # the dearest part of each way to cut
    first, _ = _cuts(i, edges, costs, tiles, index, batch_size, num_parts, total, per_request, WHOLE)
    last, _ = _cuts(i + 1, edges, costs, tiles, index, batch_size, num_parts, total, per_request, WHOLE)
    in_part = (index[None, :] >= first[:, None]) & (index[None, :] < last[:, None]) & (i < num_parts)[:, None]
    whole_cost = tl.max(tl.sum(tl.where(in_part, costs[None, :], 0), axis=1), axis=0)
    longest = tl.max(tiles, axis=0)
    run_tiles = ((longest + per_request - 1) // per_request + 1) // 2 * 2
    equal_cost = run_tiles + _RUN_COST + _MERGE_COST
    share = (total + num_parts - 1) // num_parts
    # uneven runs of long batches keep fewer head blocks in step: 3% in the sweep
    even_cost = share + share // 32 + _RUN_COST + _MERGE_COST
    can_be_equal = (per_request > 1) & (batch_size * per_request <= num_parts)
    mode = tl.where(whole_cost <= even_cost, WHOLE, EVEN_SHARES)
    mode = tl.where(can_be_equal & (equal_cost < tl.minimum(whole_cost, even_cost)), EQUAL_RUNS, mode)

    request, tile = _cuts(i, edges, costs, tiles, index, batch_size, num_parts, total, per_request, mode)
    before_request, before_tile = _cuts(
        i - 1, edges, costs, tiles, index, batch_size, num_parts, total, per_request, mode
    )
    after_request, after_tile = _cuts(
        i + 1, edges, costs, tiles, index, batch_size, num_parts, total, per_request, mode
    )
    is_part = i < num_parts
    is_empty = (after_request == request) & (after_tile == tile)
    num_items = tl.where(is_part & ~is_empty, after_request - request + (after_tile > 0), 0)
    first_item = tl.sum(tl.where(i < part, num_items, 0), axis=0)
    end_item = first_item + tl.sum(tl.where(i == part, num_items, 0), axis=0)
    # cuts inside a request, each counted once
    is_inner = is_part & (tile > 0) & ((request != before_request) | (tile != before_tile))
    is_first_inner = is_inner & ((request != before_request) | (before_tile == 0))

    begin_request = tl.sum(tl.where(i == part, request, 0), axis=0)
    begin_tile = tl.sum(tl.where(i == part, tile, 0), axis=0)
    finish_request = tl.sum(tl.where(i == part, after_request, 0), axis=0)
    finish_tile = tl.sum(tl.where(i == part, after_tile, 0), axis=0)
    tl.store(parts_ptr + part * _WIDTH, first_item)
    tl.store(parts_ptr + part * _WIDTH + 1, end_item)
    for item in range(first_item, end_item):
        r = begin_request + item - first_item
        r_len = tl.load(seq_lens_ptr + r)
        r_tiles = tl.maximum((r_len + 63) // 64, 1)
        from_tile = tl.where(r == begin_request, begin_tile, 0)
        to_tile = tl.where(r == finish_request, finish_tile, r_tiles)
        tokens = tl.minimum(r_len, to_tile * 64) - from_tile * 64
        inner_here = tl.sum((is_inner & (request == r)).to(tl.int32), axis=0)
        inner_before = tl.sum((is_inner & (request < r)).to(tl.int32), axis=0)
        divided_before = tl.sum((is_first_inner & (request < r)).to(tl.int32), axis=0)
        first_slot = inner_before + divided_before
        run = tl.sum((is_inner & (request == r) & (i <= part)).to(tl.int32), axis=0)
        slot = tl.where(inner_here > 0, first_slot + run, -1)
        at = items_ptr + item * _WIDTH
        tl.store(at, r)
        tl.store(at + 1, from_tile)
        tl.store(at + 2, tokens)
        tl.store(at + 3, slot)
        if item == first_item:
            tl.store(parts_ptr + part * _WIDTH + 2, r)
            tl.store(parts_ptr + part * _WIDTH + 3, from_tile)
            tl.store(parts_ptr + part * _WIDTH + 4, tokens)
        if from_tile == 0:
            tl.store(requests_ptr + r * 2, first_slot)
            tl.store(requests_ptr + r * 2 + 1, tl.where(inner_here > 0, inner_here + 1, 0))


def make_work_plan(seq_lens: torch.Tensor, num_parts: int) -> WorkPlan:
    """Plan a decode step; one launch, nothing is read back.

    Args:
        seq_lens: (batch_size,) int32; 0 allowed.
        num_parts: CTAs that share the work of one block of heads.

    Returns:
        A WorkPlan on seq_lens' device.
    """
    batch_size = len(seq_lens)
    # zeros, so that a part without items has none whatever stood there
    parts = seq_lens.new_zeros(num_parts, _WIDTH.value)
    items = seq_lens.new_empty(batch_size + num_parts, _WIDTH.value)
    requests = seq_lens.new_empty(batch_size, len(REQUEST_FIELDS))
    _work_plan_kernel[(num_parts,)](
        seq_lens, parts, items, requests,
        batch_size, num_parts,
        BATCH=triton.next_power_of_2(batch_size), PARTS=triton.next_power_of_2(num_parts + 1),
        num_warps=4,
    )  # fmt: skip
    return WorkPlan(parts, items, requests)
