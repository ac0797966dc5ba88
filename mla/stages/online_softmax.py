"""Rung 3: one pass over the contiguous cache, with the running maximum and sum in registers (Triton).

A program takes up to 64 heads of one request and walks all of its tokens: each tile is loaded once, serves as keys
and as values of all these heads, and no score is ever written to memory.
"""

import torch
import triton
import triton.language as tl

from mla.kernels.tile import LOG2_E, attend_tile, normalise
from mla.problem import Problem

BLOCK_N = 32
NUM_WARPS = 8
NUM_STAGES = 2


@triton.jit
def attend_range(
    q_ptr, kv_ptr, first_token, end_token, heads, num_heads, scale_log2,
    stride_q_head, stride_kv_token,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Attend over the tokens [first_token, end_token) of one request.

    q_ptr and kv_ptr point to the request's query and cache row 0. Returns the unfinished row_max, row_sum, acc.
    """
    rank, rope = tl.arange(0, RANK), tl.arange(0, ROPE)
    is_head = heads < num_heads
    q_row = q_ptr + heads[:, None].to(tl.int64) * stride_q_head
    q_latent = tl.load(q_row + rank[None, :], mask=is_head[:, None], other=0.0)
    q_rope = tl.load(q_row + RANK + rope[None, :], mask=is_head[:, None], other=0.0)

    row_max = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, RANK), tl.float32)
    for start in range(first_token, end_token, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        is_token = tokens < end_token
        kv_row = kv_ptr + tokens[:, None].to(tl.int64) * stride_kv_token
        latent = tl.load(kv_row + rank[None, :], mask=is_token[:, None], other=0.0)
        k_rope = tl.load(kv_row + RANK + rope[None, :], mask=is_token[:, None], other=0.0)
        row_max, row_sum, acc = attend_tile(
            q_latent, q_rope, latent, k_rope, is_token, row_max, row_sum, acc, scale_log2, IS_FULL=False
        )
    return row_max, row_sum, acc


@triton.jit
def _mla_decode_online_softmax_kernel(
    q_ptr, kv_ptr, seq_lens_ptr, out_ptr, lse_ptr,
    num_heads, scale_log2,
    stride_q_batch, stride_q_head, stride_kv_batch, stride_kv_token,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    # neighbouring programs are the head blocks of one request: what one loads, the next finds in L2
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    b = tl.program_id(1).to(tl.int64)
    row_max, row_sum, acc = attend_range(
        q_ptr + b * stride_q_batch, kv_ptr + b * stride_kv_batch, 0, tl.load(seq_lens_ptr + b), heads, num_heads,
        scale_log2, stride_q_head, stride_kv_token, BLOCK_H, BLOCK_N, RANK, ROPE,
    )  # fmt: skip
    out, lse = normalise(row_max, row_sum, acc)
    rows = b * num_heads + heads
    is_head = heads < num_heads
    tl.store(out_ptr + rows[:, None] * RANK + tl.arange(0, RANK)[None, :], out, mask=is_head[:, None])
    tl.store(lse_ptr + rows, lse, mask=is_head)


def block_of_heads(num_heads: int) -> int:
    """Heads a program takes: all of them up to 64, rounded up to what tensor cores need (16, 32 or 64)."""
    return min(64, max(16, triton.next_power_of_2(num_heads)))


def decode(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode in one pass, one program a request and block of heads.

    Args:
        problem: uses q_absorbed, kv, seq_lens.

    Returns:
        out (batch_size, num_heads, kv_lora_rank) in the problem's dtype, lse (batch_size, num_heads) fp32.

    Reference: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867; FlashAttention,
    arXiv 2205.14135.
    """
    q, kv, config = problem.q_absorbed, problem.kv, problem.config
    batch_size, num_heads, _ = q.shape
    block_h = block_of_heads(num_heads)
    out = q.new_empty(batch_size, num_heads, config.kv_lora_rank)
    lse = q.new_empty(batch_size, num_heads, dtype=torch.float32)
    _mla_decode_online_softmax_kernel[(triton.cdiv(num_heads, block_h), batch_size)](
        q, kv, problem.seq_lens, out, lse,
        num_heads, problem.softmax_scale * LOG2_E,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1),
        BLOCK_H=block_h, BLOCK_N=BLOCK_N, RANK=config.kv_lora_rank, ROPE=config.qk_rope_head_dim,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out, lse
