"""What is measured: shapes, their cost, and the data that a measurement rotates through."""

import math
import random
from dataclasses import asdict, dataclass, replace

import torch

from mla.config import PRESETS
from mla.problem import Problem, make_problem

# Inputs of one measurement together: several times the L2 of any GPU (50 MB on an H100, 60 MB on an H200), so that
# little of what a call reads is left in L2 from the calls before it.
ROTATED_BYTES = 240_000_000

# How a batch's lengths are spread, and its shortest request: `even` has none but context_len, `log-uniform` is spread
# from there to context_len, `one-long` is one request of context_len among others of that length.
SHORTEST = {"even": 0, "log-uniform": 256, "one-long": 1024}


@dataclass(frozen=True)
class Case:
    """One decode shape.

    Args:
        batch_size: requests.
        context_len: cached tokens of each request, of the longest where lengths is not "even".
        num_heads: query heads.
        page_size: tokens a page.
        dtype: name of a torch dtype.
        preset: key of `mla.PRESETS`, whose widths are used.
        lengths: a key of `SHORTEST`, how the requests' lengths are spread.

    Raises:
        ValueError: lengths is unknown, or context_len is below its shortest request.
    """

    batch_size: int
    context_len: int
    num_heads: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    preset: str = "deepseek-v3"
    lengths: str = "even"

    def __post_init__(self):
        if self.lengths not in SHORTEST:
            raise ValueError(f"lengths: expected one of {', '.join(SHORTEST)}, got {self.lengths!r}")
        if self.context_len < SHORTEST[self.lengths]:
            raise ValueError(
                f"context_len: expected at least {SHORTEST[self.lengths]} with lengths {self.lengths}, "
                f"got {self.context_len}"
            )

    @property
    def config(self):
        """The preset's dimensions with this case's number of heads."""
        return replace(PRESETS[self.preset], num_heads=self.num_heads)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def name(self) -> str:
        suffix = "" if self.lengths == "even" else f"-{self.lengths}"
        return f"b{self.batch_size}-n{self.context_len}-h{self.num_heads}{suffix}"

    @property
    def seq_lens(self) -> list[int]:
        """Cached tokens of each request; the same at every call."""
        count, longest, shortest = self.batch_size, self.context_len, SHORTEST[self.lengths]
        if self.lengths == "even":
            return [longest] * count
        if self.lengths == "one-long":
            return [longest] + [shortest] * (count - 1)
        # the quantiles of a log-uniform distribution: half of the requests are shorter than the geometric mean
        lengths = [round(longest * (shortest / longest) ** (i / max(count - 1, 1))) for i in range(count)]
        random.Random(0).shuffle(lengths)
        return lengths

    @property
    def total_tokens(self) -> int:
        """Cached tokens of all requests together."""
        return sum(self.seq_lens)

    @property
    def flops(self) -> int:
        """Of the absorbed form: scores over the cached row, values over its latent part; 2 a multiply-add."""
        width = self.config.cache_dim + self.config.kv_lora_rank
        return 2 * width * self.num_heads * self.total_tokens

    @property
    def bytes_moved(self) -> int:
        """The least: each cached row and the query read once, the output written once."""
        per_head = self.config.cache_dim + self.config.kv_lora_rank
        elements = self.total_tokens * self.config.cache_dim + self.batch_size * self.num_heads * per_head
        return elements * self.torch_dtype.itemsize

    @property
    def input_bytes(self) -> int:
        """Of one data set: the contiguous cache, as long as the longest request for all, and the paged one."""
        rows = self.batch_size * self.context_len + self.total_tokens
        return rows * self.config.cache_dim * self.torch_dtype.itemsize

    def to_columns(self) -> dict[str, object]:
        """The columns of a data file that name this case."""
        columns = asdict(self)
        columns.pop("preset")
        return {**columns, "q_len": 1}


def even_beside(case: Case) -> Case:
    """The even batch whose total of tokens is as nearly that of a ragged one as whole pages allow."""
    pages = round(case.total_tokens / (case.batch_size * case.page_size))
    return replace(case, context_len=pages * case.page_size, lengths="even")


# The source names the corners 8 x 1K and 128 x 32K and the number 16; the steps between are ours.
SIXTEEN_SHAPES = tuple(Case(b, n) for b in (8, 32, 64, 128) for n in (1024, 4096, 16384, 32768))
_RAGGED = (Case(128, 32768, lengths="log-uniform"), Case(128, 131072, lengths="one-long"))
# What is measured together, by the name that the command takes.
GROUPS = {
    "sixteen": SIXTEEN_SHAPES,
    "heads": tuple(Case(b, 8192, num_heads=h) for b in (32, 128) for h in (8, 12, 16, 24, 32, 64, 128)),
    "long": tuple(Case(b, n) for b in (1, 2, 4) for n in (32768, 131072)),
    "ragged": tuple(c for ragged in _RAGGED for c in (ragged, even_beside(ragged))),
    "staircase": tuple(Case(b, n) for b, n in ((8, 1024), (32, 4096), (64, 16384), (128, 32768))),
}

# Small enough for the interpreter: the correctness gate without a GPU.
CPU_CASES = (
    *(
        Case(b, n, num_heads=h, page_size=p, dtype="float16", preset="tiny")
        for b, n, h, p in ((1, 1, 4, 16), (2, 65, 4, 16), (3, 130, 20, 64), (2, 63, 3, 1))
    ),
    Case(3, 300, num_heads=4, page_size=16, dtype="float16", preset="tiny", lengths="log-uniform"),
)


def num_problems(case: Case) -> int:
    """Data sets that are together larger than `ROTATED_BYTES`, at least one."""
    cache_bytes = case.total_tokens * case.config.cache_dim * case.torch_dtype.itemsize
    return max(1, math.ceil(ROTATED_BYTES / cache_bytes))


def draw_problems(case: Case, device: str, seed: int, at_most: int | None = None) -> list[Problem]:
    """Data sets of one case that are together larger than L2; at least one, and no more than `at_most`."""
    count = num_problems(case)
    return [
        make_problem(
            case.config,
            case.seq_lens,
            page_size=case.page_size,
            dtype=case.torch_dtype,
            device=device,
            seed=seed + i,
        )
        for i in range(min(count, at_most or count))
    ]
