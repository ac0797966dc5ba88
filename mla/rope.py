"""Rotary position embedding of the decoupled part, in both channel orders, with YaRN's frequencies.

DeepSeek's checkpoints pair neighbouring channels (0, 1), (2, 3), ...; most other code pairs channel i with
i + dim / 2. Scores agree as long as query and key use the same order, so a cache must never mix the two.
"""

import math
from functools import lru_cache
from typing import Literal

import torch

from mla.config import MLAConfig, yarn_mscale

Order = Literal["interleaved", "halves"]


def rope_frequencies(config: MLAConfig, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Angle per position of each channel pair, YaRN's interpolation included.

    Returns:
        (qk_rope_head_dim / 2,) radians a token, in `dtype`.

    Reference: RoFormer, arXiv 2104.09864, section 3.4.2; YaRN, arXiv 2309.00071, sections 3.2 and 3.3.
    """
    dim = config.qk_rope_head_dim
    frequencies = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if config.yarn_factor > 1.0:
        low, high = (
            _pair_with_rotations(config, rotations) for rotations in (config.yarn_beta_fast, config.yarn_beta_slow)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        # beta_fast == beta_slow would leave a ramp of width 0
        ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
        interpolate = ramp.clamp(0.0, 1.0)
        frequencies = frequencies * (1.0 - interpolate) + frequencies / config.yarn_factor * interpolate
    return frequencies.to(dtype)


@lru_cache
def _frequencies_on(device: torch.device, config: MLAConfig) -> torch.Tensor:
    """Kept, since a copy from the host waits for the device and cannot be captured in a CUDA graph."""
    return rope_frequencies(config).to(device)


def _pair_with_rotations(config: MLAConfig, rotations: float) -> float:
    """The (fractional) index of the channel pair that turns `rotations` times over the original context."""
    turns = config.original_max_seq_len / (rotations * 2 * math.pi)
    return config.qk_rope_head_dim * math.log(turns) / (2 * math.log(config.rope_theta))


def apply_rope(x: torch.Tensor, positions: torch.Tensor, config: MLAConfig, order: Order) -> torch.Tensor:
    """Rotate the channel pairs of `x` by their position.

    Args:
        x: (..., tokens, qk_rope_head_dim), any float dtype; computed in at least fp32.
        positions: (tokens,) integer positions, or (..., tokens) broadcastable to x without its last dimension.
        config: widths, base and YaRN parameters.
        order: "interleaved" pairs channels 2i and 2i + 1, "halves" pairs i and i + dim / 2.

    Returns:
        x's shape and dtype.

    Raises:
        ValueError: wrong width or unknown order.
    """
    dim = config.qk_rope_head_dim
    if x.shape[-1] != dim:
        raise ValueError(f"x: expected a last dimension of {dim} (qk_rope_head_dim), got shape {tuple(x.shape)}")
    if order not in ("interleaved", "halves"):
        raise ValueError(f"order: expected 'interleaved' or 'halves', got {order!r}")
    working = torch.promote_types(x.dtype, torch.float32)
    frequencies = _frequencies_on(x.device, config)
    angles = positions.to(x.device)[..., None].double() * frequencies  # (..., tokens, dim / 2)
    magnitude = yarn_mscale(config.yarn_factor, config.yarn_mscale) / yarn_mscale(
        config.yarn_factor, config.yarn_mscale_all_dim
    )
    cos, sin = (angles.cos() * magnitude).to(working), (angles.sin() * magnitude).to(working)
    if order == "interleaved":
        a, b = x[..., 0::2].to(working), x[..., 1::2].to(working)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)
    a, b = x[..., : dim // 2].to(working), x[..., dim // 2 :].to(working)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def reorder_rope(x: torch.Tensor, source: Order, target: Order) -> torch.Tensor:
    """Permute rotated channels from one order to the other, so that the same pairs meet.

    Args:
        x: (..., qk_rope_head_dim).
    """
    if source == target:
        return x
    if (source, target) == ("interleaved", "halves"):
        return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    a, b = x.chunk(2, dim=-1)
    return torch.stack((a, b), dim=-1).flatten(-2)
