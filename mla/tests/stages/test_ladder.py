"""Every rung against the reference: fp16 and fp32 on the interpreter, bf16 as well on a GPU."""

import dataclasses

import pytest
import torch

from mla import PRESETS
from mla.kernels import portable
from mla.measure.gate import check_result
from mla.problem import make_problem
from mla.stages import absorbed, naive, online_softmax, split_kv
from mla.tests.conftest import dtype_id, kernel_dtypes

RUNGS = {r.__name__.rsplit(".")[-1]: r for r in (naive, absorbed, online_softmax, split_kv, portable)}
TORCH_RUNGS = ("naive", "absorbed")
PAGE = 16
# empty, one token, around a page and around a tile, odd ones
LENGTHS = [0, 1, PAGE - 1, PAGE, PAGE + 1, 63, 64, 65, 131]


def _check(rung, problem, **options):
    out, lse = RUNGS[rung].decode(problem, **options)
    verdict = check_result(out, lse, problem, rounds_scores=rung in TORCH_RUNGS, is_per_head=rung == "naive")
    assert verdict.passed, verdict.status
    return out, lse


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("dtype", kernel_dtypes(), ids=dtype_id)
@pytest.mark.parametrize("num_heads", [1, 5, 20], ids=lambda h: f"h{h}")
def test_ragged_lengths(rung, dtype, num_heads, device):
    """Shuffled pages, NaN in every unused slot and page, garbage in unused table entries (see `make_problem`)."""
    config = dataclasses.replace(PRESETS["tiny"], num_heads=num_heads)
    p = make_problem(config, LENGTHS, page_size=PAGE, dtype=dtype, device=device, logit_scale=3.0)
    out, lse = _check(rung, p)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [1], [70, 70]], ids=lambda x: "n" + "-".join(map(str, x)))
def test_batches_of_one_kind(rung, lengths, device):
    _check(rung, make_problem(PRESETS["tiny"], lengths, page_size=PAGE, dtype=torch.float16, device=device))


@pytest.mark.parametrize("rung", [r for r in RUNGS if r not in TORCH_RUNGS])
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_moving_maximum(rung, order, device):
    """Row maxima that rise from tile to tile make every rescaling count; falling ones must change nothing."""
    p = make_problem(PRESETS["tiny"], [200], page_size=PAGE, dtype=torch.float32, device=device, logit_scale=10.0)
    ramp = torch.linspace(0.05, 3.0, 200, device=device)
    ramp = ramp if order == "rising" else ramp.flip(0)
    kv = p.kv * ramp[:, None]
    pages = p.block_table[0].long()
    kv_cache = p.kv_cache.clone()
    kv_cache[pages[:12]] = kv[0, :192].view(12, PAGE, -1)
    kv_cache[pages[12], :8] = kv[0, 192:]
    _, lse = _check(rung, dataclasses.replace(p, kv=kv, kv_cache=kv_cache))
    assert lse.abs().max() > 50


@pytest.mark.parametrize("rung", ["split_kv", "portable"])
@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 40], ids=lambda s: f"s{s}")
def test_split_count_does_not_change_the_result(rung, num_splits, device):
    """40 parts are more than any request has tiles: most of them are empty."""
    p = make_problem(PRESETS["tiny"], LENGTHS, page_size=PAGE, dtype=torch.float32, device=device, logit_scale=5.0)
    out, lse = _check(rung, p, num_splits=num_splits)
    whole_out, whole_lse = RUNGS[rung].decode(p, num_splits=1)
    torch.testing.assert_close(out, whole_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rung", RUNGS)
def test_real_widths(rung, device):
    """512 + 64, 16 heads: the widths that the figures are about."""
    config = PRESETS["deepseek-v2-lite"]
    _check(rung, make_problem(config, [130, 65], page_size=64, dtype=torch.float16, device=device))
