"""Merge of partial results by log-sum-exp."""

import torch
import triton
import triton.language as tl

# Partial results that a program holds at a time.
_CHUNK = 8


@triton.jit(do_not_specialize=["num_splits", "num_heads"])
def _merge_kernel(
    partial_out_ptr, partial_lse_ptr, out_ptr, lse_ptr,
    num_splits, num_heads,
    stride_out_batch, stride_out_head,
    RANK: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, h = row // num_heads, row % num_heads
    # partials are (batch_size, num_splits, num_heads, ...)
    first = b * num_splits * num_heads + h

    split = tl.arange(0, SPLITS)
    part_lse = tl.load(partial_lse_ptr + first + split * num_heads, mask=split < num_splits, other=float("-inf"))
    # either infinity marks an empty part
    is_empty = (part_lse == float("-inf")) | (part_lse == float("inf"))
    largest = tl.max(tl.where(is_empty, float("-inf"), part_lse), axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.where(is_empty, 0.0, tl.exp(part_lse - shift)), axis=0)
    safe_total = tl.where(total == 0.0, 1.0, total)

    rank = tl.arange(0, RANK)
    acc = tl.zeros((RANK,), tl.float32)
    for start in range(0, num_splits, CHUNK):
        i = start + tl.arange(0, CHUNK)
        x = tl.load(partial_lse_ptr + first + i * num_heads, mask=i < num_splits, other=float("-inf"))
        is_used = (x != float("-inf")) & (x != float("inf"))
        weight = tl.where(is_used, tl.exp(x - shift) / safe_total, 0.0)
        # an empty part's output is never read: it may hold anything
        part = tl.load(
            partial_out_ptr + (first + i[:, None] * num_heads) * RANK + rank[None, :], mask=is_used[:, None], other=0.0
        )
        acc += tl.sum(part * weight[:, None], axis=0)
    tl.store(out_ptr + b * stride_out_batch + h * stride_out_head + rank, acc)
    tl.store(lse_ptr + row, tl.where(total == 0.0, float("-inf"), shift + tl.log(safe_total)))


def merge_partials(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the parts of each row: `out = Σ exp(lse_i - lse) out_i`, `lse = ln Σ exp(lse_i)`.

    Args:
        partial_out: (batch_size, num_splits, num_heads, kv_lora_rank) fp32, contiguous, each part normalised by itself.
        partial_lse: (batch_size, num_splits, num_heads) fp32, contiguous, natural logarithm. Either infinity marks an
            empty part, whose output is ignored whatever it holds.
        out: (batch_size, num_heads, kv_lora_rank), written; last dimension contiguous.
        lse: (batch_size, num_heads) fp32, contiguous, written; -inf where all parts are empty (out is 0 there).

    Returns:
        out and lse.

    Reference: Dao et al., Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html
    """
    batch_size, num_splits, num_heads, rank = partial_out.shape
    _merge_kernel[(batch_size * num_heads,)](
        partial_out, partial_lse, out, lse,
        num_splits, num_heads,
        out.stride(0), out.stride(1),
        RANK=rank, SPLITS=triton.next_power_of_2(num_splits), CHUNK=min(_CHUNK, triton.next_power_of_2(num_splits)),
        num_warps=4,
    )  # fmt: skip
    return out, lse
