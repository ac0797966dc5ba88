"""`PagedCache`: the pool of pages that `mla_decode` reads, and which request owns which page."""

from collections.abc import Sequence

import numpy as np
import torch

from mla.pages import OutOfPages, PageLedger

__all__ = ["OutOfPages", "PagedCache"]


class PagedCache(PageLedger):
    """A paged latent cache: one pool a layer, under page ids that all layers share.

    A request holds `ceil(length / page_size)` pages. Requests share pages after `fork`; a shared page is never
    written: whoever appends to a partly filled one first gets a copy of it.

    Who owns what is kept on the host, in plain Python, and goes to the device from pinned memory, in stream order:
    nothing waits for the device, and a cache belongs to one stream. In a CUDA graph, capture `write` and `mla_decode`
    with tensors that `reserve(..., out=...)` and `update_tables` fill before each replay.

    Args:
        num_pages: pages of the pool.
        page_size: tokens a page; `mla_decode` is fastest for multiples of 64.
        cache_dim: elements a row, `MLAConfig.cache_dim`.
        num_layers: layers that cache a row for each token.
        dtype: of the rows.
        device: of the pool.
        poison: for tests: fill pages with NaN at the start and when they are freed, so that a read of a row that no
            request holds shows.

    Attributes:
        kv_cache: (num_layers, num_pages, page_size, cache_dim); `kv_cache[layer]` is what `mla_decode` takes. Rows that
            no request holds may hold anything.
        spare_slot: slot of a row behind the last page, which no request reads: where padding may be written.

    Raises:
        ValueError: a size is not positive.
        TypeError: dtype is not a floating-point one.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 64,
        cache_dim: int = 576,
        *,
        num_layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        poison: bool = False,
    ):
        super().__init__(num_pages, page_size)
        if cache_dim < 1 or num_layers < 1:
            raise ValueError(f"cache_dim, num_layers: expected positive numbers, got {cache_dim} and {num_layers}")
        if not dtype.is_floating_point:
            raise TypeError(f"dtype: expected a floating-point one, got {dtype}")
        self.spare_slot = num_pages * page_size
        # an inference tensor could not be written outside inference mode
        with torch.inference_mode(False):
            self._rows = torch.empty(num_layers, num_pages * page_size + 1, cache_dim, dtype=dtype, device=device)
            self.kv_cache = self._rows[:, :-1].unflatten(1, (num_pages, page_size))
        self._poison = poison
        if poison:
            self._rows.fill_(torch.nan)

    def free(self, requests: Sequence[int]) -> None:
        """Remove requests; pages that no other request shares are free again.

        Raises:
            ValueError: one of them is not in the cache, or named twice; then none is removed.
        """
        freed = self._remove(requests)
        if self._poison and freed:
            self.kv_cache.index_fill_(1, self._on_device(freed), torch.nan)

    def reserve(
        self, requests: Sequence[int], num_tokens: int | Sequence[int] = 1, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Lengthen requests, and return the slots that the new rows are to be written to, in every layer.

        A partly filled last page that is shared is copied first, in all layers.

        Args:
            requests: each at most once.
            num_tokens: new tokens of each request, or one number for all.
            out: (num_slots,) int64, num_slots from the sum of num_tokens up; where to write, as a CUDA graph needs it.
                What is left over is set to `spare_slot`. Default: a new tensor.

        Returns:
            (tokens,) int64 on the pool's device, or out; rows of `kv_cache[layer].flatten(0, 1)`, request by request.

        Raises:
            OutOfPages: too few pages are free; nothing has changed.
            ValueError: a request is not in the cache or named twice, a number is negative or missing, or out is too
                small; nothing has changed.
            TypeError: out is not int64.
            RuntimeError: out is on another device.
        """
        counts = [num_tokens] * len(requests) if isinstance(num_tokens, int) else list(num_tokens)
        if out is not None:
            self._check("out", out, torch.int64, (sum(counts),))
        growth = self._lengthen(requests, counts)
        if growth.own:
            rows = self.kv_cache.index_select(1, self._on_device(growth.shared))
            self.kv_cache.index_copy_(1, self._on_device(growth.own), rows)
        if out is None:
            return self._on_device(growth.slots)
        padding = [self.spare_slot] * (len(out) - len(growth.slots))
        return out.copy_(self._on_host(growth.slots + padding), non_blocking=True)

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows of one layer to the slots that `reserve` returned, in one launch.

        Args:
            layer: 0 to num_layers - 1.
            slots: (tokens,) int64.
            rows: (tokens, cache_dim), the pool's dtype; latent part first.

        Raises:
            ValueError: there is no such layer, or a shape does not fit.
            TypeError: slots is not int64, or rows is not of the pool's dtype.
            RuntimeError: devices differ, or rows requires a gradient.
        """
        num_layers, _, cache_dim = self._rows.shape
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer: expected 0 to {num_layers - 1}, got {layer}")
        self._check("slots", slots, torch.int64, (0,))
        self._check("rows", rows, self._rows.dtype, (0, 0))
        if rows.shape != (len(slots), cache_dim):
            raise ValueError(
                f"rows: expected {(len(slots), cache_dim)} for {len(slots)} slots, got {tuple(rows.shape)}"
            )
        if rows.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "rows: expected a tensor that needs no gradient, since decoding has no backward pass, got one with "
                "requires_grad; call it under torch.no_grad() or detach rows"
            )
        self._rows[layer].index_copy_(0, slots, rows)

    def tables(self, requests: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What `mla_decode` needs to read requests; one may be named more than once.

        Returns:
            block_table (batch_size, max_pages) int32, with 0 past a request's pages, and seq_lens (batch_size,) int32,
            on the pool's device.

        Raises:
            ValueError: a request is not in the cache.
        """
        table, lengths = self._host_tables(requests, len(requests))
        return table.to(self._rows.device, non_blocking=True), lengths.to(self._rows.device, non_blocking=True)

    def update_tables(self, requests: Sequence[int], block_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Write what `tables` returns into tensors that stay where they are, as a CUDA graph reads them.

        Rows past the requests get length 0, for which `mla_decode` gives 0 and -inf. What stood in the table for them
        and past a request's pages stays, and is not read.

        Args:
            requests: at most as many as the tensors have rows.
            block_table: (max_batch_size, max_pages) int32; written in place.
            seq_lens: (max_batch_size,) int32; written in place.

        Raises:
            ValueError: a request is not in the cache, or a tensor is too small; then neither is written.
            TypeError: a tensor is not int32.
            RuntimeError: a tensor is on another device.
        """
        self._check("seq_lens", seq_lens, torch.int32, (len(requests),))
        table, lengths = self._host_tables(requests, len(seq_lens))
        self._check("block_table", block_table, torch.int32, (len(seq_lens), table.shape[1]))
        block_table[: table.shape[0], : table.shape[1]].copy_(table, non_blocking=True)
        seq_lens.copy_(lengths, non_blocking=True)

    def _host_tables(self, requests: Sequence[int], num_lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(len(requests), max_pages) and (num_lengths,) int32 on the host; 0 where there is nothing."""
        found = self._look_up(requests)
        max_pages = max((len(request.pages) for request in found), default=0)
        table = torch.zeros(len(found), max(max_pages, 1), dtype=torch.int32, pin_memory=self._rows.is_cuda)
        lengths = torch.zeros(num_lengths, dtype=torch.int32, pin_memory=self._rows.is_cuda)
        table_rows, length_rows = table.numpy(), lengths.numpy()
        for i, request in enumerate(found):
            table_rows[i, : len(request.pages)] = np.frombuffer(request.pages, dtype=np.int32)
            length_rows[i] = request.length
        return table, lengths

    def _on_host(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, pin_memory=self._rows.is_cuda)

    def _on_device(self, values: list[int]) -> torch.Tensor:
        return self._on_host(values).to(self._rows.device, non_blocking=True)

    def _check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, at_least: tuple[int, ...]) -> None:
        if tensor.ndim != len(at_least) or any(n < m for n, m in zip(tensor.shape, at_least, strict=True)):
            raise ValueError(f"{name}: expected a shape of at least {at_least}, got {tuple(tensor.shape)}")
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}; convert it")
        if tensor.device != self._rows.device:
            raise RuntimeError(f"{name}: expected the pool's device {self._rows.device}, got {tensor.device}")
