"""The Hopper kernel's launcher: which calls it takes, its work plan, and launches that are prepared once."""

from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla.kernels.hopper import mla_decode_hopper_kernel
from mla.kernels.launch import device_facts
from mla.kernels.prepared import PreparedLaunch, can_prepare
from mla.kernels.tile import LOG2_E
from mla.kernels.work_plan import MAX_BATCH_SIZE, MAX_SEQ_LEN, WorkPlan, make_work_plan

RANK = 512
ROPE = 64

BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
_THRESHOLD = 8.0
# Scores of masked rows (-3e38) are scaled like the others, and must come out below what stands for -inf (-1e30).
_LEAST_SCALE = 1e-6
# Registers a consumer thread has; the producer warp has what is left. Small pages cost it more.
CONSUMER_REGISTERS = {64: 240, 32: 240, 16: 232}
# Sets of tensor maps kept; a model's layers need one each, times the addresses that the allocator hands out.
_MAX_MAPS = 4096


def can_plan(seq_lens: torch.Tensor) -> bool:
    """Whether this kernel's plan can be made for a batch."""
    return seq_lens.is_cuda and device_facts(seq_lens.device).is_hopper and 1 <= len(seq_lens) <= MAX_BATCH_SIZE


def hopper_fits(q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether this kernel takes a call that `mla.mla_decode` has checked, by all but addresses and the scale.

    It takes 512 + 64 in 16 bits on a GPU of compute capability 9.0, pages of 16, 32 or a multiple of 64 tokens,
    strides that are multiples of 8 elements, at most 4096 requests and a table with room for at most 2^23 tokens a
    request. Addresses must be multiples of 16 bytes and the scale positive, since the maximum is taken before scaling
    (`HopperLaunch.takes`).
    """
    page_size = kv_cache.shape[1]
    return (
        q.is_cuda
        and device_facts(q.device).is_hopper
        and q.element_size() == 2
        and q.shape[2] == RANK + ROPE
        and out.shape[2] == RANK
        and (page_size in (16, 32) or page_size % 64 == 0)
        and len(kv_cache) > 0
        and 1 <= len(q) <= MAX_BATCH_SIZE
        and block_table.shape[1] * page_size <= MAX_SEQ_LEN.value
        and all(t.stride(0) % 8 == 0 and t.stride(1) % 8 == 0 for t in (q, kv_cache, out))
    )


@dataclass(frozen=True)
class HopperPlan:
    """What a decode step's layers share: the work plan, and scratch for the partial results of divided requests.

    Args:
        work: made from the step's lengths.
        part_out: (num_slots, num_heads, 512), 16 bits, viewed in the dtype of a call.
        part_lse: (num_slots, num_heads) fp32.
        key: batch_size, num_heads and the GPU's index, which a call must have too.
        addresses: of parts, requests, part_out and part_lse.
    """

    work: WorkPlan
    part_out: torch.Tensor
    part_lse: torch.Tensor
    key: tuple[int, int, int]
    addresses: tuple[int, int, int, int]


def plan_hopper(seq_lens: torch.Tensor, num_heads: int, *, mode: int | None = None) -> HopperPlan:
    """Plan a decode step, on the device, from the lengths as they are when the plan's kernel runs.

    Args:
        seq_lens: (batch_size,) int32.
        num_heads: query heads of a request.
        mode: how the work is divided (`make_work_plan`); None: by the rule.
    """
    head_blocks = -(-num_heads // 64)
    num_parts = max(1, device_facts(seq_lens.device).num_sms // head_blocks)
    work = make_work_plan(seq_lens, num_parts, head_blocks, mode=mode)
    part_out = torch.empty(work.num_slots, num_heads, RANK, dtype=torch.bfloat16, device=seq_lens.device)
    part_lse = torch.empty(work.num_slots, num_heads, dtype=torch.float32, device=seq_lens.device)
    addresses = tuple(t.data_ptr() for t in (work.parts, work.requests, part_out, part_lse))
    return HopperPlan(work, part_out, part_lse, (len(seq_lens), num_heads, seq_lens.device.index), addresses)


class HopperLaunch:
    """Launches for calls that are alike in shapes, strides, dtypes and device; `hopper_fits` must hold for them.

    The first call compiles and launches in Triton's public way; the next ones are prepared, where Triton's version
    allows it.

    Args:
        q, kv_cache, block_table, out: of one such call.
        prefetch: whether the next tiles are asked for in L2; None: where it pays.
        pdl: programmatic dependent launch, which hides part of the launch behind the kernel before.
    """

    def __init__(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        out: torch.Tensor,
        *,
        prefetch: bool | None = None,
        pdl: bool = True,
    ):
        batch_size, self._num_heads, _ = q.shape
        self._rows = min(kv_cache.shape[1], 64)
        head_blocks = -(-self._num_heads // 64)
        num_parts = max(1, device_facts(q.device).num_sms // head_blocks)
        self._grid = (head_blocks, num_parts)
        self._sizes = (self._num_heads, block_table.shape[1] * kv_cache.shape[1], len(kv_cache))
        self._strides = (block_table.stride(0), kv_cache.stride(0), out.stride(0), out.stride(1))
        # With one block of heads the prefetch does not pay; it takes contiguous rows, and more registers than the
        # producer has at 16 rows a box.
        pays = self._rows > 16 and head_blocks == 2 and kv_cache.stride(1) == RANK + ROPE
        self.prefetch: bool = pays if prefetch is None else prefetch
        self._constants = dict(
            ROWS=self._rows, TILES_PER_PAGE=max(kv_cache.shape[1] // 64, 1), THRESHOLD=_THRESHOLD,
            CONSUMER_REGISTERS=CONSUMER_REGISTERS[self._rows], PREFETCH=self.prefetch,
        )  # fmt: skip
        self._pdl = pdl
        self._plan_key = (batch_size, self._num_heads, q.device.index)
        self._prepared: PreparedLaunch | None = None
        # by the addresses of q, cache, scratch and output
        self._maps: dict[tuple[int, int, int, int], tuple] = {}

    def takes(self, q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, softmax_scale: float) -> bool:
        """Whether addresses are multiples of 16 bytes, as TMA needs them, and the scale is positive (1e-6 or more)."""
        return softmax_scale >= _LEAST_SCALE and (q.data_ptr() | kv_cache.data_ptr() | out.data_ptr()) % 16 == 0

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        softmax_scale: float,
        plan: HopperPlan,
    ) -> None:
        """Enqueue the kernel on the current stream of the tensors' device, which must be the current one."""
        if plan is None or plan.key != self._plan_key:
            self._refuse_plan(plan)
        launch = self._prepared
        if launch is None:
            return self._launch_first(q, kv_cache, block_table, seq_lens, out, lse, softmax_scale, plan)
        addresses = (q.data_ptr(), kv_cache.data_ptr(), plan.addresses[2], out.data_ptr())
        maps = self._maps.get(addresses)
        if maps is None:
            maps = self._fill_maps(addresses, q, kv_cache, plan.part_out, out)
        launch(
            maps,
            (
                addresses[1], block_table.data_ptr(), seq_lens.data_ptr(), *plan.addresses, addresses[3],
                lse.data_ptr(), *self._sizes, softmax_scale * LOG2_E, *self._strides,
            ),
        )  # fmt: skip

    def _fill_maps(self, addresses: tuple, q, kv_cache, part_out, out) -> tuple:
        tensors = (q, q, kv_cache, kv_cache, part_out, out)
        maps = tuple(
            argument
            for i, (tensor, address) in enumerate(zip(tensors, [addresses[j] for j in (0, 0, 1, 1, 2, 3)], strict=True))
            for argument in self._prepared.tensor_map(i, address, tuple(tensor.shape), tensor.stride())
        )
        if len(self._maps) >= _MAX_MAPS:
            self._maps.clear()
        self._maps[addresses] = maps
        return maps

    def _refuse_plan(self, plan: HopperPlan | None) -> None:
        if plan is None:
            raise ValueError("plan: expected one made for a Hopper GPU, got one made elsewhere; make it from seq_lens")
        expected, got = self._plan_key, plan.key
        raise ValueError(
            f"plan: expected one of {expected[0]} requests and {expected[1]} heads on GPU {expected[2]}, got one of "
            f"{got[0]} and {got[1]} on GPU {got[2]}; make it with mla.plan_decode"
        )

    def _launch_first(self, q, kv_cache, block_table, seq_lens, out, lse, softmax_scale, plan) -> None:
        def boxes(tensor: torch.Tensor, height: int, width: int) -> TensorDescriptor:
            return TensorDescriptor.from_tensor(tensor, [1, height, width], BOX_LAYOUT)

        part_out = plan.part_out.view(q.dtype)
        compiled = mla_decode_hopper_kernel[self._grid](
            boxes(q, 64, 256), boxes(q, 64, ROPE),
            boxes(kv_cache, self._rows, 128 if self._rows == 64 else 64), boxes(kv_cache, self._rows, ROPE),
            boxes(part_out, 64, 256), boxes(out, 64, 256),
            kv_cache, block_table, seq_lens, plan.work.parts, plan.work.requests, part_out, plan.part_lse, out, lse,
            *self._sizes, softmax_scale * LOG2_E, *self._strides,
            **self._constants,
            # the CTAs of a divided request wait for each other; one part divides nothing
            num_warps=4, maxnreg=168, launch_pdl=self._pdl, launch_cooperative_grid=self._grid[1] > 1,
        )  # fmt: skip
        if can_prepare():
            self._prepared = PreparedLaunch(compiled, self._grid, tuple(self._constants.values()), q.device.index)


def mla_decode_hopper(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    plan: HopperPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One call of the Hopper kernel; arguments as in `mla_decode_portable`. `mla.mla_decode` keeps what is prepared.

    Args:
        q, kv_cache, block_table, seq_lens, out, lse, softmax_scale: of a call for which `hopper_fits` holds.
        plan: made from the same lengths by `plan_hopper`; made here if None.

    Returns:
        out and lse.

    Raises:
        ValueError: `hopper_fits` does not hold, or the plan is of another batch size or number of heads.
    """
    launch = HopperLaunch(q, kv_cache, block_table, out) if hopper_fits(q, kv_cache, block_table, out) else None
    if launch is None or not launch.takes(q, kv_cache, out, softmax_scale):
        raise ValueError(
            f"mla_decode_hopper: expected a call for which hopper_fits holds, got q {tuple(q.shape)} {q.dtype} on "
            f"{q.device}, kv_cache {tuple(kv_cache.shape)}, block_table {tuple(block_table.shape)}, softmax_scale "
            f"{softmax_scale}; use mla.mla_decode"
        )
    plan = plan or plan_hopper(seq_lens, q.shape[1])
    launch(q, kv_cache, block_table, seq_lens, out, lse, softmax_scale, plan)
    return out, lse
