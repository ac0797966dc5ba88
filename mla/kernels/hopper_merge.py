"""How the Hopper kernel merges the partial results of divided requests, without a launch of its own.

Each CTA that has a run of a request counts it once its partial result is in memory, waits until all are counted, and
merges its share of the rows. A counter belongs to a request and a block of heads and lies in the plan.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Stands for -inf where a difference with it is taken.
_LOWEST = gl.constexpr(-1e30)
# All runs of a request together add this to its counter: it is a multiple of it before a launch and when all are there.
_FULL_COUNT = gl.constexpr(65536)


@gluon.jit
def plan_of_request(requests_ptr, request):
    """Where a request's row of the plan begins: REQUEST_FIELDS, then a counter for each block of heads."""
    return requests_ptr + request * (2 + gl.num_programs(0))


@gluon.jit
def _runs_of(row):
    """First part of a request, this part's run of it, and its number of runs."""
    first_part = gl.load(row)
    return first_part, gl.program_id(1) - first_part, gl.load(row + 1) - first_part + 1


@gluon.jit
def announce_run(row, head_block):
    """Count this part's run of a request. A barrier before must have seen the run's partial result in memory."""
    _, run, num_runs = _runs_of(row)
    gl.atomic_add(row + 2 + head_block, gl.where(run == 0, _FULL_COUNT - num_runs + 1, 1), sem="release")


@gluon.jit
def _load_acquire(counter):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _merge_rows(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, request, first_part, num_runs, row, end_row, head_block, num_heads,
    stride_out_batch, stride_out_head, ROWS: gl.constexpr, RUNS: gl.constexpr,
):  # fmt: skip
    """Merge rows [row, end_row) of a block of heads, ROWS at a time, RUNS partial results of each at a time."""
    TILE: gl.constexpr = gl.BlockedLayout([ROWS // 4, RUNS, 8], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.SliceLayout(1, TILE)  # (ROWS, 512)
    LSE: gl.constexpr = gl.SliceLayout(2, TILE)  # (ROWS, RUNS)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    LSE_ROW: gl.constexpr = gl.SliceLayout(1, LSE)
    runs = gl.arange(0, RUNS, gl.SliceLayout(0, LSE))
    columns = gl.arange(0, 512, gl.SliceLayout(0, OUT))
    tile_columns = gl.expand_dims(gl.arange(0, 512, gl.SliceLayout(0, gl.SliceLayout(0, TILE)))[None, :], 0)
    while row < end_row:
        rows = row + gl.arange(0, ROWS, LSE_ROW)
        largest = gl.full([ROWS], _LOWEST, gl.float32, LSE_ROW)
        total = gl.full([ROWS], 0.0, gl.float32, LSE_ROW)
        acc = gl.full([ROWS, 512], 0.0, gl.float32, OUT)
        for start in range(0, num_runs, RUNS):
            run = start + runs
            is_used = (run < num_runs)[None, :] & (rows < end_row)[:, None]
            # the first run ends inside its part, which makes it the part's second slot
            slot = 2 * (first_part + run) + (run == 0).to(gl.int32)
            at = slot[None, :] * num_heads + head_block * 64 + rows[:, None]
            x = gl.load(part_lse_ptr + at, mask=is_used, other=_LOWEST, cache_modifier=".cg")
            out = gl.load(
                part_out_ptr + gl.expand_dims(at * 512, 2) + tile_columns,
                mask=gl.expand_dims(is_used, 2), other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new_largest = gl.maximum(largest, gl.max(x, axis=1))
            correction = gl.exp(largest - new_largest)
            weight = gl.exp(x - new_largest[:, None])
            total = total * correction + gl.sum(weight, axis=1)
            acc = acc * gl.convert_layout(correction, OUT_ROW)[:, None]
            acc += gl.sum(out.to(gl.float32) * gl.expand_dims(weight, 2), axis=1)
            largest = new_largest
        out_rows = row + gl.arange(0, ROWS, OUT_ROW)
        out_at = request.to(gl.int64) * stride_out_batch + (head_block * 64 + out_rows).to(gl.int64) * stride_out_head
        gl.store(
            out_ptr + out_at[:, None] + columns[None, :],
            (acc * gl.convert_layout(1.0 / total, OUT_ROW)[:, None]).to(out_ptr.dtype.element_ty),
            mask=(out_rows < end_row)[:, None],
        )
        lse_at = request.to(gl.int64) * num_heads + head_block * 64 + rows
        gl.store(lse_ptr + lse_at, largest + gl.log(total), mask=rows < end_row)
        row += ROWS


@gluon.jit
def merge_request(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, plan_row, request, head_block, num_heads,
    stride_out_batch, stride_out_head,
):  # fmt: skip
    """Wait for the other runs of a request and merge this CTA's share of its rows."""
    first_part, run, num_runs = _runs_of(plan_row)
    heads = gl.minimum(num_heads - head_block * 64, 64)
    row = run * heads // num_runs
    end_row = (run + 1) * heads // num_runs
    while _load_acquire(plan_row + 2 + head_block) % _FULL_COUNT != 0:
        pass
    if num_runs <= 2:
        _merge_rows(
            part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, request, first_part, num_runs, row, end_row, head_block,
            num_heads, stride_out_batch, stride_out_head, 16, 2,
        )  # fmt: skip
    else:
        _merge_rows(
            part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, request, first_part, num_runs, row, end_row, head_block,
            num_heads, stride_out_batch, stride_out_head, 4, 8,
        )  # fmt: skip
