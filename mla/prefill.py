"""Attention of a prefill: causal, many tokens a request, keys and values of every head at hand.

`mla_prefill` is this package's fused kernel, `sdpa_prefill` torch's scaled_dot_product_attention in the same shapes.
Neither holds a matrix of queries by keys. `attend_prompt` takes what is faster.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mla.checks import check_prefill
from mla.kernels.prefill import PrefillConfig, launch_prefill

SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# What computes a prompt on a GPU: ("fused",) for this package's kernel, or backends of
# torch's. Not measured yet: `triton-mla-bench prefill` compares them.
PROMPT_BACKENDS: tuple[str, ...] = ("flash", "efficient")
_CPU_BACKENDS = ("flash", "math")


def mla_prefill(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    is_causal: bool = True,
    cached_lens: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: PrefillConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with the fused kernel: `softmax(softmax_scale * q [k_nope, k_pe]ᵀ) v`, forward only.

    Query i of request b sees key j where j < kv_lens[b] and, if causal, j <= cached_lens[b] + i. Last dimensions are
    contiguous, other strides free: keys and values may be views of what kv_b_proj returns.

    Args:
        q: (batch_size, q_len, num_heads, qk_nope_head_dim + qk_rope_head_dim) bf16, fp16 or fp32, the last part
            rotated.
        k_nope: (batch_size, kv_len, num_heads, qk_nope_head_dim), q's dtype.
        k_pe: (batch_size, kv_len, qk_rope_head_dim), q's dtype; rotated, shared by the heads.
        v: (batch_size, kv_len, num_heads, v_head_dim), q's dtype.
        softmax_scale: factor on the scores: `MLAConfig.softmax_scale`.
        is_causal: whether a query sees no later keys.
        cached_lens: (batch_size,) int32; keys before those of the queries themselves. Default: kv_len - q_len, so that
            the last query sees the last key.
        kv_lens: (batch_size,) int32, at most kv_len; keys from there on are not read. Default: kv_len. Neither kind of
            length is read on the host.
        out_dtype: of the output; default q's.
        config: tile shape and launch parameters; chosen for the device if None.

    Returns:
        out (batch_size, q_len, num_heads, v_head_dim), and lse (batch_size, q_len, num_heads) fp32, the natural
        logarithm of the sum of exponentials. A query that sees no key gives 0 and -inf.

    Raises:
        ValueError: a shape or stride is not supported.
        TypeError: a dtype is not supported.
        RuntimeError: devices differ or are not supported, or an input requires a gradient.

    Reference: DeepSeek-V2, arXiv 2405.04434, section 2.1; FlashAttention-2, arXiv 2307.08691.
    """
    check_prefill(q, k_nope, k_pe, v, cached_lens, kv_lens)
    out = q.new_empty(*q.shape[:3], v.shape[-1], dtype=out_dtype or q.dtype)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if q.numel() > 0:
        launch_prefill(
            q, k_nope, k_pe, v, cached_lens, kv_lens, out, lse,
            softmax_scale=softmax_scale, is_causal=is_causal, config=config,
        )  # fmt: skip
    return out, lse


def assemble(
    q: torch.Tensor, k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor, *, for_flash: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys in one piece, as torch's attention takes them; arguments as `mla_prefill` has them.

    Args:
        for_flash: append zeros until queries, keys and values are of one width. Without them torch's flash backend
            refuses; on a CPU the one that is left then makes a square matrix.

    Returns:
        q, k, v; of the output the first v_head_dim channels count.
    """
    k = torch.cat((k_nope, k_pe[:, :, None].expand(*k_nope.shape[:3], -1)), dim=-1)
    if not for_flash or k.shape[-1] == v.shape[-1]:
        return q, k, v
    width = max(k.shape[-1], v.shape[-1])
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    return q, k, v


def sdpa_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    backends: Sequence[str],
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal attention by torch's scaled_dot_product_attention; the last query sees the last key.

    Args:
        q: (batch_size, q_len, num_heads, width), from `assemble`.
        k, v: (batch_size, kv_len, num_heads, width).
        softmax_scale: factor on the scores.
        backends: names in `SDPA_BACKENDS`; torch takes the one that it prefers among those that take the call.
        dropout: probability.

    Returns:
        (batch_size, q_len, num_heads, v's width).

    Raises:
        RuntimeError: none of the backends takes the call.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # imports triton, which mla.kernels has to come before
    from torch.nn.attention.bias import causal_lower_right

    q_len, kv_len = q.shape[2], k.shape[2]
    mask = dict(is_causal=True) if q_len == kv_len else dict(attn_mask=causal_lower_right(q_len, kv_len))
    with sdpa_kernel([SDPA_BACKENDS[name] for name in backends]):
        out = F.scaled_dot_product_attention(q, k, v, **mask, dropout_p=dropout, scale=softmax_scale)
    return out.transpose(1, 2)


def attend_prompt(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal attention of a prompt, by what is faster (`PROMPT_BACKENDS`); the last query sees the last key.

    Args:
        q, k_nope, k_pe, v, softmax_scale: as `mla_prefill` takes them.
        dropout: probability, in training.

    Returns:
        (batch_size, q_len, num_heads, v_head_dim). It has a gradient where one is asked for: torch attends then, as it
        does where there is dropout.
    """
    needs_torch = dropout > 0 or (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_nope, k_pe, v)))
    backends = PROMPT_BACKENDS if q.is_cuda else _CPU_BACKENDS
    if backends == ("fused",):
        if not needs_torch:
            return mla_prefill(q, k_nope, k_pe, v, softmax_scale=softmax_scale)[0]
        backends = ("flash", "efficient")
    inputs = assemble(q, k_nope, k_pe, v, for_flash="flash" in backends)
    return sdpa_prefill(*inputs, softmax_scale=softmax_scale, backends=backends, dropout=dropout)[..., : v.shape[-1]]


def merge_attention(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two sets of keys: `out = Σ exp(lse_i - lse) out_i`, `lse = ln Σ exp(lse_i)`.

    Args:
        out, other_out: (..., v_head_dim) fp32.
        lse, other_lse: (...) fp32; -inf marks a set without keys, whose output is 0. Not both of them may be.
    """
    total = torch.logaddexp(lse, other_lse)
    weights = (torch.exp(x - total)[..., None] for x in (lse, other_lse))
    return torch.add(*(w * o for w, o in zip(weights, (out, other_out), strict=True))), total
