"""Reads memory once: what bandwidth there is to compare with."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _read_kernel(x_ptr, out_ptr, num_blocks, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        total ^= tl.load(x_ptr + offsets)
        offsets += tl.num_programs(0) * BLOCK
    tl.store(out_ptr + tl.program_id(0), tl.xor_sum(total, axis=0))


def read_once(x: torch.Tensor, out: torch.Tensor) -> None:
    """Read all of x, 16 bytes a load, and keep its parity so that no load can be left out.

    Args:
        x: int32, a multiple of 4096 elements.
        out: (num_programs,) int32, written: the exclusive or of what each program read.
    """
    _read_kernel[out.shape](x, out, len(x) // _BLOCK, BLOCK=_BLOCK, num_warps=8)
