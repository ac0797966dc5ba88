"""Merge of partial results by log-sum-exp."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from mla.kernels.work_plan import PART_WIDTH, WorkPlan

# Partial results that a program holds at a time.
_CHUNK = 8


@triton.jit
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


@triton.jit(do_not_specialize=["num_heads"])
def _merge_runs_kernel(
    part_out_ptr, part_lse_ptr, parts_ptr, requests_ptr, out_ptr, lse_ptr,
    num_heads,
    stride_out_batch, stride_out_head,
    RANK: tl.constexpr, HEADS: tl.constexpr, RUNS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # a program a request, HEADS of its heads and COLUMNS of their columns; RUNS runs at a time
    head_groups = tl.cdiv(num_heads, HEADS)
    program = tl.program_id(0)
    column_group = program % (RANK // COLUMNS)
    head_group = program // (RANK // COLUMNS) % head_groups
    b = (program // (RANK // COLUMNS) // head_groups).to(tl.int64)
    if PDL:
        gdc_wait()
    first_part = tl.load(requests_ptr + b * 2)
    last_part = tl.load(requests_ptr + b * 2 + 1)
    # a whole request: its output stands already
    if first_part == last_part:
        return
    heads = head_group * HEADS + tl.arange(0, HEADS)
    columns = column_group * COLUMNS + tl.arange(0, COLUMNS)
    is_head = heads < num_heads
    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, COLUMNS), tl.float32)
    for start in range(first_part, last_part + 1, RUNS):
        part = start + tl.arange(0, RUNS)
        is_run = part <= last_part
        # a part between them may be empty, and its slots then hold anything
        is_run = is_run & (tl.load(parts_ptr + part * PART_WIDTH, mask=is_run, other=0) > 0)
        # the first run ends inside its part, which makes it the part's second slot
        slot = (2 * part + (part == first_part)).to(tl.int64)
        row = slot[None, :] * num_heads + heads[:, None]  # (HEADS, RUNS)
        is_row = is_run[None, :] & is_head[:, None]
        x = tl.load(part_lse_ptr + row, mask=is_row, other=float("-inf"))
        out = tl.load(
            part_out_ptr + row[:, :, None] * RANK + columns[None, None, :], mask=is_row[:, :, None], other=0.0
        )
        new_largest = tl.maximum(largest, tl.max(x, axis=1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        correction = tl.exp(largest - shift)
        weight = tl.exp(x - shift[:, None])
        total = total * correction + tl.sum(weight, axis=1)
        acc = acc * correction[:, None] + tl.sum(out.to(tl.float32) * weight[:, :, None], axis=1)
        largest = new_largest
    # heads past the end have no total
    total = tl.where(is_head, total, 1.0)
    out_row = out_ptr + b * stride_out_batch + heads[:, None].to(tl.int64) * stride_out_head
    tl.store(out_row + columns[None, :], acc / total[:, None], mask=is_head[:, None])
    if column_group == 0:
        tl.store(lse_ptr + b * num_heads + heads, largest + tl.log(total), mask=is_head)


def merge_runs(
    part_out: torch.Tensor, part_lse: torch.Tensor, plan: WorkPlan, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Merge the runs of the requests that a work plan divided; rows of whole requests are left alone.

    Args:
        part_out: (plan.num_slots, num_heads, kv_lora_rank), each run normalised by itself.
        part_lse: (plan.num_slots, num_heads) fp32, natural logarithm.
        plan: says which slots a request has.
        out: (batch_size, num_heads, kv_lora_rank), written where divided.
        lse: (batch_size, num_heads) fp32, contiguous, written where divided.
    """
    batch_size, num_heads, rank = out.shape
    rows = batch_size * num_heads
    # All of a program's loads go out at once: few requests have many runs, many have few; and with many requests
    # most programs have nothing to do, so they should be few. A tile is 8192 elements each time.
    heads, runs, columns = (
        (1, 64, 128) if rows <= 512 else (1, 16, 512) if rows <= 2048 else (4, 4, 512) if rows <= 8192 else (8, 2, 512)
    )
    columns = min(columns, rank)
    _merge_runs_kernel[(batch_size * triton.cdiv(num_heads, heads) * (rank // columns),)](
        part_out, part_lse, plan.parts, plan.requests, out, lse,
        num_heads,
        out.stride(0), out.stride(1),
        RANK=rank, HEADS=heads, RUNS=runs, COLUMNS=columns, PDL=part_out.is_cuda,
        num_warps=4, launch_pdl=part_out.is_cuda,
    )  # fmt: skip
