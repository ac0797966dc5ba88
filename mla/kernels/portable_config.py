"""What the portable kernel is launched with: tile shapes by a table that the sweep left, and the number of splits."""

from dataclasses import dataclass

import torch
import triton

from mla.kernels.launch import device_facts
from mla.plan import choose_num_splits


@dataclass(frozen=True)
class PortableConfig:
    """Tile shape and launch parameters of the portable kernel.

    Args:
        block_h: heads a program takes, 16 or more.
        block_n: tokens a tile holds, 16 or more.
        num_warps, num_stages: Triton's.
        use_descriptors: load whole tiles by TMA (Hopper and newer; emulated by Triton elsewhere).
        programs_per_sm: programs that share a SM, which one wave of splits then counts on.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    use_descriptors: bool = False
    programs_per_sm: int = 1


def descriptors_fit(kv_cache: torch.Tensor, block_n: int) -> bool:
    """Whether whole tiles of this cache can be loaded by TMA: a tile never straddles pages, the pool is one matrix."""
    num_pages, page_size, _ = kv_cache.shape
    is_one_matrix = kv_cache.stride() == (page_size * kv_cache.stride(1), kv_cache.stride(1), 1)
    is_aligned = kv_cache.data_ptr() % 16 == 0 and kv_cache.stride(1) * kv_cache.element_size() % 16 == 0
    # the descriptor counts rows in 32 bits, from one up
    return page_size % block_n == 0 and is_one_matrix and is_aligned and 0 < num_pages * page_size < 2**31


# What the sweep on an H200 left (`triton-mla-bench tune`, data/tune_*.csv; gains a shape in figures/tuning.md): for
# each block of heads the configurations in order of preference, of which the first that fits pages and device is
# taken. Blocks of 64 heads run on wgmma, blocks of 16 on mma.sync; pages that no tile fits come in through pointers.
# At 16 heads and whole tiles the two configurations are within 1.5% of each other, either way round.
CONFIGS = {
    16: (
        PortableConfig(16, 64, num_warps=8, num_stages=2, use_descriptors=True),
        PortableConfig(16, 32, num_warps=4, num_stages=2, programs_per_sm=2),
    ),
    64: (
        PortableConfig(64, 64, num_warps=8, num_stages=2, use_descriptors=True),
        PortableConfig(64, 32, num_warps=8, num_stages=2, use_descriptors=True),
        PortableConfig(64, 64, num_warps=8, num_stages=1),
    ),
}
# Where shared memory is short (wide or 4-byte rows, other GPUs); correct, not tuned.
SMALL_CONFIGS = (
    PortableConfig(16, 32, num_warps=4, num_stages=2),
    PortableConfig(16, 16, num_warps=4, num_stages=1),
)


def choose_config(q: torch.Tensor, kv_cache: torch.Tensor) -> PortableConfig:
    """The first configuration that fits a call's pages and device.

    Raises:
        RuntimeError: rows are too wide for the device's shared memory.
    """
    facts = device_facts(q.device)
    row_bytes = q.shape[2] * q.element_size()
    # the interpreter and mma.sync on 4-byte elements want the small tiles
    tuned = CONFIGS[16 if q.shape[1] <= 16 else 64] if q.element_size() == 2 else ()
    for config in (*tuned, *SMALL_CONFIGS):
        needed = (config.block_h + config.num_stages * config.block_n) * row_bytes
        can_load = not config.use_descriptors or (facts.has_tma and descriptors_fit(kv_cache, config.block_n))
        if can_load and needed <= facts.shared_bytes:
            return config
    raise RuntimeError(
        f"mla_decode: expected a device with at least {needed} bytes of shared memory a block for rows of {row_bytes} "
        f"bytes, got {facts.shared_bytes}; use a 16-bit cache or a smaller kv_lora_rank"
    )


def default_num_splits(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, config: PortableConfig
) -> int:
    """Parts a request for about one wave; the table's width bounds the lengths, which only the device knows."""
    return choose_num_splits(
        q.shape[0],
        triton.cdiv(q.shape[1], config.block_h),
        triton.cdiv(block_table.shape[1] * kv_cache.shape[1], config.block_n),
        device_facts(q.device).num_sms * config.programs_per_sm,
    )
