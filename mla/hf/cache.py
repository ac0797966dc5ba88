"""The latent cache behind a transformers `Cache`: one row of kv_lora_rank + qk_rope_head_dim values a token and layer.

The `Cache` object stays the library's own (`DynamicCache`, or `StaticCache` where the length is given beforehand);
`adopt` puts a `LatentLayer` in place of each of its attention layers.
"""

from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin, StaticLayer

from mla.hf.store import PAGE_SIZE, LatentStore, Step


class NewRows(NamedTuple):
    """What `LatentLayer.update` hands to the attention instead of keys: rows to be stored, and where.

    Args:
        layer: the cache layer that they belong to.
        latent: (batch_size, 1, q_len, kv_lora_rank), normalised.
        k_pe: (batch_size, 1, q_len, qk_rope_head_dim), rotated.
    """

    layer: "LatentLayer"
    latent: torch.Tensor
    k_pe: torch.Tensor

    @property
    def shape(self):
        raise RuntimeError(
            "latent cache: expected a model that mla.patch_model has changed, got one that it has not, which cannot "
            "read latent rows; patch the model, or start it with a new cache"
        )


class LatentLayer(CacheLayerMixin):
    """One layer's rows, as a cache layer of transformers.

    Args:
        store: what the layers share.
        is_first: whether this layer is the one that tells the store of new columns and of changes of the batch.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self, store: LatentStore, is_first: bool):
        super().__init__()
        self.store = store
        self.is_first = is_first
        self.is_compileable = store.is_static
        self.rows: torch.Tensor | None = None  # (batch_size, capacity, cache_dim)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        width = key_states.shape[-1] + value_states.shape[-1]
        self.rows = key_states.new_zeros((key_states.shape[0], self.store.capacity, width), requires_grad=False)
        if self.store.is_static and not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.rows)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[NewRows, None]:
        """Hand latents (batch_size, 1, q_len, kv_lora_rank) and rotated keys on to the attention, which stores them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.is_first:
            self.store.count_columns(key_states.shape[2])
        return NewRows(self, key_states, value_states), None

    def write(self, rows: torch.Tensor, step: Step) -> None:
        """Store rows (batch_size, q_len, cache_dim), padding last, at the step's slots."""
        if self.rows.shape[1] < step.capacity:
            grown = self.rows.new_zeros((len(self.rows), step.capacity, self.rows.shape[2]))
            grown[:, : self.rows.shape[1]] = self.rows
            self.rows = grown
        self.rows.index_put_((step.requests, step.slots), rows.detach())

    @property
    def pages(self) -> torch.Tensor:
        """(num_pages, PAGE_SIZE, cache_dim), the rows as `mla_decode` takes them."""
        return self.rows.view(-1, PAGE_SIZE, self.rows.shape[-1])

    def get_seq_length(self) -> int | torch.Tensor:
        return self.store.num_columns

    def get_max_length(self) -> int:
        return self.store.max_cache_len if self.store.is_static else -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        columns = self.store.max_cache_len if self.store.is_static else self.store.num_columns + query_length
        return columns, 0

    def reset(self) -> None:
        if self.is_first:
            self.store.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            requests = torch.arange(len(self.rows), device=self.rows.device)
            self.batch_select_indices(requests.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_first:
            self.store.select(indices)
        if self.is_initialized:
            self.rows = self.rows.index_select(0, indices.to(self.rows.device))

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "latent cache: expected a generation that never takes tokens back, got a crop; assisted generation is "
            "not supported, unpatch the model for it (mla.unpatch_model)"
        )

    def offload(self) -> None:
        raise ValueError("latent cache: expected to stay on its device, got an offloaded cache; use another one")

    prefetch = offload


def latent_layers(cache: Cache) -> list[LatentLayer]:
    """The layers of a cache that hold latent rows, in order; none in one that no patched model has used."""
    return [layer for layer in cache.layers if isinstance(layer, LatentLayer)]


def adopt(cache: Cache, num_layers: int, num_heads: int) -> LatentStore:
    """Put latent layers in place of a cache's attention layers, once, and return what they share.

    Args:
        cache: a `DynamicCache` or `StaticCache` that nothing was stored in, or one that was adopted before.
        num_layers: of the model, for a cache that was made without a config.
        num_heads: query heads.

    Raises:
        ValueError: the cache was filled by an unpatched model, or is of a kind that is not supported.
    """
    if not isinstance(cache, Cache) or cache.offloading:
        raise ValueError(
            f"past_key_values: expected a DynamicCache or StaticCache without offloading, got {type(cache).__name__}"
            f"{' with offloading' if isinstance(cache, Cache) else ''}"
        )
    if found := latent_layers(cache):
        return found[0].store
    if not cache.layers:
        cache.layer_class_to_replicate = None
        cache.layers.extend(DynamicLayer() for _ in range(num_layers))
    attention = [i for i, layer in enumerate(cache.layers) if not isinstance(layer, LinearAttentionCacheLayerMixin)]
    for i in attention:
        layer = cache.layers[i]
        if type(layer) not in (DynamicLayer, StaticLayer):
            raise ValueError(
                f"past_key_values: expected layers of a DynamicCache or StaticCache, got {type(layer).__name__}"
            )
        if layer.is_initialized:
            raise ValueError(
                "past_key_values: expected an empty cache or one that a patched model filled, got one that an "
                "unpatched model filled; start with a new cache"
            )
    store = LatentStore(num_heads, getattr(cache.layers[attention[0]], "max_cache_len", None))
    for i in attention:
        cache.layers[i] = LatentLayer(store, is_first=i == attention[0])
    return store
