"""The Gluon rungs where there is no GPU: what they refuse, and how they split."""

import dataclasses

import pytest
import torch

from mla import PRESETS
from mla.problem import Problem, make_problem
from mla.stages import gluon_simple, gluon_warp_specialised

RUNGS = {"gluon_simple": gluon_simple, "gluon_warp_specialised": gluon_warp_specialised}


def _problem(page_size: int = 64, dtype: torch.dtype = torch.float16, **dimensions: int) -> Problem:
    config = dataclasses.replace(PRESETS["deepseek-v3"], num_heads=4, **dimensions)
    return make_problem(config, [70, 0, 5], page_size=page_size, dtype=dtype)


def _with_gaps(name: str) -> Problem:
    p = _problem()
    tensor = getattr(p, name)
    return dataclasses.replace(p, **{name: torch.stack((tensor, tensor), dim=-1)[..., 0]})


REFUSED = {
    "page_size 16": (lambda: _problem(page_size=16), "kv_cache: expected pages of 64 tokens, got 16"),
    "page_size 128": (lambda: _problem(page_size=128), "kv_cache: expected pages of 64 tokens, got 128"),
    "latent 256": (lambda: _problem(kv_lora_rank=256), r"config: expected widths 512 \+ 64, got 256 \+ 64"),
    "rotated 32": (lambda: _problem(qk_rope_head_dim=32), r"config: expected widths 512 \+ 64, got 512 \+ 32"),
    "fp32": (lambda: _problem(dtype=torch.float32), "expected both bfloat16 or float16, got torch.float32"),
    "mixed": (
        lambda: dataclasses.replace(_problem(), kv_cache=_problem(dtype=torch.bfloat16).kv_cache),
        "expected both bfloat16 or float16, got torch.float16, torch.bfloat16",
    ),
    "query with gaps": (lambda: _with_gaps("q_absorbed"), "q_absorbed: expected a contiguous tensor"),
    "pool with gaps": (lambda: _with_gaps("kv_cache"), "kv_cache: expected a contiguous tensor"),
    "table with gaps": (lambda: _with_gaps("block_table"), "block_table: expected a contiguous tensor"),
}


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_it_does_not_take(rung, case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        RUNGS[rung].decode(make())


@pytest.mark.parametrize("rung", RUNGS)
def test_refuses_the_cpu(rung):
    with pytest.raises(RuntimeError, match=r"expected a GPU of compute capability 9\.0, got cpu"):
        RUNGS[rung].decode(_problem())


def test_refuses_a_scale_that_is_not_positive():
    """The maximum is taken before scaling there."""
    with pytest.raises(ValueError, match="softmax_scale: expected a positive number"):
        gluon_warp_specialised.decode(dataclasses.replace(_problem(), softmax_scale=-1.0))


@pytest.mark.parametrize(
    ("lengths", "num_heads", "expected"),
    # 132 SMs; two head blocks; never more parts than tiles
    [([4096] * 8, 128, 8), ([4096] * 8, 64, 16), ([4096] * 100, 128, 1), ([128, 0], 16, 2)],
)
def test_parts_fill_one_wave(lengths, num_heads, expected):
    config = dataclasses.replace(PRESETS["deepseek-v3"], num_heads=num_heads)
    shapes = dict(q_absorbed=(len(lengths), num_heads, 576), block_table=(len(lengths), max(lengths) // 64))
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    p = dataclasses.replace(_problem(), config=config, **empty)
    assert gluon_simple.default_num_splits(p) == expected
