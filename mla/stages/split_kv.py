"""Rung 4: the tokens of a request split over the GPU, partial results merged by log-sum-exp (Triton).

Rung 3 starts batch_size x head blocks programs: at batch 8 and 128 heads 16 of an H200's 132 SMs. Here each request is
cut into num_splits runs of tiles, and a second kernel merges their normalised outputs.
"""

import torch
import triton
import triton.language as tl

from mla.kernels.launch import device_facts
from mla.kernels.merge import merge_partials
from mla.kernels.tile import LOG2_E, normalise
from mla.plan import choose_num_splits
from mla.problem import Problem
from mla.stages.online_softmax import BLOCK_N, NUM_STAGES, NUM_WARPS, attend_range, block_of_heads


@triton.jit
def _mla_decode_split_kv_kernel(
    q_ptr, kv_ptr, seq_lens_ptr, partial_out_ptr, partial_lse_ptr,
    num_heads, num_splits, scale_log2,
    stride_q_batch, stride_q_head, stride_kv_batch, stride_kv_token,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + b)
    # whole tiles, so that only the last part of a request ends inside one
    split_len = tl.cdiv(tl.cdiv(seq_len, BLOCK_N), num_splits) * BLOCK_N
    first_token = split * split_len
    row_max, row_sum, acc = attend_range(
        q_ptr + b * stride_q_batch, kv_ptr + b * stride_kv_batch, first_token,
        tl.minimum(first_token + split_len, seq_len), heads, num_heads,
        scale_log2, stride_q_head, stride_kv_token, BLOCK_H, BLOCK_N, RANK, ROPE,
    )  # fmt: skip
    out, lse = normalise(row_max, row_sum, acc)
    rows = (b * num_splits + split) * num_heads + heads
    is_head = heads < num_heads
    tl.store(partial_out_ptr + rows[:, None] * RANK + tl.arange(0, RANK)[None, :], out, mask=is_head[:, None])
    tl.store(partial_lse_ptr + rows, lse, mask=is_head)


def default_num_splits(problem: Problem) -> int:
    """Parts a request for about one wave of SMs."""
    batch_size, num_heads, _ = problem.q_absorbed.shape
    head_blocks = triton.cdiv(num_heads, block_of_heads(num_heads))
    max_tiles = triton.cdiv(problem.kv.shape[1], BLOCK_N)
    return choose_num_splits(batch_size, head_blocks, max_tiles, device_facts(problem.kv.device).num_sms)


def decode(problem: Problem, num_splits: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode in parts and merge them.

    Args:
        problem: uses q_absorbed, kv, seq_lens.
        num_splits: parts a request; chosen to fill about one wave of SMs if None.

    Returns:
        out (batch_size, num_heads, kv_lora_rank) in the problem's dtype, lse (batch_size, num_heads) fp32.

    Reference: Dao et al., Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html
    """
    q, kv, config = problem.q_absorbed, problem.kv, problem.config
    batch_size, num_heads, _ = q.shape
    block_h = block_of_heads(num_heads)
    head_blocks = triton.cdiv(num_heads, block_h)
    num_splits = num_splits or default_num_splits(problem)
    partial_out = q.new_empty(batch_size, num_splits, num_heads, config.kv_lora_rank, dtype=torch.float32)
    partial_lse = q.new_empty(batch_size, num_splits, num_heads, dtype=torch.float32)
    _mla_decode_split_kv_kernel[(head_blocks, num_splits, batch_size)](
        q, kv, problem.seq_lens, partial_out, partial_lse,
        num_heads, num_splits, problem.softmax_scale * LOG2_E,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1),
        BLOCK_H=block_h, BLOCK_N=BLOCK_N, RANK=config.kv_lora_rank, ROPE=config.qk_rope_head_dim,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    out = q.new_empty(batch_size, num_heads, config.kv_lora_rank)
    lse = q.new_empty(batch_size, num_heads, dtype=torch.float32)
    return merge_partials(partial_out, partial_lse, out, lse)
