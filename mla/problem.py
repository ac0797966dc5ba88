"""One decode step with random data, in every form that a rung of the ladder takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mla.config import MLAConfig
from mla.reference import absorb_query

# What unused block-table entries hold: an id far outside every pool, which a kernel must never follow.
UNUSED_PAGE_ID = 2_147_480_000


@dataclass(frozen=True)
class Problem:
    """One decode step: a query token for each of batch_size requests, before and after absorption.

    Args:
        config: the layer's dimensions.
        q_nope: (batch_size, num_heads, qk_nope_head_dim).
        q_pe: (batch_size, num_heads, qk_rope_head_dim), rotated.
        w_uk: (num_heads, qk_nope_head_dim, kv_lora_rank).
        w_uv: (num_heads, v_head_dim, kv_lora_rank).
        q_absorbed: (batch_size, num_heads, cache_dim), computed in at least fp32, then rounded.
        kv: (batch_size, max_seq_len, cache_dim), the contiguous cache; NaN past each request's length.
        kv_cache: (num_pages, page_size, cache_dim), the same rows in shuffled pages; NaN in unused slots and pages.
        block_table: (batch_size, max_pages) int32; UNUSED_PAGE_ID past each request's pages.
        seq_lens: (batch_size,) int32, cached tokens a request.
        softmax_scale: the model's.
        has_unused_rows: whether some rows of kv hold no token, known to the host.
    """

    config: MLAConfig
    q_nope: torch.Tensor
    q_pe: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    q_absorbed: torch.Tensor
    kv: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    softmax_scale: float
    has_unused_rows: bool


def page_cache(
    kv: torch.Tensor, seq_lens: Sequence[int], page_size: int, generator: torch.Generator, spare_pages: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay a contiguous cache out in shuffled pages.

    Args:
        kv: (batch_size, max_seq_len, cache_dim).
        seq_lens: tokens of each request.
        page_size: tokens a page.
        generator: a CPU generator; it shuffles the pages.
        spare_pages: pages that no request owns.

    Returns:
        kv_cache (num_pages, page_size, cache_dim) with NaN wherever no token lives, and block_table
        (batch_size, max_pages) int32 with UNUSED_PAGE_ID past each request's pages.
    """
    pages_needed = torch.tensor([-(-n // page_size) for n in seq_lens])
    max_pages = max(int(pages_needed.max()), 1)
    num_pages = int(pages_needed.sum()) + spare_pages
    used = torch.arange(max_pages) < pages_needed[:, None]  # (batch_size, max_pages)
    block_table = torch.full(used.shape, UNUSED_PAGE_ID, dtype=torch.int32)
    block_table[used] = torch.randperm(num_pages, generator=generator)[: int(used.sum())].int()

    kv_cache = torch.full((num_pages, page_size, kv.shape[-1]), torch.nan, dtype=kv.dtype, device=kv.device)
    for b, n in enumerate(seq_lens):
        pages = block_table[b, : int(pages_needed[b])].long().to(kv.device)
        whole = n // page_size
        kv_cache[pages[:whole]] = kv[b, : whole * page_size].unflatten(0, (whole, page_size))
        if n % page_size:
            kv_cache[pages[whole], : n % page_size] = kv[b, whole * page_size : n]
    return kv_cache, block_table.to(kv.device)


def make_problem(
    config: MLAConfig,
    seq_lens: Sequence[int],
    *,
    page_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    logit_scale: float = 1.0,
) -> Problem:
    """Draw a decode step.

    Args:
        config: the layer's dimensions; its num_heads is the number of query heads.
        seq_lens: cached tokens of each request; zeros are allowed.
        page_size: tokens a page of the paged cache.
        dtype: of all float tensors.
        device: of all tensors.
        seed: same seed, same numbers on the same device type.
        logit_scale: factor on the query. At 1.0 scaled logits have a standard deviation of about 1.7; larger values
            make the softmax peaked, so that errors in the running maximum show.

    Returns:
        A Problem.
    """
    host = torch.Generator().manual_seed(seed)
    generator = host if torch.device(device).type == "cpu" else torch.Generator(device).manual_seed(seed)
    working = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=std, generator=generator)

    batch, heads, rank = len(seq_lens), config.num_heads, config.kv_lora_rank
    q_nope = normal(batch, heads, config.qk_nope_head_dim, std=logit_scale)
    q_pe = normal(batch, heads, config.qk_rope_head_dim, std=logit_scale)
    w_uk = normal(heads, config.qk_nope_head_dim, rank, std=config.qk_nope_head_dim**-0.5)
    w_uv = normal(heads, config.v_head_dim, rank, std=rank**-0.5)
    kv = normal(batch, max(max(seq_lens), 1), config.cache_dim)
    for b, n in enumerate(seq_lens):
        kv[b, n:] = torch.nan
    kv_cache, block_table = page_cache(kv, seq_lens, page_size, host)
    return Problem(
        config=config,
        q_nope=q_nope,
        q_pe=q_pe,
        w_uk=w_uk,
        w_uv=w_uv,
        q_absorbed=absorb_query(q_nope.to(working), q_pe.to(working), w_uk.to(working)).to(dtype),
        kv=kv,
        kv_cache=kv_cache,
        block_table=block_table,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        softmax_scale=config.softmax_scale,
        has_unused_rows=any(n != kv.shape[1] for n in seq_lens),
    )
