"""What a patched model's attention modules call: absorbed decode on the latent cache, and prefill beside it."""

from collections.abc import Callable

import torch
from transformers.masking_utils import causal_mask_function

from mla.decode import mla_decode
from mla.hf.cache import NewRows
from mla.hf.store import Step, padding_last
from mla.prefill import attend_prompt
from mla.reference import absorb_query, project_values
from mla.weights import split_kv_b_proj

# The name in transformers' registries of attention and mask functions. It must not contain "flash", which the library
# takes for a kind of its own.
NAME = "mla_latent"


def latent_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: NewRows | torch.Tensor,
    value: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    latent_step: Step | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attend over latents: transformers' attention interface, for modules whose `expand_kv` leaves latents as they are.

    Args:
        module: the attention module; its kv_b_proj and widths are used.
        query: (batch_size, num_heads, q_len, qk_head_dim), the last part rotated.
        key: new rows of a latent cache; without a cache the latents (batch_size, 1, q_len, kv_lora_rank).
        value: None; without a cache the rotated keys (batch_size, 1, q_len, qk_rope_head_dim).
        attention_mask: (batch_size, q_len) bool, False where a token is padding, or None: from `latent_mask`.
        scaling: the module's, YaRN's mscale included.
        dropout: probability in training.
        latent_step: of this forward pass; None without a cache.

    Returns:
        (batch_size, q_len, num_heads, v_head_dim), and None for the probabilities, which are never stored.
    """
    if not isinstance(key, NewRows):
        order = None if attention_mask is None else padding_last(attention_mask)
        rows = torch.cat((key, value), dim=-1)[:, 0]
        return _prefill(module, query, rows, order, scaling, dropout), None
    layer = key.layer
    rows = torch.cat((key.latent, key.k_pe), dim=-1)[:, 0]
    step = latent_step
    if query.shape[2] == 1:
        layer.write(rows, step)
        return _decode(module, query, layer.pages, step, scaling), None
    layer.write(_gathered(rows, step.order, dim=1), step)
    if step.cached_lens is None:
        return _prefill(module, query, rows, step.order, scaling, dropout), None
    return _prefill_chunk(module, query, layer.rows, step, scaling), None


def latent_mask(
    batch_size: int,
    q_length: int,
    *args,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """Which new tokens are no padding, (batch_size, q_length) bool or None: transformers' mask interface.

    No mask over cached tokens is needed: the latent cache does not hold padding.

    Raises:
        ValueError: several sequences are packed into one row of the batch, or the model asks for a mask of its own.
    """
    if mask_function is not causal_mask_function:
        raise ValueError(
            "attention mask: expected plain causal attention, got several sequences packed into one row of the batch, "
            "or a mask of the model's own; give each sequence a row, and padding by attention_mask"
        )
    # contiguous: compiled code would be specialised on the stride, which grows with every token
    return None if attention_mask is None else attention_mask[:, -q_length:].contiguous()


def _decode(
    module: torch.nn.Module, query: torch.Tensor, pages: torch.Tensor, step: Step, scaling: float
) -> torch.Tensor:
    """One token a request, absorbed: keys and values are never rebuilt."""
    w_uk, w_uv = split_kv_b_proj(module.kv_b_proj.weight, module.mla_config)
    q_nope, q_pe = query[:, :, 0].split((module.qk_nope_head_dim, module.qk_rope_head_dim), dim=-1)
    out, _ = mla_decode(
        absorb_query(q_nope, q_pe, w_uk),
        pages,
        step.block_table,
        step.seq_lens,
        softmax_scale=scaling,
        kv_lora_rank=module.kv_lora_rank,
        plan=step.plan,
    )
    return project_values(out, w_uv)[:, None]


def _prefill(module, query, rows, order, scaling, dropout=0.0) -> torch.Tensor:
    """A prompt that nothing was cached before: padding goes last, where causality alone keeps it from being seen."""
    out = _attend(module, _gathered(query, order, dim=2), _gathered(rows, order, dim=1), scaling, dropout)
    return _scattered(out, order)


def _prefill_chunk(module, query, cached_rows, step: Step, scaling) -> torch.Tensor:
    """New tokens of requests that have cached ones; requests of different lengths one at a time."""
    q_len, lens = query.shape[2], step.cached_lens
    query = _gathered(query, step.order, dim=2)
    if len(set(lens)) == 1:
        out = _attend(module, query, cached_rows[:, : lens[0] + q_len], scaling)
    else:
        out = torch.cat(
            [
                _attend(module, query[b : b + 1], cached_rows[b : b + 1, : n + q_len], scaling)
                for b, n in enumerate(lens)
            ]
        )
    return _scattered(out, step.order)


def _attend(module, query, rows, scaling, dropout=0.0) -> torch.Tensor:
    """Causal attention of the last q_len tokens over all rows, with keys and values rebuilt from them.

    No (q_len, rows) matrix is held on a GPU; the rebuilt keys and values grow with the number of rows, for one layer at
    a time.

    Args:
        query: (batch_size, num_heads, q_len, qk_head_dim).
        rows: (batch_size, tokens, cache_dim); the new tokens are the last q_len.

    Returns:
        (batch_size, q_len, num_heads, v_head_dim).
    """
    latent, k_pe = rows.split((module.kv_lora_rank, module.qk_rope_head_dim), dim=-1)
    widths = (module.qk_nope_head_dim, module.v_head_dim)
    k_nope, values = module.kv_b_proj(latent).unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)
    return attend_prompt(query.transpose(1, 2), k_nope, k_pe, values, softmax_scale=scaling, dropout=dropout)


def _gathered(x: torch.Tensor, order: torch.Tensor | None, dim: int) -> torch.Tensor:
    """x with its tokens, dimension `dim`, in `order` (batch_size, q_len)."""
    if order is None:
        return x
    shape = [1] * x.ndim
    shape[0], shape[dim] = order.shape
    return x.gather(dim, order.view(shape).expand_as(x))


def _scattered(out: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """The inverse of `_gathered`, for (batch_size, q_len, num_heads, v_head_dim)."""
    if order is None:
        return out
    return torch.empty_like(out).scatter(1, order[:, :, None, None].expand_as(out), out)
