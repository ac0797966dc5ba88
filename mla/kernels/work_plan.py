"""The work plan of the Hopper kernel, made on the device from the lengths as they are when it runs.

The cost of a request is its tiles plus a constant for starting and writing a run of them. Laid end to end, the
requests form a line of costs that is cut into one part a CTA. Three ways to cut are weighed, and the one whose dearest
part is cheapest is taken: whole requests, each request into the same number of equal runs, and an even share of the
line for each part. The runs of a request that a cut divides leave partial results in slots, two a part: the run
that a part begins inside a request takes its first slot, one that it ends inside a request, but does not begin there,
its second.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mla.kernels.prepared import PreparedLaunch, can_prepare

# Integers of a part and of a request, in the order in which they stand in memory. A part's first run begins at
# first_tile of request, with tokens in it; the part ends before end_tile of end_request, or before end_request where
# end_tile is 0. A request's runs are in the parts first_part to last_part, those without runs left out.
PART_FIELDS = ("num_runs", "request", "first_tile", "end_request", "end_tile", "tokens")
REQUEST_FIELDS = ("first_part", "last_part")
PART_WIDTH = tl.constexpr(8)
# A program looks at all lengths at once.
MAX_BATCH_SIZE = 4096
# Tokens of a request, so that the costs of all requests together stay far below 2^31.
MAX_SEQ_LEN = tl.constexpr(2**23)

# In units of a tile (about 1.6 us on an H200): starting and writing a run, and merging a request that a part shares.
_RUN_COST = tl.constexpr(4)
_MERGE_COST = tl.constexpr(4)
# Runs shorter than this are not worth their start: the cut moves to the request's edge.
_SHORTEST_RUN = tl.constexpr(2)
WHOLE, EQUAL_RUNS, EVEN_SHARES = (tl.constexpr(i) for i in range(3))


# by the GPU, the grid and the kernel's constants
_prepared: dict[tuple, PreparedLaunch] = {}


@dataclass(frozen=True)
class WorkPlan:
    """What the Hopper kernel reads; valid for the lengths it was made from.

    Args:
        parts: (num_parts, 8) int32, PART_FIELDS.
        requests: (batch_size, 2 + head_blocks) int32, REQUEST_FIELDS, then a counter for each block of heads. Every
            part from first_part to last_part has a run of the request. The low 16 bits of a counter are 0 between
            launches, so launches that share a plan must not overlap.
    """

    parts: torch.Tensor
    requests: torch.Tensor

    @property
    def num_slots(self) -> int:
        return 2 * len(self.parts)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _load_lengths(seq_lens_ptr, index, mask):
    """Lengths as the plan counts them: whatever the memory holds, sums of them do not overflow."""
    return tl.minimum(tl.maximum(tl.load(seq_lens_ptr + index, mask=mask, other=0), 0), MAX_SEQ_LEN)


@triton.jit
def _middle_part(edges, costs, total, num_parts):
    """The part that holds the middle of each request (BATCH,)."""
    return ((2 * edges + costs).to(tl.int64) * num_parts // (2 * total)).to(tl.int32)


@triton.jit
def _cut(i, edges, costs, tiles, index, batch_size, num_parts, total, runs_a_request, mode):
    """Cut number i: the request it falls into and the tile before which it cuts; 0 between requests.

    edges, costs, tiles, index (BATCH,): where each request begins on the line, its cost, its tiles, its number.
    """
    is_request = index < batch_size
    tile = 0
    if mode == WHOLE:
        is_before = is_request & (_middle_part(edges, costs, total, num_parts) < i)
        request = tl.sum(is_before.to(tl.int32), axis=0)
    elif mode == EQUAL_RUNS:
        # cut i begins run i % runs_a_request of request i // runs_a_request
        request = tl.minimum(i // runs_a_request, batch_size)
        own_tiles = tl.sum(tl.where(index == request, tiles, 0), axis=0)
        # pairs of tiles are loaded together
        run_tiles = (tl.cdiv(own_tiles, runs_a_request) + 1) // 2 * 2
        tile = tl.minimum(i % runs_a_request * run_tiles, own_tiles)
    else:
        # The request that holds this point of the line. Points are at least a run apart, so that no part between two
        # others of a request is empty.
        shares = tl.minimum(num_parts, total // _SHORTEST_RUN)
        point = (i.to(tl.int64) * total // shares).to(tl.int32)
        is_before = is_request & (edges + costs <= point)
        request = tl.sum(is_before.to(tl.int32), axis=0)
        edge = tl.max(tl.where(is_before, edges + costs, 0), axis=0)
        own_tiles = tl.sum(tl.where(index == request, tiles, 0), axis=0)
        tile = tl.minimum(tl.maximum(point - edge - _RUN_COST, 0), own_tiles) // 2 * 2
        if tile < _SHORTEST_RUN:
            tile = 0
        elif own_tiles - tile < _SHORTEST_RUN:
            tile = own_tiles
    # past the last tile is the next request
    if (tile > 0) & (tile >= tl.sum(tl.where(index == request, tiles, 0), axis=0)):
        request += 1
        tile = 0
    # the last cut is the end of the line
    if (i >= num_parts) | (request >= batch_size):
        request = batch_size
        tile = 0
    return request, tile


@triton.jit(
    do_not_specialize=["batch_size", "num_parts", "head_blocks"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "parts_ptr", "requests_ptr"],
)
def _work_plan_kernel(
    seq_lens_ptr, parts_ptr, requests_ptr,
    batch_size, num_parts, head_blocks,
    BATCH: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    index = tl.arange(0, BATCH)
    is_request = index < batch_size
    seq_len = _load_lengths(seq_lens_ptr, index, is_request)
    # a request without tokens is still written
    tiles = tl.where(is_request, tl.maximum((seq_len + 63) // 64, 1), 0)
    costs = tl.where(is_request, tiles + _RUN_COST, 0)
    edges = tl.cumsum(costs, axis=0) - costs
    total = tl.sum(costs, axis=0)

    # The dearest part of whole requests: requests whose middle lies in the same part are its load.
    has_previous = (index > 0) & is_request
    previous_len = _load_lengths(seq_lens_ptr, index - 1, has_previous)
    previous_costs = tl.where(has_previous, tl.maximum((previous_len + 63) // 64, 1) + _RUN_COST, 0)
    starts_part = _middle_part(edges, costs, total, num_parts) != _middle_part(
        edges - previous_costs, previous_costs, total, num_parts
    )
    part_edge = tl.associative_scan(tl.where(starts_part & has_previous, edges, 0), 0, _larger)
    whole_cost = tl.max(tl.where(is_request, edges + costs - part_edge, 0), axis=0)

    runs_a_request = tl.maximum(num_parts // batch_size, 1)
    run_tiles = (tl.cdiv(tl.max(tiles, axis=0), runs_a_request) + 1) // 2 * 2
    equal_cost = run_tiles + _RUN_COST + _MERGE_COST
    share = tl.cdiv(total, num_parts)
    # a part may share a request at either end, and begins one run more than its share of the line pays for
    even_cost = share + share // 64 + _RUN_COST + 2 * _MERGE_COST
    mode = EVEN_SHARES
    if whole_cost <= even_cost:
        mode = WHOLE
    if (runs_a_request > 1) & (equal_cost < tl.minimum(whole_cost, even_cost)):
        mode = EQUAL_RUNS

    if MODE is not None:
        mode = MODE
    request, tile = _cut(part, edges, costs, tiles, index, batch_size, num_parts, total, runs_a_request, mode)
    end_request, end_tile = _cut(
        part + 1, edges, costs, tiles, index, batch_size, num_parts, total, runs_a_request, mode
    )
    num_runs = end_request - request + (end_tile > tl.where(request == end_request, tile, 0)).to(tl.int32)
    first_len = tl.sum(tl.where(index == request, seq_len, 0), axis=0)
    tokens = tl.where(request == end_request, tl.minimum(first_len, end_tile * 64), first_len) - tile * 64
    at = parts_ptr + part * PART_WIDTH
    tl.store(at, num_runs)
    tl.store(at + 1, request)
    tl.store(at + 2, tile)
    tl.store(at + 3, end_request)
    tl.store(at + 4, end_tile)
    tl.store(at + 5, tokens)

    # whose first and last run are here
    begins = is_request & (index >= request + (tile > 0)) & (index < end_request + (end_tile > 0))
    ends = is_request & (index >= request) & (index < end_request)
    width = 2 + head_blocks
    row = requests_ptr + index * width
    tl.store(row, part + tl.zeros_like(index), mask=begins)
    tl.store(row + 1, part + tl.zeros_like(index), mask=ends)
    for i in range(2, width):
        tl.store(row + i, tl.zeros_like(index), mask=begins)


def make_work_plan(seq_lens: torch.Tensor, num_parts: int, head_blocks: int, *, mode: int | None = None) -> WorkPlan:
    """Plan a decode step; one launch, nothing is read back.

    Args:
        seq_lens: (batch_size,) int32 with 1 to MAX_BATCH_SIZE requests of 0 to MAX_SEQ_LEN tokens; what is outside
            counts as the nearer of the two.
        num_parts: CTAs that share the work of one block of heads.
        head_blocks: blocks of 64 heads.
        mode: WHOLE, EQUAL_RUNS or EVEN_SHARES, for the sweep; None: the cheapest by the rule above.

    Returns:
        A WorkPlan on seq_lens' device.
    """
    batch_size, device = len(seq_lens), seq_lens.device.index
    parts = seq_lens.new_empty((num_parts, PART_WIDTH.value))
    requests = seq_lens.new_empty((batch_size, len(REQUEST_FIELDS) + head_blocks))
    # the next power of two; Triton's own function takes a microsecond
    constants = (1 << (batch_size - 1).bit_length(), mode)
    launch = _prepared.get((device, num_parts, constants))
    if launch is None:
        compiled = _work_plan_kernel[(num_parts,)](
            seq_lens, parts, requests, batch_size, num_parts, head_blocks, *constants, num_warps=4
        )
        # on the interpreter nothing is compiled
        if compiled is not None and can_prepare():
            _prepared[device, num_parts, constants] = PreparedLaunch(compiled, (num_parts, 1), constants, device)
    else:
        addresses = (seq_lens.data_ptr(), parts.data_ptr(), requests.data_ptr())
        launch((), (*addresses, batch_size, num_parts, head_blocks))
    return WorkPlan(parts, requests)
