"""Second step to the Hopper kernel: two warpgroups that take turns on the tensor cores, and a warp that only loads.

What it adds to `gluon_simple`, where both warpgroups do the softmax of the same tile while the tensor cores wait: tiles
go in pairs, each warpgroup scores one tile of the pair, and its softmax runs under products of its own or the other's.
A program still takes 64 heads and one part of one request, with the host's side and the shared memory of
`gluon_simple`. Three groups of warps run code of their own, with registers of their own:

    producer (1 warp)      loads tiles by TMA as soon as their memory is free
    even     (4 warps)     scores of the even tile; keeps output columns   0..255
    odd      (4 warps)     scores of the odd tile;  keeps output columns 256..511

Each consumer holds half of the output's columns, so it needs the probabilities of both tiles. Time runs downwards;
`-->` is a barrier, named as in the code:

    even                                         odd
    ----                                         ---
    S0 = Q K0ᵀ (issued in the pair before)       S1 = Q K1ᵀ
    m0, P0 = softmax(S0)       --P_EVEN_READY--> O_R += P0 V0_right
    O_L += P0 V0_left                            m1, P1 = softmax(S1), under that product
      --EVEN_LEFT_FREE--> producer                 --EVEN_RIGHT_FREE--> producer
    O_L += P1 V1_left         <--P_ODD_READY--   O_R += P1 V1_right
    S0 of the next pair, under that product        --ODD_RIGHT_FREE--> producer
      --ODD_LEFT_FREE--> producer

What the barriers say; those of a pair turn once a pair, so pair i waits for parity i % 2:

    EVEN_LEFT_FULL, ...    half a tile (256 columns) has arrived; the rotated part comes with the even tile's left half
                           and with the odd tile's right half
    EVEN_LEFT_FREE, ...    its last reader, always one consumer alone, is done with it: the producer may refill it
    P_EVEN_READY           P0 and m0 are in shared memory. The P0 before was read when EVEN_RIGHT_FREE let this pair's
                           half in, the m0 before when P_ODD_READY came
    P_ODD_READY            P1 and m1 are; the ones before were read when P_EVEN_READY came. P1 takes the place of the
                           query's rotated chunk, which the consumers keep in registers
    SUM_..._READY, Q_FULL  once: a consumer's sum of probabilities, which the other adds to its own; the query

Both consumers add the even tile first, so P0 is never rescaled after it was sent. The running maximum moves only when a
row's grew by more than THRESHOLD (base 2): the output is rescaled rarely, and P may reach 2^8. A tile that a part does
not have is loaded as zeros and masked; so is the only pair of a part without tokens.

What is still slow: one program a part, so that start-up and the writing of the output (plain stores, in fp32 where
requests are divided) keep tensor cores idle, and parts of unequal length keep SMs waiting. Scores begin when half a
tile has come, and the first program to ask for a tile waits for DRAM. The finished kernel (`mla.kernels.hopper`) is
persistent, on pieces of equal work, with finer barriers, a prefetch into L2, and an output that leaves by TMA.

Reference: FlashMLA, docs/20250422-new-kernel-deep-dive.md ("seesaw"); FlashAttention-4 for the lazy rescaling.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla.kernels.hopper import _barrier, _box, _columns
from mla.kernels.tile import LN_2
from mla.problem import Problem
from mla.stages.gluon_simple import LOWEST, launch

# Registers a thread: what a SM has for 384 threads, before the producer hands most of its share to the consumers.
MAX_REGISTERS = 168
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(3 * MAX_REGISTERS - 2 * 240)
THRESHOLD = gl.constexpr(8.0)

(
    EVEN_LEFT_FULL, EVEN_RIGHT_FULL, ODD_LEFT_FULL, ODD_RIGHT_FULL,
    EVEN_LEFT_FREE, EVEN_RIGHT_FREE, ODD_LEFT_FREE, ODD_RIGHT_FREE,
    P_EVEN_READY, P_ODD_READY, SUM_EVEN_READY, SUM_ODD_READY, Q_FULL,
) = (gl.constexpr(i) for i in range(13))  # fmt: skip

# Chunks of 64 columns in a pair's memory: nine a tile, of which the ninth is the rotated part.
EVEN_LEFT, EVEN_RIGHT, EVEN_ROPE, ODD_LEFT, ODD_RIGHT, ODD_ROPE = (gl.constexpr(i) for i in (0, 4, 8, 9, 13, 17))
# Rows of the shared statistics.
MAX_EVEN, MAX_ODD, SUM_ODD = (gl.constexpr(i) for i in range(3))
# free once the last pair is through
SUM_EVEN = MAX_EVEN

# Each consumer's scores and output, and one value a row of them.
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
S_ROW = gl.constexpr(gl.SliceLayout(1, S_LAYOUT.value))
O_ROW = gl.constexpr(gl.SliceLayout(1, O_LAYOUT.value))
# Left operands that are registers: the query's rotated chunk, a consumer's own probabilities.
Q_OPERAND = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT.value, k_width=2))
P_OPERAND = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT.value, k_width=2))
# Every warp holds all 64 rows, two a lane.
ROWS_A_WARP = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))


@gluon.jit
def _load_half(desc, page, row, COLUMN: gl.constexpr, kv, CHUNK: gl.constexpr, barrier, MORE: gl.constexpr):
    """Ask for 256 columns of a tile; `barrier` expects MORE columns besides."""
    mbarrier.expect(barrier, 64 * (256 + MORE) * 2)
    tma.async_copy_global_to_shared(desc, [page, row, COLUMN], barrier, _box(kv, CHUNK, 64, 256))


@gluon.jit
def _first_row(tokens):
    """Where a box starts so that a tile's tokens come last in it: 0 for a whole tile, -64 for none."""
    return gl.maximum(gl.minimum(tokens, 64), 0) - 64


@gluon.jit
def _produce(q, kv, bars, q_desc, q_rope_desc, kv_desc, kv_rope_desc, pages, b, first_head, tokens, num_pairs):
    """The producer warp: the query, then pair after pair, each half as soon as its memory is free."""
    mbarrier.expect(bars[Q_FULL], 64 * 576 * 2)
    tma.async_copy_global_to_shared(q_rope_desc, [b, first_head, 512], bars[Q_FULL], _box(q, 8, 64, 64))
    tma.async_copy_global_to_shared(q_desc, [b, first_head, 0], bars[Q_FULL], _box(q, 0, 64, 256))
    tma.async_copy_global_to_shared(q_desc, [b, first_head, 256], bars[Q_FULL], _box(q, 4, 64, 256))
    # past the part's last tile: that tile's page, of which no row is then asked for; no tokens, no page
    last = gl.maximum((tokens + 63) // 64 - 1, 0)
    even_page = gl.load(pages, mask=tokens > 0, other=0)
    odd_page = gl.load(pages + gl.minimum(1, last), mask=tokens > 0, other=0)
    for i in range(num_pairs):
        # of the release made a pair ago; passes at once for the first
        parity = (i & 1) ^ 1
        even_row = _first_row(tokens - i * 128)
        odd_row = _first_row(tokens - i * 128 - 64)
        mbarrier.wait(bars[EVEN_LEFT_FREE], parity)
        _load_half(kv_desc, even_page, even_row, 0, kv, EVEN_LEFT, bars[EVEN_LEFT_FULL], 64)
        tma.async_copy_global_to_shared(
            kv_rope_desc, [even_page, even_row, 512], bars[EVEN_LEFT_FULL], _box(kv, EVEN_ROPE, 64, 64)
        )
        mbarrier.wait(bars[EVEN_RIGHT_FREE], parity)
        _load_half(kv_desc, even_page, even_row, 256, kv, EVEN_RIGHT, bars[EVEN_RIGHT_FULL], 0)
        even_page = gl.load(pages + gl.minimum(2 * i + 2, last), mask=tokens > 0, other=0)
        mbarrier.wait(bars[ODD_LEFT_FREE], parity)
        _load_half(kv_desc, odd_page, odd_row, 0, kv, ODD_LEFT, bars[ODD_LEFT_FULL], 0)
        mbarrier.wait(bars[ODD_RIGHT_FREE], parity)
        _load_half(kv_desc, odd_page, odd_row, 256, kv, ODD_RIGHT, bars[ODD_RIGHT_FULL], 64)
        tma.async_copy_global_to_shared(
            kv_rope_desc, [odd_page, odd_row, 512], bars[ODD_RIGHT_FULL], _box(kv, ODD_ROPE, 64, 64)
        )
        odd_page = gl.load(pages + gl.minimum(2 * i + 3, last), mask=tokens > 0, other=0)


@gluon.jit
def _mask(scores, tokens):
    """The rows of a short tile that hold no token stand first."""
    if tokens < 64:
        column = gl.arange(0, 64, gl.SliceLayout(0, S_LAYOUT))
        scores = gl.where((column >= 64 - tokens)[None, :], scores, -3e38)
    return scores


@gluon.jit
def _softmax(scores, row_max, scale_log2):
    """P, its row sums, and the new maximum, which moves only by more than THRESHOLD."""
    tile_max = gl.max(scores, axis=1) * scale_log2
    new_max = gl.where(tile_max > row_max + THRESHOLD, tile_max, row_max)
    p = gl.exp2(scores * scale_log2 - new_max[:, None])
    return p, gl.sum(p, axis=1), new_max


@gluon.jit
def _has_moved(shared_max, known):
    """Whether any row's maximum differs from the one known before, and the 64 maxima.

    A scalar, by one reduction inside each warp: the warps have nothing to exchange.
    """
    maxima = shared_max.load(ROWS_A_WARP)
    return gl.max((maxima != known).to(gl.int32), axis=0), maxima


@gluon.jit
def _rescale(acc, row_sum, old_max, new_max):
    correction = gl.exp2(old_max - new_max)
    acc = acc * gl.convert_layout(correction, O_ROW)[:, None]
    return acc, row_sum * correction


@gluon.jit
def _write(acc, row_sum, row_max, HALF: gl.constexpr, out_ptr, lse_ptr, first_row, heads_left):
    """One consumer's columns of the part; the even one also writes lse. Heads past the last are left alone."""
    row_sum = gl.convert_layout(row_sum, O_ROW)
    row_max = gl.convert_layout(row_max, O_ROW)
    has_tokens = row_sum > 0.0
    safe_sum = gl.where(has_tokens, row_sum, 1.0)
    acc = acc * (1.0 / safe_sum)[:, None]
    heads = gl.arange(0, 64, O_ROW)
    columns = gl.arange(0, 256, gl.SliceLayout(0, O_LAYOUT)) + HALF * 256
    out_rows = out_ptr + first_row * 512 + heads[:, None] * 512 + columns[None, :]
    gl.store(out_rows, acc.to(out_ptr.dtype.element_ty), mask=(heads < heads_left)[:, None])
    if HALF == 0:
        lse = gl.where(has_tokens, (row_max + gl.log2(safe_sum)) * LN_2, float("-inf"))
        gl.store(lse_ptr + first_row + heads, lse, mask=heads < heads_left)


@gluon.jit
def _consume_even(q, kv, p_even, stats, bars, out_ptr, lse_ptr, first_row, heads_left, tokens, num_pairs, scale_log2):
    """Scores of the even tiles, output columns 0..255."""
    acc = gl.full([64, 256], 0.0, gl.float32, O_LAYOUT)
    s = gl.full([64, 64], 0.0, gl.float32, S_LAYOUT)
    m1 = gl.full([64], LOWEST, gl.float32, S_ROW)
    maxima = gl.full([64], LOWEST, gl.float32, ROWS_A_WARP)
    row_sum = gl.full([64], 0.0, gl.float32, S_ROW)
    mbarrier.wait(bars[Q_FULL], 0)
    q_rope = q.index(8).load(Q_OPERAND)
    # Always 0, but not known to be: it keeps the descriptors of wgmma from being hoisted and spilled.
    z = num_pairs >> 30
    mbarrier.wait(bars[EVEN_LEFT_FULL], 0)
    s = warpgroup_mma(
        _columns(q, z, 256), _columns(kv, z + EVEN_LEFT, 256).permute((1, 0)), s, use_acc=False, is_async=True
    )
    s = warpgroup_mma(q_rope, kv.index(z + EVEN_ROPE).permute((1, 0)), s, is_async=True)
    mbarrier.wait(bars[EVEN_RIGHT_FULL], 0)
    s = warpgroup_mma(_columns(q, z + 4, 256), _columns(kv, z + EVEN_RIGHT, 256).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    for i in range(num_pairs):
        parity = i & 1
        z = i >> 30
        left = _columns(kv, z + EVEN_LEFT, 256)
        p, tile_sum, m0 = _softmax(_mask(s, tokens - i * 128), m1, scale_log2)
        p16 = p.to(kv.dtype)
        p_even.store(p16)
        stats.index(MAX_EVEN).store(m0)
        fence_async_shared()
        mbarrier.arrive(bars[P_EVEN_READY], count=1)
        moved, maxima = _has_moved(stats.index(MAX_EVEN), maxima)
        if moved != 0:
            acc, row_sum = _rescale(acc, row_sum, m1, m0)
        row_sum = row_sum + tile_sum
        p_operand = gl.convert_layout(p16, P_OPERAND)
        acc = warpgroup_mma(p_operand, left, acc, is_async=True)
        acc, p_operand = warpgroup_mma_wait(0, deps=(acc, p_operand))
        mbarrier.arrive(bars[EVEN_LEFT_FREE], count=1)

        mbarrier.wait(bars[P_ODD_READY], parity)
        m1 = stats.index(MAX_ODD).load(S_ROW)
        moved, maxima = _has_moved(stats.index(MAX_ODD), maxima)
        if moved != 0:
            acc, row_sum = _rescale(acc, row_sum, m0, m1)
        # P1 lies in the query's rotated chunk
        if i + 1 < num_pairs:
            acc = warpgroup_mma(q.index(z + 8), _columns(kv, z + ODD_LEFT, 256), acc, is_async=True)
            mbarrier.wait(bars[EVEN_LEFT_FULL], parity ^ 1)
            s = warpgroup_mma(_columns(q, z, 256), left.permute((1, 0)), s, use_acc=False, is_async=True)
            s = warpgroup_mma(q_rope, kv.index(z + EVEN_ROPE).permute((1, 0)), s, is_async=True)
            # all but the two steps of the scores
            acc = warpgroup_mma_wait(2, deps=(acc,))
            mbarrier.arrive(bars[ODD_LEFT_FREE], count=1)
            mbarrier.wait(bars[EVEN_RIGHT_FULL], parity ^ 1)
            right = _columns(kv, z + EVEN_RIGHT, 256)
            s = warpgroup_mma(_columns(q, z + 4, 256), right.permute((1, 0)), s, is_async=True)
            # nothing in flight across the loop's end: ptxas would make every wgmma wait for the one before
            s = warpgroup_mma_wait(0, deps=(s,))
        else:
            acc = warpgroup_mma(q.index(z + 8), _columns(kv, z + ODD_LEFT, 256), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))

    # `odd` read the last MAX_EVEN before it sent the last P1
    stats.index(SUM_EVEN).store(row_sum)
    mbarrier.arrive(bars[SUM_EVEN_READY], count=1)
    mbarrier.wait(bars[SUM_ODD_READY], 0)
    row_sum = row_sum + stats.index(SUM_ODD).load(S_ROW)
    _write(acc, row_sum, m1, 0, out_ptr, lse_ptr, first_row, heads_left)


@gluon.jit
def _consume_odd(q, kv, p_even, stats, bars, out_ptr, lse_ptr, first_row, heads_left, tokens, num_pairs, scale_log2):
    """Scores of the odd tiles, output columns 256..511."""
    acc = gl.full([64, 256], 0.0, gl.float32, O_LAYOUT)
    s = gl.full([64, 64], 0.0, gl.float32, S_LAYOUT)
    m1 = gl.full([64], LOWEST, gl.float32, S_ROW)
    maxima = gl.full([64], LOWEST, gl.float32, ROWS_A_WARP)
    row_sum = gl.full([64], 0.0, gl.float32, S_ROW)
    mbarrier.wait(bars[Q_FULL], 0)
    q_rope = q.index(8).load(Q_OPERAND)
    for i in range(num_pairs):
        parity = i & 1
        # as in _consume_even
        z = i >> 30
        left = _columns(kv, z + ODD_LEFT, 256)
        right = _columns(kv, z + ODD_RIGHT, 256)
        mbarrier.wait(bars[ODD_LEFT_FULL], parity)
        s = warpgroup_mma(_columns(q, z, 256), left.permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(bars[ODD_RIGHT_FULL], parity)
        s = warpgroup_mma(q_rope, kv.index(z + ODD_ROPE).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(_columns(q, z + 4, 256), right.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))

        mbarrier.wait(bars[P_EVEN_READY], parity)
        m0 = stats.index(MAX_EVEN).load(S_ROW)
        moved, maxima = _has_moved(stats.index(MAX_EVEN), maxima)
        s = _mask(s, tokens - 64 - i * 128)
        if moved != 0:
            acc, row_sum = _rescale(acc, row_sum, m1, m0)
        # runs under the softmax of the odd tile
        acc = warpgroup_mma(p_even, _columns(kv, z + EVEN_RIGHT, 256), acc, is_async=True)
        p, tile_sum, m1 = _softmax(s, m0, scale_log2)
        p16 = p.to(kv.dtype)
        # both consumers hold the query's rotated chunk in registers: `even` had to, to send P0
        q.index(8).store(p16)
        stats.index(MAX_ODD).store(m1)
        fence_async_shared()
        mbarrier.arrive(bars[P_ODD_READY], count=1)
        moved, maxima = _has_moved(stats.index(MAX_ODD), maxima)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(bars[EVEN_RIGHT_FREE], count=1)
        if moved != 0:
            acc, row_sum = _rescale(acc, row_sum, m0, m1)
        row_sum = row_sum + tile_sum
        p_operand = gl.convert_layout(p16, P_OPERAND)
        acc = warpgroup_mma(p_operand, right, acc, is_async=True)
        acc, p_operand = warpgroup_mma_wait(0, deps=(acc, p_operand))
        mbarrier.arrive(bars[ODD_RIGHT_FREE], count=1)

    stats.index(SUM_ODD).store(row_sum)
    mbarrier.arrive(bars[SUM_ODD_READY], count=1)
    mbarrier.wait(bars[SUM_EVEN_READY], 0)
    row_sum = row_sum + stats.index(SUM_EVEN).load(S_ROW)
    _write(acc, row_sum, m1, 1, out_ptr, lse_ptr, first_row, heads_left)


# not specialised on counts: a new value must not compile the kernel again
@gluon.jit(do_not_specialize=["num_heads", "num_splits", "stride_table"])
def _mla_decode_gluon_warp_specialised_kernel(
    q_desc, q_rope_desc, kv_desc, kv_rope_desc,
    block_table_ptr, seq_lens_ptr, out_ptr, lse_ptr,
    num_heads, num_splits, scale_log2,
    stride_table,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    first_head = gl.program_id(0) * 64
    split = gl.program_id(1)
    b = gl.program_id(2)
    seq_len = gl.load(seq_lens_ptr + b)
    tiles_a_part = ((seq_len + 63) // 64 + num_splits - 1) // num_splits
    first_tile = split * tiles_a_part
    # 0 or less where the request has fewer tiles than parts
    tokens = gl.minimum(seq_len - first_tile * 64, tiles_a_part * 64)
    num_pairs = gl.maximum((tokens + 127) // 128, 1)
    pages = block_table_ptr + b.to(gl.int64) * stride_table + first_tile
    first_row = (b.to(gl.int64) * num_splits + split) * num_heads + first_head

    q = gl.allocate_shared_memory(q_desc.dtype, [9, 64, 64], LAYOUT)
    kv = gl.allocate_shared_memory(q_desc.dtype, [18, 64, 64], LAYOUT)
    p_even = gl.allocate_shared_memory(q_desc.dtype, [64, 64], LAYOUT)
    stats = gl.allocate_shared_memory(gl.float32, [3, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = (
        _barrier(), _barrier(), _barrier(), _barrier(), _barrier(), _barrier(), _barrier(),
        _barrier(), _barrier(), _barrier(), _barrier(), _barrier(), _barrier(),
    )  # fmt: skip
    fence_async_shared()
    gl.thread_barrier()
    consumer_arguments = (
        q, kv, p_even, stats, bars, out_ptr, lse_ptr, first_row, num_heads - first_head, tokens, num_pairs, scale_log2,
    )  # fmt: skip
    producer_arguments = (
        q, kv, bars, q_desc, q_rope_desc, kv_desc, kv_rope_desc, pages, b, first_head, tokens, num_pairs,
    )  # fmt: skip
    gl.warp_specialize(
        [(_consume_even, consumer_arguments), (_consume_odd, consumer_arguments), (_produce, producer_arguments)],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def decode(problem: Problem, num_splits: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode on the paged cache, in parts that are merged.

    Args:
        problem: uses q_absorbed, kv_cache, block_table, seq_lens; see `gluon_simple.check_problem` for what is taken.
        num_splits: parts a request; chosen to fill about one wave of SMs if None.

    Returns:
        out (batch_size, num_heads, 512) in the problem's dtype, lse (batch_size, num_heads) fp32.

    Raises:
        ValueError: as `gluon_simple`, or a scale that is not positive: the maximum is taken before scaling.
        RuntimeError: not on a Hopper GPU.
    """
    if not problem.softmax_scale > 0:
        raise ValueError(f"softmax_scale: expected a positive number, got {problem.softmax_scale}")
    kernel = _mla_decode_gluon_warp_specialised_kernel
    return launch(kernel, problem, num_splits, box_width=256, num_warps=4, maxnreg=MAX_REGISTERS)
