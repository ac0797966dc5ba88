"""Attention of a prefill: causal, many tokens a request, keys and values of every head at hand.

`mla_prefill` is this package's fused kernel, `sdpa_prefill` torch's scaled_dot_product_attention in the same shapes.
`attend_prompt` takes what is faster, by the rule in `prompt_backends`; on a GPU nothing that it takes holds a matrix of
queries by keys.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from mla.checks import check_prefill
from mla.kernels.prefill import PrefillConfig, launch_prefill

SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# Whole prompts of this many scores (heads of all requests x queries x keys) or more go to cuDNN: 8K tokens with 128
# heads, 24K with 16. It is ahead of the fused kernel from 8K tokens on, by 12 to 29 %, but torch has it make a plan for
# each new length, which takes what DeepSeek-V3's 61 layers gain at about this size (figures/prefill.md).
CUDNN_FROM = 2**33


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
            refuses; on a CPU the one that is left then makes a square matrix. `cudnn` and `efficient` need none.

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
        backends: names in `SDPA_BACKENDS`; torch takes the one that it prefers among those that take the call. Where
            it is "cudnn" and q_len < kv_len, torch writes the mask to memory.
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


def prompt_backends(
    q_len: int,
    kv_len: int,
    *,
    heads: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    needs_torch: bool = False,
) -> tuple[str, ...]:
    """What attends a prompt: the rule of `attend_prompt`, from measurements on an H200 (`data/prefill_h200_*.csv`).

    There, at DeepSeek's widths in bf16, the fused kernel is the fastest for prompts up to 2K and for chunks behind
    cached tokens, where torch has a mask to make and to read; cuDNN for large whole prompts (`CUDNN_FROM`). fp16 is
    taken to be like bf16. Other GPUs, widths and dtypes are not measured: torch attends.

    Args:
        q_len, kv_len: query tokens and keys of a request.
        heads: of all requests together.
        widths: of a head's query and key, and of its value.
        dtype: of all inputs.
        capability: of the GPU, (9, 0) for Hopper; None on a CPU.
        needs_torch: a gradient or dropout is asked for, which the fused kernel does not have.

    Returns:
        "fused" or names in `SDPA_BACKENDS`. After "cudnn" comes what attends where cuDNN refuses; of "flash" and
        "efficient", or on a CPU "math", torch takes the first that can.
    """
    if capability is None:
        return ("flash", "math")
    is_16_bit = dtype in (torch.bfloat16, torch.float16)
    if needs_torch or capability != (9, 0) or widths != (192, 128) or not is_16_bit:
        # without flash, which takes 16 bits only, no padding has to be made for it
        return ("flash", "efficient") if is_16_bit else ("efficient",)
    return ("cudnn", "fused") if q_len == kv_len and heads * q_len * kv_len >= CUDNN_FROM else ("fused",)


def attend_prompt(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal attention of a prompt, by what is faster (`prompt_backends`); the last query sees the last key.

    Args:
        q, k_nope, k_pe, v, softmax_scale: as `mla_prefill` takes them.
        dropout: probability, in training.

    Returns:
        (batch_size, q_len, num_heads, v_head_dim). It has a gradient where one is asked for: torch attends then, as it
        does where there is dropout.

    Raises:
        RuntimeError: torch attends and has no backend for the inputs, such as fp64 on a GPU.
    """
    backends = prompt_backends(
        q.shape[1],
        k_nope.shape[1],
        heads=q.shape[0] * q.shape[2],
        widths=(q.shape[-1], v.shape[-1]),
        dtype=q.dtype,
        capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
        needs_torch=dropout > 0 or (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_nope, k_pe, v))),
    )
    if backends[0] == "cudnn":
        backends = backends[:1] if _takes_cudnn(q, v) else backends[1:]
    if backends == ("fused",):
        return mla_prefill(q, k_nope, k_pe, v, softmax_scale=softmax_scale)[0]
    inputs = assemble(q, k_nope, k_pe, v, for_flash="flash" in backends)
    return sdpa_prefill(*inputs, softmax_scale=softmax_scale, backends=backends, dropout=dropout)[..., : v.shape[-1]]


def _takes_cudnn(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether cuDNN is there, takes a whole prompt like this one, and is not switched off (torch.backends.cuda)."""
    q, v = q.transpose(1, 2), v.transpose(1, 2)
    # the keys are not put together yet; they will have the queries' shape
    return can_use_cudnn_attention(SDPAParams(q, q, v, None, 0.0, True, False))


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
