"""Where the rows of a latent cache go: what all its layers share.

Transformers counts columns of a batch, padding included; the store counts tokens. A padded batch is kept without its
padding, each request from slot 0 of pages of its own.
"""

from typing import Any, NamedTuple

import torch

from mla.decode import plan_decode

# the Hopper kernel is fastest for multiples of 64
PAGE_SIZE = 64


class Step(NamedTuple):
    """What the layers of one forward pass share; made by `LatentStore.begin`.

    Args:
        order: (batch_size, q_len) int64, this pass's tokens with those that are padding moved to the end; None where
            none is padding or where q_len is 1.
        requests: (batch_size, 1) int64, each request's own number.
        slots: (batch_size, q_len) int64, where their rows go. Rows of padding go past the request's length, where
            nothing reads them and the next token overwrites them.
        seq_lens: (batch_size,) int32, tokens a request, these included.
        block_table: (batch_size, max_pages) int32.
        capacity: slots that a request has.
        cached_lens: tokens of each request before this pass; None where nothing was cached, or where q_len is 1.
        plan: of the decode step, or None.
    """

    order: torch.Tensor | None
    requests: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    capacity: int
    cached_lens: list[int] | None
    plan: Any


class LatentStore:
    """Lengths, slots and pages that the latent layers of one cache share.

    Args:
        num_heads: query heads, for the decode plan.
        max_cache_len: columns that each request may take, padding included; memory is then allocated once, and its end
            is not looked out for, since that would wait for the device: writing past it is an index error. None:
            memory grows by a quarter where it is used up.
    """

    def __init__(self, num_heads: int, max_cache_len: int | None = None):
        self.num_heads = num_heads
        self.max_cache_len = max_cache_len
        self.capacity = 0 if max_cache_len is None else _pages(max_cache_len) * PAGE_SIZE
        self.seq_lens: torch.Tensor | None = None
        self.block_table: torch.Tensor | None = None
        # a tensor where memory is static, so that compiled code is not specialised on its value
        self.num_columns: int | torch.Tensor = 0

    @property
    def is_static(self) -> bool:
        return self.max_cache_len is not None

    def begin(self, batch_size: int, q_len: int, is_real: torch.Tensor | None, device: torch.device) -> Step:
        """Lay out where the next q_len columns go.

        Args:
            batch_size: requests.
            q_len: new tokens of each, padding included.
            is_real: (batch_size, q_len) bool, False where a token is padding; None if none is.
            device: of the model.

        Returns:
            The pass's Step. For q_len 1, nothing waits for the device; otherwise the cached lengths are read once.

        Raises:
            ValueError: the cache holds another batch size, or is full.
        """
        was_empty = self.seq_lens is None
        if was_empty:
            self._allocate(batch_size, device)
        if len(self.seq_lens) != batch_size:
            raise ValueError(
                f"latent cache: expected the batch size that it was filled with, {len(self.seq_lens)}, got "
                f"{batch_size}; start with a new cache"
            )
        self._reserve(q_len)
        requests = torch.arange(batch_size, device=device)[:, None]
        slots = self.seq_lens.long()[:, None] + torch.arange(q_len, device=device)
        is_chunk = q_len > 1 and not was_empty
        cached_lens = self.seq_lens.tolist() if is_chunk else None
        if is_chunk and not any(cached_lens):
            cached_lens = None
        order = None
        if is_real is None:
            self.seq_lens.add_(q_len)
        else:
            self.seq_lens.add_(is_real.sum(dim=1).int())
            if q_len > 1:
                order = padding_last(is_real)
        plan = None
        if q_len == 1 and not torch.compiler.is_compiling():
            plan = plan_decode(self.seq_lens, self.num_heads)
        return Step(order, requests, slots, self.seq_lens, self.block_table, self.capacity, cached_lens, plan)

    def _allocate(self, batch_size: int, device: torch.device) -> None:
        self.seq_lens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        if self.is_static:
            self.num_columns = torch.zeros((), dtype=torch.int64, device=device)
            self._lay_out_pages()
            if not torch.compiler.is_compiling():
                for tensor in (self.seq_lens, self.num_columns, self.block_table):
                    torch._dynamo.mark_static_address(tensor)

    def _reserve(self, q_len: int) -> None:
        """Have room for q_len more columns."""
        if self.is_static:
            if q_len > self.capacity:
                raise ValueError(
                    f"latent cache: expected at most max_cache_len = {self.max_cache_len} tokens, got {q_len}; make "
                    f"the cache longer"
                )
        elif (needed := self.num_columns + q_len) > self.capacity:
            self.capacity = _pages(needed + needed // 4) * PAGE_SIZE
            self._lay_out_pages()

    def count_columns(self, q_len: int) -> None:
        """Count the pass's columns; only once its layers run, since the model numbers positions after `begin`."""
        if self.is_static:
            self.num_columns.add_(q_len)
        else:
            self.num_columns += q_len

    def _lay_out_pages(self) -> None:
        batch_size, pages = len(self.seq_lens), self.capacity // PAGE_SIZE
        table = torch.arange(batch_size * pages, dtype=torch.int32, device=self.seq_lens.device)
        self.block_table = table.view(batch_size, pages)

    def select(self, indices: torch.Tensor) -> None:
        """Keep the requests `indices`, in that order, repeats allowed; the layers select their rows themselves."""
        if self.seq_lens is not None:
            self.seq_lens = self.seq_lens.index_select(0, indices.to(self.seq_lens.device))
            self._lay_out_pages()

    def reset(self) -> None:
        """Forget all tokens; memory stays."""
        if self.seq_lens is not None:
            self.seq_lens.zero_()
            self.num_columns = self.num_columns.zero_() if self.is_static else 0


def padding_last(is_real: torch.Tensor) -> torch.Tensor:
    """The order (batch_size, q_len) int64 that moves padding behind the tokens of each request."""
    return (~is_real).to(torch.uint8).argsort(dim=1, stable=True)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)
