"""What is measured: shapes, their cost, and the data that a measurement rotates through."""

import math
from dataclasses import asdict, dataclass, replace

import torch

from mla.config import PRESETS
from mla.problem import Problem, make_problem

# Inputs of one measurement together: several times the L2 of any GPU (50 MB on an H100, 60 MB on an H200), so that
# little of what a call reads is left in L2 from the calls before it.
ROTATED_BYTES = 240_000_000


@dataclass(frozen=True)
class Case:
    """One decode shape.

    Args:
        batch_size: requests.
        context_len: cached tokens of each request.
        num_heads: query heads.
        page_size: tokens a page.
        dtype: name of a torch dtype.
        preset: key of `mla.PRESETS`, whose widths are used.
    """

    batch_size: int
    context_len: int
    num_heads: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    preset: str = "deepseek-v3"

    @property
    def config(self):
        """The preset's dimensions with this case's number of heads."""
        return replace(PRESETS[self.preset], num_heads=self.num_heads)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def name(self) -> str:
        return f"b{self.batch_size}-n{self.context_len}-h{self.num_heads}"

    @property
    def flops(self) -> int:
        """Of the absorbed form: scores over the cached row, values over its latent part; 2 a multiply-add."""
        width = self.config.cache_dim + self.config.kv_lora_rank
        return 2 * width * self.num_heads * self.batch_size * self.context_len

    @property
    def bytes_moved(self) -> int:
        """The least: each cached row and the query read once, the output written once."""
        per_head = self.config.cache_dim + self.config.kv_lora_rank
        elements = self.context_len * self.config.cache_dim + self.num_heads * per_head
        return self.batch_size * elements * self.torch_dtype.itemsize

    def to_columns(self) -> dict[str, object]:
        """The columns of a data file that name this case."""
        columns = asdict(self)
        columns.pop("preset")
        return {**columns, "q_len": 1}


# The source names the corners 8 x 1K and 128 x 32K and the number 16; the steps between are ours.
SIXTEEN_SHAPES = tuple(Case(b, n) for b in (8, 32, 64, 128) for n in (1024, 4096, 16384, 32768))

# Small enough for the interpreter: the correctness gate without a GPU.
CPU_CASES = tuple(
    Case(b, n, num_heads=h, page_size=p, dtype="float16", preset="tiny")
    for b, n, h, p in ((1, 1, 4, 16), (2, 65, 4, 16), (3, 130, 20, 64), (2, 63, 3, 1))
)


def num_problems(case: Case) -> int:
    """Data sets that are together larger than `ROTATED_BYTES`, at least one."""
    cache_bytes = case.batch_size * case.context_len * case.config.cache_dim * case.torch_dtype.itemsize
    return max(1, math.ceil(ROTATED_BYTES / cache_bytes))


def draw_problems(case: Case, device: str, seed: int, at_most: int | None = None) -> list[Problem]:
    """Data sets of one case that are together larger than L2; at least one, and no more than `at_most`."""
    count = num_problems(case)
    return [
        make_problem(
            case.config,
            [case.context_len] * case.batch_size,
            page_size=case.page_size,
            dtype=case.torch_dtype,
            device=device,
            seed=seed + i,
        )
        for i in range(min(count, at_most or count))
    ]
