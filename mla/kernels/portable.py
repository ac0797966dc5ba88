"""Rung 5, the portable kernel: split-KV decode on a paged cache, for every GPU that Triton knows.

A program takes up to BLOCK_H heads and one of num_splits runs of a request's tiles. Whole tiles come in through plain
pointers or, where a tile never straddles two pages, through a TMA descriptor; the last, partial tile always comes
through masked pointers, so that nothing past a request's end is ever read. Nor is anything outside the cache and the
table: a length counts as no more than its row of the table has pages for, a page that the pool does not have as zeros.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mla.kernels.merge import merge_partials
from mla.kernels.portable_config import PortableConfig, choose_config, default_num_splits, descriptors_fit
from mla.kernels.tile import LOG2_E, attend_tile, normalise
from mla.problem import Problem


@triton.jit
def _load_tile(
    kv_ptr, latent_desc, rope_desc, block_table_ptr, start, end_token,
    num_pages, stride_kv_page, stride_kv_token,
    BLOCK_N: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    IS_FULL: tl.constexpr, USE_DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Rows [start, start + BLOCK_N) of one request: latent (BLOCK_N, RANK), k_rope (BLOCK_N, ROPE), is_token."""
    tokens = start + tl.arange(0, BLOCK_N)
    is_token = tokens < end_token
    if IS_FULL and USE_DESCRIPTORS:
        # the descriptors see the pool as one matrix of num_pages * PAGE_SIZE rows, and give zeros before its first
        page = tl.load(block_table_ptr + start // PAGE_SIZE)
        row = tl.where((page >= 0) & (page < num_pages), page * PAGE_SIZE + start % PAGE_SIZE, -BLOCK_N)
        return latent_desc.load([row, 0]), rope_desc.load([row, RANK]), is_token
    if IS_FULL and PAGE_SIZE % BLOCK_N == 0:
        # the whole tile lies in one page
        page = tl.load(block_table_ptr + start // PAGE_SIZE).to(tl.int64)
        slots = (start % PAGE_SIZE + tl.arange(0, BLOCK_N)).to(tl.int64)
        rows = kv_ptr + page * stride_kv_page + slots[:, None] * stride_kv_token
        is_held = (page >= 0) & (page < num_pages)
    else:
        pages = tl.load(block_table_ptr + tokens // PAGE_SIZE, mask=is_token, other=-1).to(tl.int64)
        slots = (tokens % PAGE_SIZE).to(tl.int64)
        rows = kv_ptr + (pages * stride_kv_page + slots * stride_kv_token)[:, None]
        is_held = ((pages >= 0) & (pages < num_pages))[:, None]
    rank, rope = tl.arange(0, RANK)[None, :], tl.arange(0, ROPE)[None, :]
    latent = tl.load(rows + rank, mask=is_held, other=0.0)
    k_rope = tl.load(rows + RANK + rope, mask=is_held, other=0.0)
    return latent, k_rope, is_token


# not specialised on what changes from call to call: a new value must not compile the kernel again
@triton.jit(
    do_not_specialize=[
        "num_heads", "num_splits", "max_seq_len", "num_pages", "stride_table_batch", "stride_lse_batch",
        "stride_lse_split",
    ]
)  # fmt: skip
def _mla_decode_portable_kernel(
    q_ptr, kv_ptr, latent_desc, rope_desc, block_table_ptr, seq_lens_ptr, out_ptr, lse_ptr,
    num_heads, num_splits, max_seq_len, num_pages, scale_log2,
    stride_q_batch, stride_q_head, stride_kv_page, stride_kv_token, stride_table_batch,
    stride_out_batch, stride_out_split, stride_out_head, stride_lse_batch, stride_lse_split,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    USE_DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    # One grid axis, since the others end at 65,535. Neighbouring programs are the head blocks of one part: what one
    # loads, the next finds in L2.
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    program = tl.program_id(0)
    heads = (program % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = (program // head_blocks % num_splits).to(tl.int64)
    b = (program // (head_blocks * num_splits)).to(tl.int64)
    is_head = heads < num_heads

    seq_len = tl.maximum(tl.minimum(tl.load(seq_lens_ptr + b), max_seq_len), 0)
    # whole tiles, so that only the last part of a request ends inside one
    split_len = tl.cdiv(tl.cdiv(seq_len, BLOCK_N), num_splits) * BLOCK_N
    first_token = split.to(tl.int32) * split_len
    end_token = tl.minimum(first_token + split_len, seq_len)
    end_of_full = first_token + (tl.maximum(end_token - first_token, 0) // BLOCK_N) * BLOCK_N
    block_table_ptr += b * stride_table_batch

    rank, rope = tl.arange(0, RANK)[None, :], tl.arange(0, ROPE)[None, :]
    wide_heads = heads.to(tl.int64)[:, None]
    q_row = q_ptr + b * stride_q_batch + wide_heads * stride_q_head
    q_latent = tl.load(q_row + rank, mask=is_head[:, None], other=0.0)
    q_rope = tl.load(q_row + RANK + rope, mask=is_head[:, None], other=0.0)

    row_max = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, RANK), tl.float32)
    for start in range(first_token, end_of_full, BLOCK_N):
        latent, k_rope, is_token = _load_tile(
            kv_ptr, latent_desc, rope_desc, block_table_ptr, start, end_token, num_pages, stride_kv_page,
            stride_kv_token, BLOCK_N, RANK, ROPE, PAGE_SIZE, True, USE_DESCRIPTORS,
        )  # fmt: skip
        row_max, row_sum, acc = attend_tile(
            q_latent, q_rope, latent, k_rope, is_token, row_max, row_sum, acc, scale_log2, True
        )
    if end_of_full < end_token:
        latent, k_rope, is_token = _load_tile(
            kv_ptr, latent_desc, rope_desc, block_table_ptr, end_of_full, end_token, num_pages, stride_kv_page,
            stride_kv_token, BLOCK_N, RANK, ROPE, PAGE_SIZE, False, USE_DESCRIPTORS,
        )  # fmt: skip
        row_max, row_sum, acc = attend_tile(
            q_latent, q_rope, latent, k_rope, is_token, row_max, row_sum, acc, scale_log2, False
        )

    out, lse = normalise(row_max, row_sum, acc)
    out_row = out_ptr + b * stride_out_batch + split * stride_out_split + wide_heads * stride_out_head
    tl.store(out_row + rank, out, mask=is_head[:, None])
    tl.store(lse_ptr + b * stride_lse_batch + split * stride_lse_split + heads, lse, mask=is_head)


def mla_decode_portable(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    config: PortableConfig | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the portable kernel, and the merge where requests are split; arguments as checked by `mla.mla_decode`.

    Args:
        q: (batch_size, num_heads, kv_lora_rank + qk_rope_head_dim).
        kv_cache: (num_pages, page_size, kv_lora_rank + qk_rope_head_dim).
        block_table: (batch_size, max_pages) int32.
        seq_lens: (batch_size,) int32.
        out: (batch_size, num_heads, kv_lora_rank), written; its width says where a cached row's latent part ends.
        lse: (batch_size, num_heads) fp32, contiguous, written.
        softmax_scale: factor on the scores.
        config: tile shape and launch parameters; chosen for the call if None. With descriptors, `descriptors_fit`
            must hold.
        num_splits: parts a request; chosen to fill about one wave of SMs if None.

    Returns:
        out and lse.
    """
    batch_size, num_heads, width = q.shape
    page_size, rank = kv_cache.shape[1], out.shape[-1]
    config = config or choose_config(q, kv_cache)
    head_blocks = triton.cdiv(num_heads, config.block_h)
    num_splits = num_splits or default_num_splits(q, kv_cache, block_table, config)
    # a pool without pages has room for nothing, whatever the table says
    max_seq_len = block_table.shape[1] * page_size if len(kv_cache) else 0
    if num_splits == 1:
        part_out, part_lse = out[:, None], lse[:, None]
    else:
        part_out = q.new_empty(batch_size, num_splits, num_heads, rank, dtype=torch.float32)
        part_lse = q.new_empty(batch_size, num_splits, num_heads, dtype=torch.float32)
    latent_desc = rope_desc = None
    if config.use_descriptors:
        if not descriptors_fit(kv_cache, config.block_n):
            raise ValueError(
                f"config: expected one without descriptors for pages of {page_size} tokens with strides "
                f"{kv_cache.stride()}, got {config}"
            )
        rows = kv_cache.view(-1, width)
        latent_desc = TensorDescriptor.from_tensor(rows, [config.block_n, rank])
        rope_desc = TensorDescriptor.from_tensor(rows, [config.block_n, width - rank])
    _mla_decode_portable_kernel[(head_blocks * num_splits * batch_size,)](
        q, kv_cache, latent_desc, rope_desc, block_table, seq_lens, part_out, part_lse,
        num_heads, num_splits, max_seq_len, len(kv_cache), softmax_scale * LOG2_E,
        q.stride(0), q.stride(1), kv_cache.stride(0), kv_cache.stride(1), block_table.stride(0),
        part_out.stride(0), part_out.stride(1), part_out.stride(2), part_lse.stride(0), part_lse.stride(1),
        BLOCK_H=config.block_h, BLOCK_N=config.block_n, RANK=rank, ROPE=width - rank, PAGE_SIZE=page_size,
        USE_DESCRIPTORS=config.use_descriptors,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return (out, lse) if num_splits == 1 else merge_partials(part_out, part_lse, out, lse)


def decode(
    problem: Problem, config: PortableConfig | None = None, num_splits: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode on the paged cache.

    Args:
        problem: uses q_absorbed, kv_cache, block_table, seq_lens.
        config, num_splits: as in `mla_decode_portable`.

    Returns:
        out (batch_size, num_heads, kv_lora_rank) in the problem's dtype, lse (batch_size, num_heads) fp32.
    """
    q = problem.q_absorbed
    out = q.new_empty(*q.shape[:2], problem.config.kv_lora_rank)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return mla_decode_portable(
        q, problem.kv_cache, problem.block_table, problem.seq_lens, out, lse,
        softmax_scale=problem.softmax_scale, config=config, num_splits=num_splits,
    )  # fmt: skip
