"""Weights of MLA layers, in the shapes that absorption takes."""

import torch

from mla.config import MLAConfig


def split_kv_b_proj(weight: torch.Tensor, config: MLAConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut kv_b_proj into the up-projections of keys and values, without a copy.

    Its rows go head by head, and within a head first the keys' qk_nope_head_dim rows, then the values' v_head_dim.

    Args:
        weight: (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank), any float dtype.
        config: the layer's dimensions.

    Returns:
        w_uk (num_heads, qk_nope_head_dim, kv_lora_rank) and w_uv (num_heads, v_head_dim, kv_lora_rank), views.

    Raises:
        ValueError: the weight has another shape.
    """
    per_head = config.qk_nope_head_dim + config.v_head_dim
    expected = (config.num_heads * per_head, config.kv_lora_rank)
    if tuple(weight.shape) != expected:
        raise ValueError(f"kv_b_proj: expected shape {expected}, got {tuple(weight.shape)}; is it of another config?")
    heads = weight.view(config.num_heads, per_head, config.kv_lora_rank)
    return heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
