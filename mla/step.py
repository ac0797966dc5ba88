"""What the layers of one forward pass share: the new tokens of some requests, and where their rows go."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from mla.cache import PagedCache
from mla.decode import DecodePlan, plan_decode


@dataclass(frozen=True)
class CacheStep:
    """New tokens of some requests, and where their rows go: what the layers of one forward pass share.

    `begin_step` makes one. For a CUDA graph of a decode step make it once, of tensors that stay where they are and are
    filled before each replay (`PagedCache.reserve(..., out=slots)`, `PagedCache.update_tables`).

    Args:
        cache: holds a pool for each layer.
        slots: (tokens,) int64, where the new rows are written; request by request.
        block_table: (batch_size, max_pages) int32.
        seq_lens: (batch_size,) int32; cached tokens a request, the new ones included.
        query_lens: new tokens of each request. All 1: a decode step.
        cached_lens: tokens of each request before this step; not looked at in a decode step.
        plan: of a decode step, from `plan_decode`; None: each layer's call makes its own.
    """

    cache: PagedCache
    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_lens: tuple[int, ...]
    cached_lens: tuple[int, ...] = ()
    plan: DecodePlan | None = None

    @property
    def is_decode(self) -> bool:
        return all(n == 1 for n in self.query_lens)

    @cached_property
    def prefill_positions(self) -> torch.Tensor:
        """(tokens,) int64, of the new tokens; a decode step takes them from seq_lens, which may change in place."""
        lengths = zip(self.cached_lens, self.query_lens, strict=True)
        return torch.cat([torch.arange(cached, cached + n) for cached, n in lengths]).to(self.slots.device)


def begin_step(
    cache: PagedCache, requests: Sequence[int], num_tokens: int | Sequence[int] = 1, *, num_heads: int | None = None
) -> CacheStep:
    """Make room for new tokens of requests, for a pass through all layers.

    Args:
        cache: to be written by the layers.
        requests: of the cache, each at most once.
        num_tokens: new tokens of each, at least 1, or one number for all.
        num_heads: query heads; given, a decode step's work is planned once for all its layers.

    Returns:
        A CacheStep.

    Raises:
        ValueError: a request brings no token, or the cache refuses the requests.
        mla.cache.OutOfPages: too few pages are free.
    """
    query_lens = (num_tokens,) * len(requests) if isinstance(num_tokens, int) else tuple(num_tokens)
    if any(n < 1 for n in query_lens):
        raise ValueError(f"num_tokens: expected at least 1 new token of every request, got {query_lens}")
    cached_lens = tuple(cache.length(request) for request in requests)
    slots = cache.reserve(requests, query_lens)
    block_table, seq_lens = cache.tables(requests)
    step = CacheStep(cache, slots, block_table, seq_lens, query_lens, cached_lens)
    if num_heads is None or not step.is_decode:
        return step
    return replace(step, plan=plan_decode(seq_lens, num_heads))
