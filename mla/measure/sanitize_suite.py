"""What compute-sanitizer watches: small calls of each kernel, faults planted to see what a tool can see, and controls.

`python -m mla.measure.sanitize_suite NAME` runs one of them. The controls are correct, so that a report on one is a
false alarm (most are in `mla.measure.sanitize_controls`). Inputs are drawn on the CPU, so that nearly all that a
tool looks at is the kernel. Where a fault is written in CUDA, Triton's compiler would have put the missing barrier in.
"""

import sys
from collections.abc import Callable
from dataclasses import fields, replace

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla.config import PRESETS
from mla.decode import mla_decode
from mla.measure import sanitize_controls
from mla.measure.sanitize_controls import BOX, expect_equal
from mla.problem import Problem, make_problem


def _problem(lengths: list[int], page_size: int, num_heads: int = 4) -> Problem:
    config = replace(PRESETS["deepseek-v3"], num_heads=num_heads)
    drawn = make_problem(config, lengths, page_size=page_size, dtype=torch.bfloat16)
    tensors = {f.name: getattr(drawn, f.name) for f in fields(drawn)}
    return replace(drawn, **{name: t.cuda() for name, t in tensors.items() if isinstance(t, torch.Tensor)})


def _decode(lengths: list[int], page_size: int, num_heads: int = 4, **options) -> None:
    p = _problem(lengths, page_size, num_heads)
    out, _ = mla_decode(p.q_absorbed, p.kv_cache, p.block_table, p.seq_lens, softmax_scale=p.softmax_scale, **options)
    assert torch.isfinite(out.cpu()).all()


@triton.jit
def _copy_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


def _copy(x: torch.Tensor, count: int) -> None:
    out = torch.zeros(count, device="cuda")
    _copy_kernel[(1,)](x, out, N=count)
    torch.cuda.synchronize()


@gluon.jit
def _tma_copy_kernel(desc, out_ptr, WAITS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(desc.dtype, [64, 64], desc.layout)
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    fence_async_shared()
    mbarrier.expect(barrier, 64 * 64 * 2)
    tma.async_copy_global_to_shared(desc, [0, 0], barrier, tile)
    if WAITS:
        mbarrier.wait(barrier, 0)
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    gl.store(out_ptr + rows[:, None] * 64 + columns[None, :], tile.load(LAYOUT))
    if not WAITS:
        # what is under way must not outlive the kernel
        mbarrier.wait(barrier, 0)


def _tma_copy(x: torch.Tensor, waits: bool) -> torch.Tensor:
    """Read 64 x 64 elements from x on, however many it has."""
    out = torch.zeros(64, 64, dtype=x.dtype, device="cuda")
    desc = TensorDescriptor(x, shape=[64, 64], strides=[64, 1], block_shape=[64, 64], layout=BOX)
    _tma_copy_kernel[(1,)](desc, out, waits, num_warps=4)
    torch.cuda.synchronize()
    return out


def _tma_load() -> None:
    x = torch.arange(64 * 64).bfloat16()
    expect_equal(_tma_copy(x.cuda(), True), x.view(64, 64))


@gluon.jit
def _arrive_kernel(out_ptr):
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.arrive(barrier, count=1)
    gl.store(out_ptr, 1)


def _arrive() -> None:
    _arrive_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"), num_warps=4)
    torch.cuda.synchronize()


_RACE = """
extern "C" __global__ void race(int* out) {
    __shared__ int shared[64];
    shared[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = shared[63 - threadIdx.x];
}
"""
_DIVERGENT = """
extern "C" __global__ void divergent(int* out) {
    if (threadIdx.x % 2 == 0) __syncthreads();
    out[threadIdx.x] = 1;
}
"""


def _cuda(source: str, name: str) -> None:
    # private, and used for these two faults alone
    kernel = torch.cuda._compile_kernel(source, name)
    kernel(grid=(1, 1, 1), block=(64, 1, 1), args=(torch.zeros(64, dtype=torch.int32, device="cuda"),))
    torch.cuda.synchronize()


def _bf16(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.bfloat16).cuda()


# Name -> call. A request of 0 tokens, a partial page, a whole tile.
KERNELS: dict[str, Callable[[], object]] = {
    "portable": lambda: _decode([70, 0, 64], 64, num_splits=1),
    "portable, small pages, and its merge": lambda: _decode([70, 0, 16], 16, num_splits=2),
    "hopper": lambda: _decode([70, 0, 64], 64, batch_invariant=True),
    "hopper, divided and merged": lambda: _decode([700], 64, num_heads=66),
}
# Name -> (the tool that is to see it, call).
PLANTED: dict[str, tuple[str, Callable[[], object]]] = {
    "load past the end": ("memcheck", lambda: _copy(torch.zeros(16).cuda(), 64)),
    "TMA load past the end": ("memcheck", lambda: _tma_copy(_bf16(32 * 64), True)),
    "load of what was never written": ("initcheck", lambda: _copy(torch.empty(64, device="cuda"), 64)),
    "TMA load of what was never written": (
        "initcheck",
        lambda: _tma_copy(torch.empty(64 * 64, dtype=torch.bfloat16, device="cuda"), True),
    ),
    "shared memory without a barrier (CUDA)": ("racecheck", lambda: _cuda(_RACE, "race")),
    "tile read before its mbarrier": ("racecheck", lambda: _tma_copy(_bf16(64 * 64), False)),
    "tile read before it is handed over": ("racecheck", lambda: sanitize_controls.hand_over(False)),
    "barrier in a divergent branch (CUDA)": ("synccheck", lambda: _cuda(_DIVERGENT, "divergent")),
    "mbarrier that was never initialised": ("synccheck", _arrive),
}
# Name -> (the tool that is to be silent, call).
CONTROLS: dict[str, tuple[str, Callable[[], object]]] = {
    **sanitize_controls.CONTROLS,
    "TMA load, read behind its mbarrier": ("racecheck", _tma_load),
}
_ALL = KERNELS | {name: call for name, (_, call) in (PLANTED | CONTROLS).items()}


if __name__ == "__main__":
    (name,) = sys.argv[1:]
    _ALL[name]()
