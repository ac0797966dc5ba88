import dataclasses

import pytest
import torch

from mla import PRESETS
from mla.kernels import portable, portable_config
from mla.kernels.launch import Device
from mla.kernels.portable_config import PortableConfig, choose_config, descriptors_fit
from mla.measure.gate import check_result
from mla.problem import make_problem
from mla.tests.conftest import dtype_id, kernel_dtypes


def _check(problem, config=None, num_splits=None):
    out, lse = portable.decode(problem, config, num_splits)
    verdict = check_result(out, lse, problem, rounds_scores=False, is_per_head=False)
    assert verdict.passed, verdict.status
    return out, lse


@pytest.mark.parametrize("page_size", [1, 2, 7, 16, 48, 64, 128, 256], ids=lambda p: f"p{p}")
@pytest.mark.parametrize("dtype", kernel_dtypes(), ids=dtype_id)
def test_page_sizes(page_size, dtype, device):
    lengths = [0, 1, page_size - 1, page_size, page_size + 1, 150]
    _check(make_problem(PRESETS["tiny"], lengths, page_size=page_size, dtype=dtype, device=device))


@pytest.mark.parametrize("config", [c for configs in portable_config.CONFIGS.values() for c in configs], ids=str)
def test_every_kept_configuration(config, device):
    p = make_problem(PRESETS["tiny"], [0, 63, 64, 200], page_size=64, dtype=torch.float16, device=device)
    _check(p, config, num_splits=2)


def test_pointers_and_descriptors_agree_to_the_bit(device):
    p = make_problem(PRESETS["tiny"], [200, 64], page_size=64, dtype=torch.float16, device=device)
    by_pointer, by_descriptor = (
        portable.decode(p, PortableConfig(16, 32, 4, 1, use_descriptors=use), num_splits=2) for use in (False, True)
    )
    assert torch.equal(by_pointer[0], by_descriptor[0])
    assert torch.equal(by_pointer[1], by_descriptor[1])


def test_page_order_does_not_matter(device):
    """Two layouts of the same rows give the same bits."""
    p = make_problem(PRESETS["tiny"], [100, 37], page_size=16, dtype=torch.float16, device=device)
    order = torch.randperm(len(p.kv_cache), generator=torch.Generator().manual_seed(3)).to(device)
    new_id = order.argsort().int()
    used = p.block_table < len(order)
    table = torch.where(used, new_id[p.block_table.clamp(max=len(order) - 1).long()], p.block_table)
    moved = dataclasses.replace(p, kv_cache=p.kv_cache[order], block_table=table)
    assert torch.equal(portable.decode(p)[0], portable.decode(moved)[0])


def test_batch_composition_does_not_matter(device):
    """A request gives the same bits alone and among others, at the same split count."""
    p = make_problem(PRESETS["tiny"], [100, 37, 0, 64], page_size=16, dtype=torch.float16, device=device)
    together, _ = portable.decode(p, num_splits=2)
    alone = dataclasses.replace(
        p, q_absorbed=p.q_absorbed[1:2], block_table=p.block_table[1:2], seq_lens=p.seq_lens[1:2]
    )
    assert torch.equal(portable.decode(alone, num_splits=2)[0][0], together[1])


def test_first_fitting_configuration_is_chosen():
    def chosen(page_size, num_heads, dtype=torch.float16):
        config = dataclasses.replace(PRESETS["tiny"], num_heads=num_heads)
        p = make_problem(config, [5], page_size=page_size, dtype=dtype)
        return choose_config(p.q_absorbed, p.kv_cache)

    assert chosen(64, 16) == portable_config.CONFIGS[16][0]
    assert chosen(16, 16) == portable_config.CONFIGS[16][1]
    assert chosen(128, 17) == portable_config.CONFIGS[64][0]
    assert chosen(32, 128) == portable_config.CONFIGS[64][1]
    assert chosen(1, 128) == portable_config.CONFIGS[64][2]
    assert chosen(64, 16, torch.float32) in portable_config.SMALL_CONFIGS


def test_configuration_fits_the_devices_shared_memory(monkeypatch):
    """64-head tiles on Hopper, smaller ones where there is less; rows that fit nowhere are refused."""
    q, pool = torch.zeros(1, 128, 576, dtype=torch.float16), torch.zeros(1, 64, 576, dtype=torch.float16)

    def chosen(shared_bytes, has_tma=True):
        monkeypatch.setattr(portable_config, "device_facts", lambda device: Device(108, shared_bytes, has_tma))
        return choose_config(q, pool)

    assert chosen(232_448) == portable_config.CONFIGS[64][0]
    assert chosen(232_448, has_tma=False) == portable_config.CONFIGS[64][2]
    assert chosen(166_912) == portable_config.CONFIGS[64][1]
    assert chosen(101_376) == portable_config.SMALL_CONFIGS[0]
    with pytest.raises(RuntimeError, match=r"expected a device with at least 36864 bytes.*got 20000"):
        chosen(20_000)


@pytest.mark.parametrize("page_size", [16, 64], ids=lambda p: f"p{p}")
@pytest.mark.parametrize("far", ["page", "token"])
def test_offsets_beyond_2_to_31_elements(page_size, far, device):
    """Every page in use, or the last tokens of each page, lie that far: offsets need 64 bits on every path.

    About 5 GB, of which only the rows in use are touched: a system maps no more, a GPU has it.
    """
    p = make_problem(PRESETS["tiny"], [100], page_size=page_size, dtype=torch.float16, device=device)
    pages, _, width = p.kv_cache.shape
    if far == "page":
        first = 2**31 // (page_size * width) + 1
        pool = p.kv_cache.new_empty(first + pages, page_size, width)
        p = dataclasses.replace(p, block_table=torch.where(p.block_table < pages, p.block_table + first, p.block_table))
        pool[first:] = p.kv_cache
    else:
        distance = 5 * 2**31 // (4 * page_size)
        pool = p.kv_cache.new_empty(page_size * distance + pages * width)
        pool = pool.as_strided(p.kv_cache.shape, (width, distance, 1)).copy_(p.kv_cache)
    for config in (
        PortableConfig(16, 32, 4, 1),
        PortableConfig(16, 16, 4, 1),
        PortableConfig(16, 32, 4, 1, use_descriptors=True),
    ):
        if not config.use_descriptors or descriptors_fit(pool, config.block_n):
            _check(dataclasses.replace(p, kv_cache=pool), config)


def test_descriptors_need_whole_tiles_in_one_matrix():
    pool = torch.zeros(4, 64, 48, dtype=torch.float16)
    assert descriptors_fit(pool, 64)
    assert not descriptors_fit(pool[:, :48], 16)
    assert not descriptors_fit(torch.zeros(4, 48, 48), 32)
    with pytest.raises(ValueError, match="descriptors"):
        p = make_problem(PRESETS["tiny"], [5], page_size=7)
        portable.decode(p, PortableConfig(16, 16, 4, 1, use_descriptors=True))
