"""Controls for compute-sanitizer: correct kernels, each with one mechanism of the Hopper kernel and little else.

A tool should be silent on them; a report on one is a false alarm, so that a like report on the Hopper kernel proves
nothing. Each checks its result. `hand_over` without waiting is the fault that its control has to be told from.
"""

from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla.kernels.hopper import _barrier
from mla.kernels.hopper_merge import _load_acquire

BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# As the Hopper kernel has its scores, one value a row of them (which four lanes hold), and all rows in every warp.
_TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
_ROW = gl.constexpr(gl.SliceLayout(1, _TILE.value))
_TWO_A_LANE = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_MAX_REGISTERS = gl.constexpr(128)


@gluon.jit
def _tile_offsets():
    rows = gl.arange(0, 64, _ROW)
    columns = gl.arange(0, 64, gl.SliceLayout(0, _TILE))
    return rows[:, None] * 64 + columns[None, :]


@gluon.jit
def _give(tile, maxima, ready, free, x_ptr):
    """Write two tiles and their rows' maxima, the second over the first once that was read."""
    for i in range(2):
        x = gl.load(x_ptr + i * 64 * 64 + _tile_offsets())
        # passes at once for the first
        mbarrier.wait(free, (i & 1) ^ 1)
        maxima.store(gl.max(x.to(gl.float32), axis=1))
        tile.store(x)
        fence_async_shared()
        mbarrier.arrive(ready, count=1)


@gluon.jit
def _take(tile, maxima, ready, free, out_ptr, WAITS: gl.constexpr):
    """Read them, and write each tile plus its rows' maxima."""
    for i in range(2):
        if WAITS:
            mbarrier.wait(ready, i & 1)
        x = tile.load(_TILE).to(gl.float32) + maxima.load(_ROW)[:, None]
        gl.store(out_ptr + i * 64 * 64 + _tile_offsets(), x)
        mbarrier.arrive(free, count=1)


@gluon.jit
def _hand_over_kernel(x_ptr, out_ptr, WAITS: gl.constexpr):
    tile = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [64, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    maxima = gl.allocate_shared_memory(gl.float32, [64], _PLAIN)
    ready, free = _barrier(), _barrier()
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [(_give, (tile, maxima, ready, free, x_ptr)), (_take, (tile, maxima, ready, free, out_ptr, WAITS))],
        [4],
        [_MAX_REGISTERS],
    )


@gluon.jit
def _largest(shared, x_ptr, out_ptr, SHARES: gl.constexpr):
    """The largest of 64 values, which each warp finds for itself: from memory, or where it shares, from what all wrote.

    The compiler puts the barrier among the four warps between the store and the load.
    """
    if SHARES:
        shared.store(gl.load(x_ptr + gl.arange(0, 64, _ROW)))
        x = shared.load(_TWO_A_LANE)
    else:
        x = gl.load(x_ptr + gl.arange(0, 64, _TWO_A_LANE))
    gl.store(out_ptr, gl.max(x, axis=0))


@gluon.jit
def _groups_kernel(x_ptr, out_ptr, SHARES: gl.constexpr):
    shared = gl.allocate_shared_memory(gl.float32, [2, 64], _PLAIN)
    gl.warp_specialize(
        [
            (_largest, (shared.index(0), x_ptr, out_ptr, SHARES)),
            (_largest, (shared.index(1), x_ptr + 64, out_ptr + 1, SHARES)),
        ],
        [4],
        [_MAX_REGISTERS],
    )


@gluon.jit
def _tma_store_kernel(desc, x_ptr):
    tile = gl.allocate_shared_memory(desc.dtype, [64, 64], desc.layout)
    tile.store(gl.load(x_ptr + _tile_offsets()))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(desc, [0, 0], tile)
    tma.store_wait(0)


@gluon.jit
def _swap_kernel(desc, x_ptr, parts_ptr, counter_ptr, out_ptr):
    """Two CTAs: each writes its tile to `parts` by TMA, counts itself, waits for the other and reads the other's."""
    this = gl.program_id(0)
    tile = gl.allocate_shared_memory(desc.dtype, [64, 64], desc.layout)
    tile.store(gl.load(x_ptr + this * 64 * 64 + _tile_offsets()))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(desc, [this * 64, 0], tile)
    # as in `mla.kernels.hopper._finish`
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    gl.thread_barrier()
    gl.atomic_add(counter_ptr, 1, sem="release")
    while _load_acquire(counter_ptr) != 2:
        pass
    other = (1 - this) * 64 * 64 + _tile_offsets()
    gl.store(out_ptr + this * 64 * 64 + _tile_offsets(), gl.load(parts_ptr + other, cache_modifier=".cg"))


def _draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Whole numbers that 16 bits hold exactly, on the CPU."""
    return torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def expect_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    """RuntimeError where a control computed something else, so that what a tool says of it counts for nothing."""
    wrong = int((got.cpu() != expected).sum())
    if wrong:
        raise RuntimeError(f"expected the exact result of a control, got {wrong} of {expected.numel()} values wrong")


def hand_over(waits: bool) -> None:
    """A tile in shared memory goes from one group of warps to another and back; without waiting, a race."""
    x, out = _draw(2, 64, 64), torch.zeros(2, 64, 64, device="cuda")
    _hand_over_kernel[(1,)](x.cuda(), out, waits, num_warps=4, maxnreg=_MAX_REGISTERS.value)
    torch.cuda.synchronize()
    if waits:
        expect_equal(out, x.float() + x.float().amax(-1, keepdim=True))


def _groups(shares: bool) -> None:
    x, out = _draw(2, 64, dtype=torch.float32), torch.zeros(2, device="cuda")
    _groups_kernel[(1,)](x.cuda(), out, shares, num_warps=4, maxnreg=_MAX_REGISTERS.value)
    expect_equal(out, x.amax(-1))


def _tma_store(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """`read` reads memory that a TMA store alone has written."""
    x = _draw(64, 64)
    stored = torch.empty(64, 64, dtype=x.dtype, device="cuda")
    desc = TensorDescriptor(stored, shape=[64, 64], strides=[64, 1], block_shape=[64, 64], layout=BOX)
    _tma_store_kernel[(1,)](desc, x.cuda(), num_warps=4)
    expect_equal(read(stored), x)


def _swap() -> None:
    x = _draw(2, 64, 64)
    parts = torch.empty(128, 64, dtype=x.dtype, device="cuda")
    out, counter = torch.zeros_like(x, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    desc = TensorDescriptor(parts, shape=[128, 64], strides=[64, 1], block_shape=[64, 64], layout=BOX)
    _swap_kernel[(2,)](desc, x.cuda(), parts, counter, out, num_warps=4, launch_cooperative_grid=True)
    expect_equal(out, x.flip(0))


# Name -> (the tool that is to be silent, call).
CONTROLS: dict[str, tuple[str, Callable[[], object]]] = {
    "groups of warps that share nothing": ("racecheck", lambda: _groups(False)),
    "rows exchanged within a group of warps": ("racecheck", lambda: _groups(True)),
    "tile handed over by mbarriers": ("racecheck", lambda: hand_over(True)),
    "TMA store, read by the next launch": ("initcheck", lambda: _tma_store(lambda stored: stored + 0)),
    "TMA store, copied to the host": ("initcheck", lambda: _tma_store(lambda stored: stored.cpu())),
    "TMA store, read by another CTA": ("initcheck", _swap),
}
