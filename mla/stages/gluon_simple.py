"""First step from the plain Triton kernel to the Hopper kernel: the same tiles, with every copy and wait written out.

What it adds to the plain kernel (`mla.kernels.portable`: 64 heads x 64 tokens, 8 warps, tiles by TMA): there the
compiler places loads, waits and layouts, here, in Gluon, the kernel does. That buys order: the scores of the next tile
are issued right behind this tile's product with the values, so that the tensor cores go from one to the other without
a stop, and a tile's memory is refilled while those scores are computed.

A program takes 64 heads and one part of one request. Its 8 warps are two warpgroups in step: of the 64 x 64 scores each
has 32 tokens, of the 64 x 512 fp32 output 256 columns, which is 128 registers a thread. Shared memory, in chunks of
64 x 64: the query (8 chunks latent, 1 rotated), two slots for tiles (9 each; a tile is key and value), the
probabilities (1). Tile j lies in slot j % 2. Barriers:

    q_full             the query has arrived
    slot_full[slot]    a tile has arrived in this slot; tile j waits for parity (j / 2) % 2
    gl.thread_barrier  all 256 threads: first, the probabilities are written; then, everybody is done with them and with
                       this tile, whose slot may be refilled

One step, time downwards:

    tensor cores                   threads
    (nothing)                      softmax of tile j, probabilities to shared memory; all meet
    output += P V of tile j
    scores = Q Kᵀ of tile j + 1    wait for P V alone; all meet; ask for tile j + 2 in the freed slot

The last tile of a request is loaded with its tokens in the last rows: the box starts at a negative row, for which TMA
writes zeros. Nothing past a request's end is read, whatever it holds; what stands before it is masked.

What is still slow: the tensor cores idle during the softmax, which both warpgroups do at the same time, on the same
tile; they exchange each row's maximum and sum, all threads meet several times a tile, and every tile rescales the whole
output. In `gluon_warp_specialised` the warpgroups take turns.

Reference: FlashAttention-3, arXiv 2407.08608, section 3.2, which issues the next scores ahead as well.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla.kernels.hopper import _barrier, _box, _columns
from mla.kernels.launch import device_facts
from mla.kernels.merge import merge_partials
from mla.kernels.tile import LN_2, LOG2_E
from mla.plan import choose_num_splits
from mla.problem import Problem

TILE = 64
RANK = 512
ROPE = 64
NUM_WARPS = 8

# Stands for -inf where a difference with it is taken.
LOWEST = gl.constexpr(-1e30)
BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


@gluon.jit
def _load(latent_desc, rope_desc, outer, row, chunks, first, barrier):
    """Ask for 64 rows of a request's queries, or of a page, into nine chunks; `barrier` says when they are there."""
    mbarrier.expect(barrier, 64 * 576 * 2)
    tma.async_copy_global_to_shared(latent_desc, [outer, row, 0], barrier, _box(chunks, first, 64, 512))
    tma.async_copy_global_to_shared(rope_desc, [outer, row, 512], barrier, _box(chunks, first + 8, 64, 64))


@gluon.jit
def _issue_scores(q, kv, first, scores):
    """Q Kᵀ of the tile in the chunks from `first` on; two steps, the caller waits for them."""
    k_latent = _columns(kv, first, 512).permute((1, 0))
    scores = warpgroup_mma(_columns(q, 0, 512), k_latent, scores, use_acc=False, is_async=True)
    return warpgroup_mma(q.index(8), kv.index(first + 8).permute((1, 0)), scores, is_async=True)


# not specialised on counts: a new value must not compile the kernel again
@gluon.jit(do_not_specialize=["num_heads", "num_splits", "stride_table"])
def _mla_decode_gluon_simple_kernel(
    q_desc, q_rope_desc, kv_desc, kv_rope_desc,
    block_table_ptr, seq_lens_ptr, out_ptr, lse_ptr,
    num_heads, num_splits, scale_log2,
    stride_table,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)

    # neighbouring programs are the head blocks of one part: what one loads, the next finds in L2
    first_head = gl.program_id(0) * 64
    split = gl.program_id(1)
    b = gl.program_id(2)
    seq_len = gl.load(seq_lens_ptr + b)
    num_tiles = (seq_len + 63) // 64
    tiles_a_part = (num_tiles + num_splits - 1) // num_splits
    first_tile = split * tiles_a_part
    # 0 or less where the request has fewer tiles than parts
    n = gl.minimum(tiles_a_part, num_tiles - first_tile)
    tokens = seq_len - first_tile * 64
    pages = block_table_ptr + b.to(gl.int64) * stride_table + first_tile

    q = gl.allocate_shared_memory(q_desc.dtype, [9, 64, 64], LAYOUT)
    kv = gl.allocate_shared_memory(q_desc.dtype, [18, 64, 64], LAYOUT)
    p_shared = gl.allocate_shared_memory(q_desc.dtype, [64, 64], LAYOUT)
    q_full = _barrier()
    # an array, since the slot changes from tile to tile
    slot_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(slot_full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()

    row_max = gl.full([64], LOWEST, gl.float32, S_ROW)
    row_sum = gl.full([64], 0.0, gl.float32, S_ROW)
    acc = gl.full([64, 512], 0.0, gl.float32, O_LAYOUT)
    scores = gl.full([64, 64], 0.0, gl.float32, S_LAYOUT)
    column = gl.arange(0, 64, gl.SliceLayout(0, S_LAYOUT))
    if n > 0:
        _load(q_desc, q_rope_desc, b, first_head, q, 0, q_full)
        _load(kv_desc, kv_rope_desc, gl.load(pages), gl.minimum(tokens, 64) - 64, kv, 0, slot_full.index(0))
        if n > 1:
            row = gl.minimum(tokens - 64, 64) - 64
            _load(kv_desc, kv_rope_desc, gl.load(pages + 1), row, kv, 9, slot_full.index(1))
        mbarrier.wait(q_full, 0)
        mbarrier.wait(slot_full.index(0), 0)
        scores = _issue_scores(q, kv, 0, scores)
        scores = warpgroup_mma_wait(0, deps=(scores,))

    for j in range(n):
        slot = j & 1
        # asked for a whole step before it is used; entries past the part's last tile are never read
        page_ahead = gl.load(pages + j + 2, mask=j + 2 < n, other=0)
        # all columns of a whole tile, the last ones of a shorter one
        scores = gl.where((column >= 64 - tokens)[None, :], scores * scale_log2, LOWEST)
        new_max = gl.maximum(row_max, gl.max(scores, axis=1))
        correction = gl.exp2(row_max - new_max)
        p = gl.exp2(scores - new_max[:, None])
        row_sum = row_sum * correction + gl.sum(p, axis=1)
        row_max = new_max
        p_shared.store(p.to(kv.dtype))
        # wgmma reads through another path than the store went
        fence_async_shared()
        acc = acc * gl.convert_layout(correction, O_ROW)[:, None]
        gl.thread_barrier()
        acc = warpgroup_mma(p_shared, _columns(kv, slot * 9, 512), acc, is_async=True)
        # after the last tile these scores are of whatever the slot holds; nobody uses them
        mbarrier.wait(slot_full.index(slot ^ 1), ((j + 1) >> 1) & 1, pred=j + 1 < n)
        scores = _issue_scores(q, kv, 9 - slot * 9, scores)
        # all but the two steps of the scores: P V is done
        acc = warpgroup_mma_wait(2, deps=(acc,))
        gl.thread_barrier()
        if j + 2 < n:
            row = gl.minimum(tokens - 128, 64) - 64
            _load(kv_desc, kv_rope_desc, page_ahead, row, kv, slot * 9, slot_full.index(slot))
        # nothing in flight across the loop's end: ptxas would make every wgmma wait for the one before
        scores = warpgroup_mma_wait(0, deps=(scores,))
        tokens -= 64

    has_tokens = row_sum > 0.0
    safe_sum = gl.where(has_tokens, row_sum, 1.0)
    acc = acc * gl.convert_layout(1.0 / safe_sum, O_ROW)[:, None]
    lse = gl.where(has_tokens, (row_max + gl.log2(safe_sum)) * LN_2, float("-inf"))
    # parts are (batch_size, num_splits, num_heads, ...); with one part a request that is the result itself
    first_row = (b.to(gl.int64) * num_splits + split) * num_heads + first_head
    heads = gl.arange(0, 64, O_ROW)
    columns = gl.arange(0, 512, gl.SliceLayout(0, O_LAYOUT))
    out_rows = out_ptr + first_row * 512 + heads[:, None] * 512 + columns[None, :]
    gl.store(out_rows, acc.to(out_ptr.dtype.element_ty), mask=(first_head + heads < num_heads)[:, None])
    s_heads = gl.arange(0, 64, S_ROW)
    gl.store(lse_ptr + first_row + s_heads, lse, mask=first_head + s_heads < num_heads)


def check_problem(problem: Problem) -> None:
    """Refuse what the Gluon rungs do not take: they want rows of 512 + 64 in 16 bits, pages of 64 tokens, no gaps."""
    q, kv_cache, config = problem.q_absorbed, problem.kv_cache, problem.config
    if (config.kv_lora_rank, config.qk_rope_head_dim) != (RANK, ROPE):
        raise ValueError(
            f"config: expected widths {RANK} + {ROPE}, got {config.kv_lora_rank} + {config.qk_rope_head_dim}"
        )
    if kv_cache.shape[1] != TILE:
        raise ValueError(f"kv_cache: expected pages of {TILE} tokens, got {kv_cache.shape[1]}; use mla.mla_decode")
    if q.dtype not in (torch.bfloat16, torch.float16) or kv_cache.dtype != q.dtype:
        raise ValueError(f"q_absorbed, kv_cache: expected both bfloat16 or float16, got {q.dtype}, {kv_cache.dtype}")
    for name in ("q_absorbed", "kv_cache", "block_table", "seq_lens"):
        tensor = getattr(problem, name)
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}; copy it")
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) != (9, 0):
        raise RuntimeError(f"q_absorbed: expected a GPU of compute capability 9.0, got {q.device}; use mla.mla_decode")


def default_num_splits(problem: Problem) -> int:
    """Parts a request for about one wave: a SM holds one program."""
    q = problem.q_absorbed
    num_sms = device_facts(q.device).num_sms
    return choose_num_splits(len(q), triton.cdiv(q.shape[1], 64), problem.block_table.shape[1], num_sms)


def launch(kernel, problem: Problem, num_splits: int | None, box_width: int, **options):
    """The host's side of both Gluon rungs; box_width is how much of the latent part the kernel loads at once."""
    check_problem(problem)
    q, kv_cache, block_table = problem.q_absorbed, problem.kv_cache, problem.block_table
    batch_size, num_heads, _ = q.shape
    num_splits = num_splits or default_num_splits(problem)
    out, lse = q.new_empty(batch_size, num_heads, RANK), q.new_empty(batch_size, num_heads, dtype=torch.float32)
    part_out, part_lse = out, lse
    if num_splits > 1:
        part_out = q.new_empty(batch_size, num_splits, num_heads, RANK, dtype=torch.float32)
        part_lse = q.new_empty(batch_size, num_splits, num_heads, dtype=torch.float32)

    def boxes(tensor: torch.Tensor, width: int) -> TensorDescriptor:
        # 64 rows of one request or page; TMA reads zeros for rows outside of it
        return TensorDescriptor.from_tensor(tensor, [1, TILE, width], BOX_LAYOUT)

    kernel[(triton.cdiv(num_heads, 64), num_splits, batch_size)](
        boxes(q, box_width), boxes(q, ROPE), boxes(kv_cache, box_width), boxes(kv_cache, ROPE),
        block_table, problem.seq_lens, part_out, part_lse,
        num_heads, num_splits, problem.softmax_scale * LOG2_E,
        block_table.stride(0),
        **options,
    )  # fmt: skip
    return (out, lse) if num_splits == 1 else merge_partials(part_out, part_lse, out, lse)


def decode(problem: Problem, num_splits: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode on the paged cache, in parts that are merged.

    Args:
        problem: uses q_absorbed, kv_cache, block_table, seq_lens; see `check_problem` for what is taken.
        num_splits: parts a request; chosen to fill about one wave of SMs if None.

    Returns:
        out (batch_size, num_heads, 512) in the problem's dtype, lse (batch_size, num_heads) fp32.

    Raises:
        ValueError: see `check_problem`.
        RuntimeError: not on a Hopper GPU.
    """
    return launch(_mla_decode_gluon_simple_kernel, problem, num_splits, box_width=RANK, num_warps=NUM_WARPS)
