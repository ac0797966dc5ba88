"""What tests need that hold for both kernels of `mla_decode`: the portable one anywhere, Hopper's on its GPU."""

import contextlib
import dataclasses

import pytest
import torch

from mla import PRESETS, mla_decode
from mla.measure.gate import check_result
from mla.problem import Problem, make_problem, page_cache

ON_GPU = torch.cuda.is_available()
HAS_HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
KERNELS = [
    "portable",
    pytest.param(
        "hopper", marks=[pytest.mark.gpu, pytest.mark.skipif(ON_GPU and not HAS_HOPPER, reason="needs a Hopper GPU")]
    ),
]
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
# Around tiles and pairs of tiles; on a GPU also some that are divided.
LENGTHS = [0, 1, 64, 65, 1000, 4097, 131] if ON_GPU else [0, 1, 16, 37, 131]
# With 128 heads, few more requests than the Hopper kernel has parts on 132 or 114 SMs: a part takes the end of one and
# the beginning of the next (`kernels/test_work_plan.py` says whether it still does).
SHARED_ENDS = [1000 + i for i in range(70)]


def make(lengths=LENGTHS, num_heads: int = 4, page_size: int = 16, dtype=DTYPE, **options) -> Problem:
    """A problem that both kernels take on a GPU, one of small widths on the interpreter."""
    config = dataclasses.replace(PRESETS["deepseek-v3" if ON_GPU else "tiny"], num_heads=num_heads)
    return make_problem(config, lengths, page_size=page_size, dtype=dtype, device=DEVICE, **options)


def with_rows(p: Problem, kv: torch.Tensor) -> Problem:
    """The same problem with other cached rows."""
    generator = torch.Generator().manual_seed(1)
    kv_cache, block_table = page_cache(kv, p.seq_lens.tolist(), p.kv_cache.shape[1], generator)
    return dataclasses.replace(p, kv=kv, kv_cache=kv_cache, block_table=block_table)


def request(p: Problem, b: int) -> Problem:
    """One request of a problem, alone."""
    names = ("q_absorbed", "kv", "block_table", "seq_lens")
    return dataclasses.replace(p, **{name: getattr(p, name)[b : b + 1] for name in names})


def decode(kernel: str, p: Problem, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_decode` where it dispatches to that kernel: a number of splits asks for the portable one."""
    if kernel == "portable":
        options = {"num_splits": 3, **options}
    else:
        from mla.kernels.hopper_launch import hopper_fits

        out = options.get("out")
        assert hopper_fits(p.q_absorbed, p.kv_cache, p.block_table, p.q_absorbed[..., :512] if out is None else out)
    return mla_decode(
        p.q_absorbed, p.kv_cache, p.block_table, p.seq_lens, softmax_scale=p.softmax_scale,
        kv_lora_rank=p.config.kv_lora_rank, **options,
    )  # fmt: skip


def check(result: tuple[torch.Tensor, torch.Tensor], p: Problem) -> None:
    """The result is within the stated bound of the reference, and empty requests are exactly 0 and -inf."""
    out, lse = result
    verdict = check_result(out, lse, p, rounds_scores=False, is_per_head=False)
    assert verdict.passed, verdict.status
    is_empty = p.seq_lens <= 0
    assert (out[is_empty] == 0).all()
    assert (lse[is_empty] == -torch.inf).all()


def assert_same_bits(got, expected) -> None:
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@contextlib.contextmanager
def poisoned_memory():
    """New memory is full of NaN (floats) or of the largest number (integers), on a GPU too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
