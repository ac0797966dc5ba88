"""The Hopper kernel: persistent, warp-specialised MLA decode in Gluon (sm_90a), for 512 + 64 in 16 bits.

One CTA per SM walks the runs that the plan gave it (`mla.kernels.work_plan`): consecutive 64-token tiles of a request,
for one block of 64 heads. Tiles go in pairs, and three groups of warps share a pair:

    producer (1 warp)      loads the tiles by TMA, each in groups that are refilled as soon as they are free
    even     (4 warps)     scores of the even tile; keeps output columns   0..255
    odd      (4 warps)     scores of the odd tile;  keeps output columns 256..511

A 64 x 512 fp32 output is half of an SM's registers, so each consumer holds half of its columns and needs the
probabilities of both tiles. Time runs downwards; `-->` is a barrier, named as in the code:

    even                                         odd
    ----                                         ---
    S0 = Q K0ᵀ (issued in the pair before)       S1 = Q K1ᵀ, chunk by chunk as it lands
    m0, P0 = softmax(S0)       --P_EVEN_READY--> O_R += P0 V0_right
    O_L += P0 V0_left                            m1, P1 = softmax(S1), under that product
      (frees the left half of the even tile)       (frees the right half of the even tile)
    O_L += P1 V1_left         <--P_ODD_READY--   O_R += P1 V1_right
      (frees the left half of the odd tile)        (frees the right half of the odd tile)
    S0 of the next pair, begun under that product

Both consumers add the even tile first, then the odd one, so P0 is never rescaled after it was sent. The running
maximum moves only when a row's maximum grew by more than THRESHOLD (base 2), so that the rescaling of the output is
skipped nearly always; P may thus reach 2^THRESHOLD. Which rows moved is sent along with P, after which each consumer
finds for itself whether any did: nothing but the maximum itself stands between S and P.

A KV tile is 64 x 576: nine chunks of 64 columns, the ninth the rotated part. Its refill groups are released by exactly
one consumer each: EVEN_LEFT_FREE and ODD_LEFT_FREE by `even`, EVEN_RIGHT_FREE and ODD_RIGHT_FREE by `odd`; the rotated
part goes with the left half of the even and the right half of the odd tile. Full barriers are finer, one every 128
columns, so that Q Kᵀ starts when the first lands. Q's rotated chunk lives in registers; its shared memory takes P1. A
product whose operand is in registers holds its warps until it starts, so the rotated part is multiplied last.

The two CTAs of a request's head blocks load the same tiles. Each asks for one tile of the next pair in L2, one half
after its loads of the even tile, the other after those of the odd one: a whole tile at once, or before them, holds them
up. In the first pair of a run both wait until its even tile has landed.

The last tile of a request is loaded with its tokens in the last rows: the box starts at a negative row, for which TMA
writes zeros. Nothing past a request's end is read, whatever it holds; what stands before it is masked. Nor is anything
outside the cache and the table: a length counts as no more than its row of the table has pages for, and a page that the
pool does not have is zeros, too.

Runs of a divided request leave partial results, which the CTAs that made them merge once all are there
(`mla.kernels.hopper_merge`). They wait for each other, so the launch is a cooperative one: all CTAs are resident.

Three orders that no barrier of their own names: `even` may store the next P0 only after `odd` has read the last one,
which it knows through EVEN_RIGHT_FREE and the refilled right half it waits for; each consumer knows that its partner's
tile has landed through that partner's P; and what is shared across runs (maxima, what moved, sums) is kept apart by
the exchange of P, of which every run has at least one. `mla/tests/kernels/barrier_model.py` is this protocol in plain
Python, tied to this file.

Against FlashMLA's write-up (docs/20250422-new-kernel-deep-dive.md): `even` and `odd` are its warpgroups 0 and 1, the
exchange of P is its seesaw; the producer warp, the lazy rescaling, the order of the two products and the merge in the
kernel are not there.

Reference: FlashMLA; FlashAttention-4 for the lazy rescaling.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mla.kernels.hopper_merge import announce_run, merge_request, plan_of_request
from mla.kernels.work_plan import PART_FIELDS, PART_WIDTH

(
    EVEN_FULL_0, EVEN_FULL_1, EVEN_FULL_2, EVEN_FULL_3, EVEN_ROPE_FULL,
    ODD_FULL_0, ODD_FULL_1, ODD_FULL_2, ODD_FULL_3, ODD_ROPE_FULL,
    EVEN_LEFT_FREE, EVEN_RIGHT_FREE, ODD_RIGHT_FREE, ODD_LEFT_FREE,
    P_EVEN_READY, P_ODD_READY, SUM_EVEN_READY, SUM_ODD_READY,
    Q_FIRST_FULL, Q_SECOND_FULL, Q_FREE,
) = (gl.constexpr(i) for i in range(21))  # fmt: skip

# The fields of a part (`mla.kernels.work_plan.PART_FIELDS`).
NUM_RUNS, REQUEST, FIRST_TILE, END_REQUEST, END_TILE, TOKENS = (gl.constexpr(i) for i in range(len(PART_FIELDS)))

# Stands for -inf where a difference with it is taken.
_LOWEST = gl.constexpr(-1e30)
_LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _barrier():
    # Each in an allocation of its own: one array of them makes the compiler put a CTA barrier before every wait.
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def _columns(chunks, first, WIDTH: gl.constexpr):
    """WIDTH columns (64, 128 or 256) of a [n, 64, 64] buffer from chunk `first` on, as one [64, WIDTH] matrix."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return chunks.index(first)._reinterpret(chunks.dtype, [64, WIDTH], LAYOUT)


@gluon.jit
def _box(chunks, first, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """The same memory as a TMA box [1, ROWS, WIDTH]."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    return chunks.index(first)._reinterpret(chunks.dtype, [1, ROWS, WIDTH], LAYOUT)


@gluon.jit
def _load_columns(
    desc, kv, chunk, COLUMN: gl.constexpr, WIDTH: gl.constexpr, barrier,
    table, page, tile, tokens, last_page, ROWS: gl.constexpr, TILES_PER_PAGE: gl.constexpr,
):  # fmt: skip
    """Ask for WIDTH columns of one tile; `tokens` of the request are left from the tile on (none: zeros).

    A box of ROWS rows never straddles two pages. A box that holds n < ROWS tokens starts at row n - ROWS of its page's
    part, so that they end up in its last rows; TMA writes zeros for negative rows.
    """
    mbarrier.expect(barrier, 64 * WIDTH * 2)
    if ROWS == 64:
        held = gl.minimum(tokens, 64)
        row = gl.where(held <= 0, -64, (tile % TILES_PER_PAGE) * 64 + held - 64)
        tma.async_copy_global_to_shared(desc, [page, row, COLUMN], barrier, _box(kv, chunk, 64, WIDTH))
    else:
        # a box is 64 columns wide: one of 128 would expect its two halves side by side, not 64 rows apart
        parts = kv._reinterpret(kv.dtype, [18 * 64 // ROWS, ROWS, 64], gl.NVMMASharedLayout(128, 16, rank=2))
        for i in gl.static_range(64 // ROWS):
            held = gl.maximum(gl.minimum(tokens - i * ROWS, ROWS), 0)
            box_page = gl.load(table + gl.minimum(tile * (64 // ROWS) + i, last_page))
            for c in gl.static_range(WIDTH // 64):
                tma.async_copy_global_to_shared(
                    desc, [box_page, held - ROWS, COLUMN + 64 * c], barrier,
                    _box(parts, (chunk + c) * (64 // ROWS) + i, ROWS, 64),
                )  # fmt: skip


@gluon.jit
def _prefetch_half(
    kv_ptr, table, tile, half, last_page, num_pages, stride_page, ROWS: gl.constexpr, TILES_PER_PAGE: gl.constexpr
):  # fmt: skip
    """Ask for 32 tokens of a tile, contiguous rows of 1152 bytes, in L2."""
    if ROWS == 64:
        page = gl.load(table + tile // TILES_PER_PAGE)
        row = (tile % TILES_PER_PAGE) * 64 + half * 32
    else:
        page = gl.load(table + gl.minimum(tile * 2 + half, last_page))
        row = gl.to_tensor(0)
    # TMA reads zeros for a page that the pool does not have; an address must not be made of its id
    page = gl.where(page.to(gl.uint32) < num_pages.to(gl.uint32), page, 0)
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [kv_ptr + page.to(gl.int64) * stride_page + row.to(gl.int64) * 576, gl.to_tensor(32 * 1152)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _field(parts_ptr, field):
    """A field of this CTA's part (PART_FIELDS)."""
    return gl.load(parts_ptr + gl.program_id(1) * PART_WIDTH + field)


@gluon.jit
def _tokens_of_run(seq_lens_ptr, w, part, max_seq_len):
    """Tokens of run w of a part, whose fields are `part` (PART_FIELDS)."""
    tokens = part[TOKENS]
    if w > 0:
        # the first run's came with the part, to save a load before the first tile
        tokens = gl.minimum(gl.maximum(gl.load(seq_lens_ptr + part[REQUEST] + w), 0), max_seq_len)
        if part[REQUEST] + w == part[END_REQUEST]:
            tokens = gl.minimum(tokens, part[END_TILE] * 64)
    return tokens


@gluon.jit
def _produce(
    q, kv, bars, q_desc, q_rope_desc, kv_desc, kv_rope_desc, kv_ptr, block_table_ptr, seq_lens_ptr,
    part, head_block, max_seq_len, num_pages, stride_table, stride_page,
    ROWS: gl.constexpr, TILES_PER_PAGE: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """The producer warp: all TMA loads, and the L2 prefetch of the next pair (each head block asks for one tile)."""
    # the next kernel's CTAs may take the SMs that this one leaves
    gdc_launch_dependents()
    pair = 0
    for w in range(part[NUM_RUNS]):
        request = part[REQUEST] + w
        tile = gl.where(w == 0, part[FIRST_TILE], 0)
        tokens = _tokens_of_run(seq_lens_ptr, w, part, max_seq_len)
        table = block_table_ptr + request.to(gl.int64) * stride_table
        end_tile = tile + (tokens + 63) // 64
        last_tile = gl.maximum(end_tile - 1, tile)
        last_page = gl.maximum((tile * 64 + tokens - 1) // ROWS, 0)
        even_page = gl.load(table + tile // TILES_PER_PAGE, mask=tokens > 0, other=0)
        odd_page = gl.load(table + gl.minimum(tile + 1, last_tile) // TILES_PER_PAGE, mask=tokens > 0, other=0)

        mbarrier.wait(bars[Q_FREE], (w & 1) ^ 1)
        mbarrier.expect(bars[Q_FIRST_FULL], 64 * (256 + 64) * 2)
        head = head_block * 64
        tma.async_copy_global_to_shared(q_rope_desc, [request, head, 512], bars[Q_FIRST_FULL], _box(q, 8, 64, 64))
        tma.async_copy_global_to_shared(q_desc, [request, head, 0], bars[Q_FIRST_FULL], _box(q, 0, 64, 256))
        num_pairs = gl.maximum((tokens + 127) // 128, 1)
        for i in range(num_pairs):
            parity = (pair & 1) ^ 1  # of the release made a pair ago; passes at once for the first
            odd = gl.minimum(tile + 1, last_tile)
            mbarrier.wait(bars[EVEN_LEFT_FREE], parity)
            _load_columns(
                kv_desc, kv, 0, 0, 128, bars[EVEN_FULL_0],
                table, even_page, tile, tokens, last_page, ROWS, TILES_PER_PAGE,
            )  # fmt: skip
            _load_columns(
                kv_desc, kv, 2, 128, 128, bars[EVEN_FULL_1],
                table, even_page, tile, tokens, last_page, ROWS, TILES_PER_PAGE,
            )  # fmt: skip
            _load_columns(
                kv_rope_desc, kv, 8, 512, 64, bars[EVEN_ROPE_FULL],
                table, even_page, tile, tokens, last_page, ROWS, TILES_PER_PAGE,
            )  # fmt: skip
            if i == 0:
                mbarrier.expect(bars[Q_SECOND_FULL], 64 * 256 * 2)
                tma.async_copy_global_to_shared(q_desc, [request, head, 256], bars[Q_SECOND_FULL], _box(q, 4, 64, 256))
            mbarrier.wait(bars[EVEN_RIGHT_FREE], parity)
            _load_columns(
                kv_desc, kv, 4, 256, 128, bars[EVEN_FULL_2],
                table, even_page, tile, tokens, last_page, ROWS, TILES_PER_PAGE,
            )  # fmt: skip
            _load_columns(
                kv_desc, kv, 6, 384, 128, bars[EVEN_FULL_3],
                table, even_page, tile, tokens, last_page, ROWS, TILES_PER_PAGE,
            )  # fmt: skip
            if PREFETCH:  # noqa: SIM102 (decided at compile time)
                if (i > 0) & (tile + 2 + head_block < end_tile):
                    _prefetch_half(
                        kv_ptr, table, tile + 2 + head_block, 0, last_page, num_pages, stride_page, ROWS, TILES_PER_PAGE
                    )  # fmt: skip
            next_even = gl.minimum(tile + 2, last_tile)
            even_page = gl.load(table + next_even // TILES_PER_PAGE, mask=tokens > 0, other=0)
            mbarrier.wait(bars[ODD_LEFT_FREE], parity)
            _load_columns(
                kv_desc, kv, 9, 0, 128, bars[ODD_FULL_0],
                table, odd_page, odd, tokens - 64, last_page, ROWS, TILES_PER_PAGE,
            )  # fmt: skip
            _load_columns(
                kv_desc, kv, 11, 128, 128, bars[ODD_FULL_1],
                table, odd_page, odd, tokens - 64, last_page, ROWS, TILES_PER_PAGE,
            )  # fmt: skip
            mbarrier.wait(bars[ODD_RIGHT_FREE], parity)
            _load_columns(
                kv_desc, kv, 13, 256, 128, bars[ODD_FULL_2],
                table, odd_page, odd, tokens - 64, last_page, ROWS, TILES_PER_PAGE,
            )  # fmt: skip
            _load_columns(
                kv_desc, kv, 15, 384, 128, bars[ODD_FULL_3],
                table, odd_page, odd, tokens - 64, last_page, ROWS, TILES_PER_PAGE,
            )  # fmt: skip
            _load_columns(
                kv_rope_desc, kv, 17, 512, 64, bars[ODD_ROPE_FULL],
                table, odd_page, odd, tokens - 64, last_page, ROWS, TILES_PER_PAGE,
            )  # fmt: skip
            if PREFETCH:  # noqa: SIM102
                if tile + 2 + head_block < end_tile:
                    if i == 0:
                        # the first pair is on its way to every SM: let it pass
                        mbarrier.wait(bars[EVEN_FULL_3], pair & 1)
                        _prefetch_half(
                            kv_ptr, table, tile + 2 + head_block, 0, last_page, num_pages, stride_page, ROWS,
                            TILES_PER_PAGE,
                        )  # fmt: skip
                    _prefetch_half(
                        kv_ptr, table, tile + 2 + head_block, 1, last_page, num_pages, stride_page, ROWS, TILES_PER_PAGE
                    )  # fmt: skip
            odd_page = gl.load(table + gl.minimum(tile + 3, last_tile) // TILES_PER_PAGE, mask=tokens > 0, other=0)
            tile += 2
            tokens -= 128
            pair += 1


@gluon.jit
def _mask(scores, tokens, ROWS: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Rows of a short tile that hold no token: each box has its tokens last (see `_load_columns`)."""
    if tokens < 64:
        column = gl.arange(0, 64, gl.SliceLayout(0, S_LAYOUT))
        held = gl.minimum(tokens - (column // ROWS) * ROWS, ROWS)
        scores = gl.where((column % ROWS >= ROWS - held)[None, :], scores, -3e38)
    return scores


@gluon.jit
def _move_maximum(scores, row_max, scale_log2, THRESHOLD: gl.constexpr):
    """The rows' new maximum, and which of them moved."""
    tile_max = gl.max(scores, axis=1) * scale_log2
    grows = tile_max > row_max + THRESHOLD
    return gl.where(grows, tile_max, row_max), grows.to(gl.int32)


@gluon.jit
def _any_moved(moved):
    """Whether any of 64 rows' maxima moved (a scalar).

    Every warp reads all rows, two a lane: one reduction in the warp, no exchange between warps.
    """
    TWO_A_LANE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    return gl.max(moved.load(TWO_A_LANE), axis=0)


@gluon.jit
def _finish(
    acc, row_sum, row_max, kv, part_desc, out_desc, part_lse_ptr, lse_ptr, w, part, head_block, num_heads,
    CHUNK: gl.constexpr, HALF: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write one consumer's columns of a run: through its half of the odd tile, then out by TMA.

    A whole request goes to out and lse; a run that the part begins inside a request to the part's first slot, one that
    it only ends inside a request to its second. TMA clips heads past num_heads.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    row_sum = gl.convert_layout(row_sum, ROW)
    row_max = gl.convert_layout(row_max, ROW)
    has_tokens = row_sum > 0.0
    safe_sum = gl.where(has_tokens, row_sum, 1.0)
    acc = acc * (1.0 / safe_sum)[:, None]
    lse = gl.where(has_tokens, (row_max + gl.log2(safe_sum)) * _LN_2, float("-inf"))
    request = part[REQUEST] + w
    begins_inside = (w == 0) & (part[FIRST_TILE] > 0)
    ends_inside = request == part[END_REQUEST]
    first_slot = 2 * gl.program_id(1)
    slot = gl.where(begins_inside, first_slot, gl.where(ends_inside, first_slot + 1, -1))
    heads = head_block * 64 + gl.arange(0, 64, ROW)
    staged = _columns(kv, CHUNK, 256)
    staged.store(acc.to(kv.dtype))
    fence_async_shared()
    gl.thread_barrier()
    if slot >= 0:
        tma.async_copy_shared_to_global(part_desc, [slot, head_block * 64, HALF * 256], _box(kv, CHUNK, 64, 256))
        if HALF == 0:
            gl.store(part_lse_ptr + slot * num_heads + heads, lse, mask=heads < num_heads)
        # until the partial result is in memory; store_wait would only wait until shared memory was read
        gl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;", "=r", [],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tma.async_copy_shared_to_global(out_desc, [request, head_block * 64, HALF * 256], _box(kv, CHUNK, 64, 256))
        if HALF == 0:
            gl.store(lse_ptr + request.to(gl.int64) * num_heads + heads, lse, mask=heads < num_heads)
        tma.store_wait(0)


@gluon.jit
def _consume_even(
    q, kv, p_even, shared_max, sums, moved, bars, part_desc, out_desc, part_lse_ptr, lse_ptr, seq_lens_ptr,
    part, head_block, num_heads, max_seq_len, scale_log2, THRESHOLD: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Scores of the even tiles, output columns 0..255."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    Q_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2)
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    pair = 0
    for w in range(part[NUM_RUNS]):
        tokens = _tokens_of_run(seq_lens_ptr, w, part, max_seq_len)
        end = pair + gl.maximum((tokens + 127) // 128, 1)
        run_parity = w & 1
        acc = gl.full([64, 256], 0.0, gl.float32, O_LAYOUT)
        s = gl.full([64, 64], 0.0, gl.float32, S_LAYOUT)
        m1 = gl.full([64], _LOWEST, gl.float32, S_ROW)
        row_sum = gl.full([64], 0.0, gl.float32, S_ROW)
        mbarrier.wait(bars[Q_FIRST_FULL], run_parity)
        # Always 0, but not known to be: it keeps the descriptors of wgmma from being hoisted and spilled.
        z = w >> 30
        mbarrier.wait(bars[EVEN_FULL_0], pair & 1)
        s = warpgroup_mma(_columns(q, z, 128), _columns(kv, z, 128).permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(bars[EVEN_FULL_1], pair & 1)
        s = warpgroup_mma(_columns(q, z + 2, 128), _columns(kv, z + 2, 128).permute((1, 0)), s, is_async=True)
        mbarrier.wait(bars[Q_SECOND_FULL], run_parity)
        mbarrier.wait(bars[EVEN_FULL_2], pair & 1)
        s = warpgroup_mma(_columns(q, z + 4, 128), _columns(kv, z + 4, 128).permute((1, 0)), s, is_async=True)
        mbarrier.wait(bars[EVEN_FULL_3], pair & 1)
        s = warpgroup_mma(_columns(q, z + 6, 128), _columns(kv, z + 6, 128).permute((1, 0)), s, is_async=True)
        q_rope = q.index(8).load(Q_OPERAND)
        mbarrier.wait(bars[EVEN_ROPE_FULL], pair & 1)
        s = warpgroup_mma(q_rope, kv.index(z + 8).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        for j in range(pair, end):
            parity = j & 1
            z = j >> 30
            s = _mask(s, tokens, ROWS, S_LAYOUT)
            m0, rows_moved = _move_maximum(s, m1, scale_log2, THRESHOLD)
            shared_max.index(0).store(m0)
            moved.index(0).store(rows_moved)
            p = gl.exp2(s * scale_log2 - m0[:, None])
            p16 = p.to(kv.dtype)
            p_even.store(p16)
            fence_async_shared()
            mbarrier.arrive(bars[P_EVEN_READY], count=1)
            tile_sum = gl.sum(p, axis=1)
            if _any_moved(moved.index(0)) != 0:
                correction = gl.exp2(m1 - m0)
                row_sum = row_sum * correction
                acc = acc * gl.convert_layout(correction, O_ROW)[:, None]
            row_sum = row_sum + tile_sum
            p_operand = gl.convert_layout(p16, P_OPERAND)
            acc = warpgroup_mma(p_operand, _columns(kv, z, 256), acc, is_async=True)
            acc, p_operand = warpgroup_mma_wait(0, deps=(acc, p_operand))
            mbarrier.arrive(bars[EVEN_LEFT_FREE], count=1)

            mbarrier.wait(bars[P_ODD_READY], parity)
            odd_moved = _any_moved(moved.index(1))
            m1 = shared_max.index(1).load(S_ROW)
            if odd_moved != 0:
                correction = gl.exp2(m0 - m1)
                row_sum = row_sum * correction
                acc = acc * gl.convert_layout(correction, O_ROW)[:, None]
            if j + 1 < end:
                acc = warpgroup_mma(q.index(z + 8), _columns(kv, z + 9, 256), acc, is_async=True)
                mbarrier.wait(bars[EVEN_FULL_0], parity ^ 1)
                s = warpgroup_mma(
                    _columns(q, z, 128), _columns(kv, z, 128).permute((1, 0)), s, use_acc=False, is_async=True
                )
                mbarrier.wait(bars[EVEN_FULL_1], parity ^ 1)
                s = warpgroup_mma(_columns(q, z + 2, 128), _columns(kv, z + 2, 128).permute((1, 0)), s, is_async=True)
                acc = warpgroup_mma_wait(2, deps=(acc,))
                mbarrier.arrive(bars[ODD_LEFT_FREE], count=1)
                mbarrier.wait(bars[EVEN_FULL_2], parity ^ 1)
                s = warpgroup_mma(_columns(q, z + 4, 128), _columns(kv, z + 4, 128).permute((1, 0)), s, is_async=True)
                mbarrier.wait(bars[EVEN_FULL_3], parity ^ 1)
                s = warpgroup_mma(_columns(q, z + 6, 128), _columns(kv, z + 6, 128).permute((1, 0)), s, is_async=True)
                mbarrier.wait(bars[EVEN_ROPE_FULL], parity ^ 1)
                s = warpgroup_mma(q_rope, kv.index(z + 8).permute((1, 0)), s, is_async=True)
                s = warpgroup_mma_wait(0, deps=(s,))
            else:
                acc = warpgroup_mma(q.index(z + 8), _columns(kv, z + 9, 256), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
            tokens -= 128
        pair = end

        # Q and P1, which is in Q's memory, were read for the last time: `odd` finished with Q before it sent P1
        mbarrier.arrive(bars[Q_FREE], count=1)
        sums.index(0).store(row_sum)
        mbarrier.arrive(bars[SUM_EVEN_READY], count=1)
        mbarrier.wait(bars[SUM_ODD_READY], run_parity)
        row_sum = row_sum + sums.index(1).load(S_ROW)
        _finish(
            acc, row_sum, m1, kv, part_desc, out_desc, part_lse_ptr, lse_ptr, w, part, head_block, num_heads,
            9, 0, O_LAYOUT,
        )  # fmt: skip
        mbarrier.arrive(bars[ODD_LEFT_FREE], count=1)


@gluon.jit
def _consume_odd(
    q, kv, p_even, shared_max, sums, moved, bars, part_desc, out_desc, part_lse_ptr, lse_ptr, seq_lens_ptr,
    part, head_block, num_heads, max_seq_len, scale_log2, THRESHOLD: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Scores of the odd tiles, output columns 256..511."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    Q_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2)
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    pair = 0
    for w in range(part[NUM_RUNS]):
        tokens = _tokens_of_run(seq_lens_ptr, w, part, max_seq_len)
        end = pair + gl.maximum((tokens + 127) // 128, 1)
        run_parity = w & 1
        acc = gl.full([64, 256], 0.0, gl.float32, O_LAYOUT)
        s = gl.full([64, 64], 0.0, gl.float32, S_LAYOUT)
        m1 = gl.full([64], _LOWEST, gl.float32, S_ROW)
        row_sum = gl.full([64], 0.0, gl.float32, S_ROW)
        mbarrier.wait(bars[Q_FIRST_FULL], run_parity)
        q_rope = q.index(8).load(Q_OPERAND)
        mbarrier.wait(bars[Q_SECOND_FULL], run_parity)
        for j in range(pair, end):
            parity = j & 1
            # as in _consume_even
            z = j >> 30
            mbarrier.wait(bars[ODD_FULL_0], parity)
            s = warpgroup_mma(
                _columns(q, z, 128), _columns(kv, z + 9, 128).permute((1, 0)), s, use_acc=False, is_async=True
            )
            mbarrier.wait(bars[ODD_FULL_1], parity)
            s = warpgroup_mma(_columns(q, z + 2, 128), _columns(kv, z + 11, 128).permute((1, 0)), s, is_async=True)
            mbarrier.wait(bars[ODD_FULL_2], parity)
            s = warpgroup_mma(_columns(q, z + 4, 128), _columns(kv, z + 13, 128).permute((1, 0)), s, is_async=True)
            mbarrier.wait(bars[ODD_FULL_3], parity)
            s = warpgroup_mma(_columns(q, z + 6, 128), _columns(kv, z + 15, 128).permute((1, 0)), s, is_async=True)
            mbarrier.wait(bars[ODD_ROPE_FULL], parity)
            s = warpgroup_mma(q_rope, kv.index(z + 17).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))

            mbarrier.wait(bars[P_EVEN_READY], parity)
            even_moved = _any_moved(moved.index(0))
            m0 = shared_max.index(0).load(S_ROW)
            s = _mask(s, tokens - 64, ROWS, S_LAYOUT)
            if even_moved != 0:
                correction = gl.exp2(m1 - m0)
                row_sum = row_sum * correction
                acc = acc * gl.convert_layout(correction, O_ROW)[:, None]
            # runs under the softmax of the odd tile
            acc = warpgroup_mma(p_even, _columns(kv, z + 4, 256), acc, is_async=True)
            m1, rows_moved = _move_maximum(s, m0, scale_log2, THRESHOLD)
            shared_max.index(1).store(m1)
            moved.index(1).store(rows_moved)
            p = gl.exp2(s * scale_log2 - m1[:, None])
            p16 = p.to(kv.dtype)
            q.index(8).store(p16)
            fence_async_shared()
            mbarrier.arrive(bars[P_ODD_READY], count=1)
            tile_sum = gl.sum(p, axis=1)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(bars[EVEN_RIGHT_FREE], count=1)
            if _any_moved(moved.index(1)) != 0:
                correction = gl.exp2(m0 - m1)
                row_sum = row_sum * correction
                acc = acc * gl.convert_layout(correction, O_ROW)[:, None]
            row_sum = row_sum + tile_sum
            p_operand = gl.convert_layout(p16, P_OPERAND)
            acc = warpgroup_mma(p_operand, _columns(kv, z + 13, 256), acc, is_async=True)
            acc, p_operand = warpgroup_mma_wait(0, deps=(acc, p_operand))
            mbarrier.arrive(bars[ODD_RIGHT_FREE], count=1, pred=j + 1 < end)
            tokens -= 128
        pair = end

        sums.index(1).store(row_sum)
        mbarrier.arrive(bars[SUM_ODD_READY], count=1)
        mbarrier.wait(bars[SUM_EVEN_READY], run_parity)
        row_sum = row_sum + sums.index(0).load(S_ROW)
        _finish(
            acc, row_sum, m1, kv, part_desc, out_desc, part_lse_ptr, lse_ptr, w, part, head_block, num_heads,
            13, 1, O_LAYOUT,
        )  # fmt: skip
        mbarrier.arrive(bars[ODD_RIGHT_FREE], count=1)


@gluon.jit(
    do_not_specialize=["num_heads", "max_seq_len", "num_pages", "stride_table"],
    do_not_specialize_on_alignment=["block_table_ptr", "seq_lens_ptr"],
)
def mla_decode_hopper_kernel(
    q_desc, q_rope_desc, kv_desc, kv_rope_desc, part_desc, out_desc,
    kv_ptr, block_table_ptr, seq_lens_ptr, parts_ptr, requests_ptr, part_out_ptr, part_lse_ptr,
    out_ptr, lse_ptr,
    num_heads, max_seq_len, num_pages, scale_log2, stride_table, stride_page, stride_out_batch, stride_out_head,
    ROWS: gl.constexpr, TILES_PER_PAGE: gl.constexpr, THRESHOLD: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PREFETCH: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    head_block = gl.program_id(0)
    q = gl.allocate_shared_memory(q_desc.dtype, [9, 64, 64], LAYOUT)
    kv = gl.allocate_shared_memory(q_desc.dtype, [18, 64, 64], LAYOUT)
    p_even = gl.allocate_shared_memory(q_desc.dtype, [64, 64], LAYOUT)
    shared_max = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    moved = gl.allocate_shared_memory(gl.int32, [2, 64], PLAIN)
    bars = (
        _barrier(), _barrier(), _barrier(), _barrier(), _barrier(), _barrier(), _barrier(), _barrier(), _barrier(),
        _barrier(), _barrier(), _barrier(), _barrier(), _barrier(), _barrier(), _barrier(), _barrier(), _barrier(),
        _barrier(), _barrier(), _barrier(),
    )  # fmt: skip
    # what the kernel before wrote, the plan perhaps, is there
    gdc_wait()
    part = (
        _field(parts_ptr, NUM_RUNS), _field(parts_ptr, REQUEST), _field(parts_ptr, FIRST_TILE),
        _field(parts_ptr, END_REQUEST), _field(parts_ptr, END_TILE),
        # a length may be more than the table has pages for: nothing past them is read
        gl.minimum(_field(parts_ptr, TOKENS), max_seq_len - _field(parts_ptr, FIRST_TILE) * 64),
    )  # fmt: skip
    fence_async_shared()
    gl.thread_barrier()
    consumer_arguments = (
        q, kv, p_even, shared_max, sums, moved, bars, part_desc, out_desc, part_lse_ptr, lse_ptr, seq_lens_ptr,
        part, head_block, num_heads, max_seq_len, scale_log2, THRESHOLD, ROWS,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume_even, consumer_arguments),
            (_consume_odd, consumer_arguments),
            (
                _produce,
                (
                    q, kv, bars, q_desc, q_rope_desc, kv_desc, kv_rope_desc, kv_ptr, block_table_ptr, seq_lens_ptr,
                    part, head_block, max_seq_len, num_pages, stride_table, stride_page, ROWS, TILES_PER_PAGE, PREFETCH,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, 504 - 2 * CONSUMER_REGISTERS],
    )  # fmt: skip

    # The requests that this part shares with others: the one that it begins inside and the one that it ends inside.
    # All its runs are counted before it waits for those of others. Its fields are read again, since the consumers have
    # no registers to keep them.
    request, end_request = _field(parts_ptr, REQUEST), _field(parts_ptr, END_REQUEST)
    begins_inside = _field(parts_ptr, FIRST_TILE) > 0
    ends_inside = (_field(parts_ptr, END_TILE) > 0) & ((end_request > request) | (begins_inside == 0))
    first, end = gl.where(begins_inside, 0, 1), gl.where(ends_inside, 2, 1)
    gl.thread_barrier()
    for i in range(first, end):
        announce_run(plan_of_request(requests_ptr, gl.where(i == 0, request, end_request)), head_block)
    gl.thread_barrier()
    for i in range(first, end):
        shared_request = gl.where(i == 0, request, end_request)
        merge_request(
            part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, plan_of_request(requests_ptr, shared_request),
            shared_request, head_block, num_heads, stride_out_batch, stride_out_head,
        )  # fmt: skip
