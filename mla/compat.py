"""FlashMLA's conventions on top of `mla_decode`, for code that ran its dense decode on Hopper.

    from mla.compat import flash_mla_with_kvcache, get_mla_metadata

Argument names, order, defaults and layouts are those of FlashMLA's dense decode, from its release of April 2025 to its
last one for Hopper; both ways to make metadata are taken. What belongs to its sparse and FP8 paths is refused.

Reference: https://github.com/deepseek-ai/FlashMLA, flash_mla/flash_mla_interface.py at commits c2067be and 48c6dc4.
"""

import math
import warnings
from functools import lru_cache
from typing import Any

import torch

from mla.decode import mla_decode, plan_decode
from mla.kernels.launch import device_guard


class MLAMetadata:
    """What `get_mla_metadata` returns: the work plan of a decode step, made by its first call, shared by the others.

    To be passed on only; what it holds is no interface.
    """

    def __init__(self):
        self._key: tuple | None = None
        self._step: tuple[torch.Tensor, Any] | None = None
        # keeps the address in the key from being given to another tensor
        self._cache_seqlens: torch.Tensor | None = None

    def _plan(self, cache_seqlens: torch.Tensor, q_len: int, num_heads: int, is_masked: bool):
        """The lengths of the rows that `mla_decode` is called with, and their plan."""
        if torch.compiler.is_compiling():
            # the operator makes its own plan
            return _row_lens(cache_seqlens, q_len, is_masked), None
        key = (
            cache_seqlens.data_ptr(), cache_seqlens.shape, cache_seqlens.stride(), cache_seqlens.dtype,
            cache_seqlens.device, _version(cache_seqlens), _where(cache_seqlens.device), q_len, num_heads, is_masked,
        )  # fmt: skip
        if key != self._key:
            row_lens = _row_lens(cache_seqlens, q_len, is_masked)
            self._step = row_lens, plan_decode(row_lens, num_heads if is_masked else q_len * num_heads)
            self._key, self._cache_seqlens = key, cache_seqlens
        return self._step


def _row_lens(cache_seqlens: torch.Tensor, q_len: int, is_masked: bool) -> torch.Tensor:
    """(batch_size,), or with a mask (batch_size * q_len,): the tokens that each query token sees, its own last."""
    if not is_masked:
        return cache_seqlens
    later = torch.arange(q_len - 1, -1, -1, dtype=cache_seqlens.dtype, device=cache_seqlens.device)
    return (cache_seqlens[:, None] - later).clamp_(min=0).flatten()


def _version(tensor: torch.Tensor) -> object:
    """A value that an in-place change by torch changes; never the same twice for a tensor that does not keep one."""
    return object() if tensor.is_inference() else tensor._version


def _where(device: torch.device) -> tuple[int, bool] | None:
    """A plan serves one stream. Made outside a CUDA graph, it would not follow the graph's lengths."""
    if device.type != "cuda":
        return None
    with device_guard(device):
        return torch.cuda.current_stream().cuda_stream, torch.cuda.is_current_stream_capturing()


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_heads_per_head_k: int | None = None,
    num_heads_k: int = 1,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    num_q_tokens_per_head_k: int | None = None,
) -> tuple[MLAMetadata, None]:
    """Metadata of a decode step, for all its layers: called without arguments, or with those of 2025.

    The plan is made by the first call that is given the metadata, from the lengths as they are then on the device, and
    made anew where a later call differs: in lengths that torch changed in place, in their tensor, the numbers of heads
    or query tokens, `causal`, the stream, or in being captured in a CUDA graph, where the plan is captured too and
    follows the lengths at every replay. So metadata that outlives its step costs a plan, not a wrong result.

    Two changes are not seen, and need new metadata as they do in FlashMLA: lengths written without torch's knowledge
    (by a kernel through a raw pointer, or by the replay of a graph) between eager calls, and a second capture with
    metadata whose last call was in another capture. Lengths that were made under `torch.inference_mode()` have no
    count of their changes: their plan is made at every call.

    Args:
        cache_seqlens, num_heads_per_head_k, num_heads_q, num_q_tokens_per_head_k: taken for the sake of older code,
            and not needed, since each call brings its own.
        num_heads_k: 1.
        is_fp8_kvcache: False.
        topk: None.

    Returns:
        The metadata, and None for what was num_splits.

    Raises:
        ValueError: num_heads_k, is_fp8_kvcache or topk asks for what is not done here.
    """
    if num_heads_k != 1:
        raise ValueError(
            f"num_heads_k: expected 1, since the heads of MLA share one cached row a token, got {num_heads_k}"
        )
    _refuse({"is_fp8_kvcache": is_fp8_kvcache or None, "topk": topk})
    return MLAMetadata(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: MLAMetadata,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: None = None,
    attn_sink: None = None,
    extra_k_cache: None = None,
    extra_indices_in_kvcache: None = None,
    topk_length: None = None,
    extra_topk_length: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashMLA's dense decode, computed by `mla_decode`: q_len query tokens a request, the last at its end.

    The scale defaults to FlashMLA's `head_dim ** -0.5`, 576 ** -0.5 for DeepSeek, with a warning once a process: it is
    not the model's, which is `MLAConfig.softmax_scale`.

    Without a mask the tokens of a request are computed as q_len * num_heads heads, which read its cache once. With
    `causal` and more than one token, each is computed as a request of its own, which reads it q_len times.

    Args:
        q: (batch_size, q_len, num_heads, head_dim), bf16, fp16 or fp32.
        k_cache: (num_pages, page_size, 1, head_dim), q's dtype; any page_size, where FlashMLA takes 64.
        block_table: (batch_size, max_pages) int32.
        cache_seqlens: (batch_size,) int32; cached tokens, those of q included.
        head_dim_v: kv_lora_rank, 512 for DeepSeek.
        tile_scheduler_metadata: from `mla.compat.get_mla_metadata`.
        num_splits: None, as it came with the metadata.
        softmax_scale: factor on the scores.
        causal: whether query token i sees only the first `cache_seqlens - (q_len - 1 - i)` tokens.
        is_fp8_kvcache: False.
        indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length: None.

    Returns:
        out (batch_size, q_len, num_heads, head_dim_v) in q's dtype, and lse (batch_size, num_heads, q_len) fp32,
        natural logarithm. A query token that sees no cached token gives 0 and +inf, where `mla_decode` gives -inf.

    Raises:
        ValueError, TypeError, RuntimeError: as `mla_decode`, whose messages call k_cache and cache_seqlens kv_cache and
            seq_lens.
        ValueError: an argument asks for what is not done here, or its shape does not fit.
        TypeError: tile_scheduler_metadata or num_splits is FlashMLA's own.
    """
    _refuse(
        {
            "is_fp8_kvcache": is_fp8_kvcache or None, "indices": indices, "attn_sink": attn_sink,
            "extra_k_cache": extra_k_cache, "extra_indices_in_kvcache": extra_indices_in_kvcache,
            "topk_length": topk_length, "extra_topk_length": extra_topk_length,
        }
    )  # fmt: skip
    if not isinstance(tile_scheduler_metadata, MLAMetadata) or num_splits is not None:
        raise TypeError(
            f"tile_scheduler_metadata, num_splits: expected what mla.compat.get_mla_metadata returned, MLAMetadata and "
            f"None, got {type(tile_scheduler_metadata).__name__} and {type(num_splits).__name__}"
        )
    _check_shapes(q, k_cache, block_table, cache_seqlens)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
        _warn_of_the_default_scale()
    batch_size, q_len, num_heads, _ = q.shape
    is_masked = causal and q_len > 1
    seq_lens, plan = tile_scheduler_metadata._plan(cache_seqlens, q_len, num_heads, is_masked)
    out, lse = mla_decode(
        q.flatten(0, 1) if is_masked else q.flatten(1, 2),
        k_cache[:, :, 0],
        block_table.repeat_interleave(q_len, 0) if is_masked else block_table,
        seq_lens,
        softmax_scale=softmax_scale,
        kv_lora_rank=head_dim_v,
        plan=plan,
    )
    # one launch: NaN stays, -inf becomes +inf
    lse = lse.nan_to_num(nan=math.nan, posinf=math.inf, neginf=math.inf)
    lse = lse.view(batch_size, q_len, num_heads).transpose(1, 2).contiguous()
    return out.view(batch_size, q_len, num_heads, head_dim_v), lse


def _refuse(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"{name}: expected its default, since only FlashMLA's dense decode on a 16- or 32-bit cache is done "
                f"here, got {type(value).__name__}; sparse attention, sinks and FP8 caches need FlashMLA"
            )


def _check_shapes(q, k_cache, block_table, cache_seqlens) -> None:
    if block_table is None or cache_seqlens is None:
        raise ValueError("block_table, cache_seqlens: expected tensors, since dense decode reads both, got None")
    if q.ndim != 4 or q.shape[1] < 1:
        raise ValueError(
            f"q: expected (batch_size, q_len, num_heads, head_dim) with q_len from 1 up, got {tuple(q.shape)}"
        )
    if k_cache.ndim != 4 or k_cache.shape[2] != 1:
        raise ValueError(
            f"k_cache: expected (num_pages, page_size, 1, head_dim), since the heads of MLA share one row a token, "
            f"got {tuple(k_cache.shape)}"
        )
    for name, tensor, ndim in (("block_table", block_table, 2), ("cache_seqlens", cache_seqlens, 1)):
        if tensor.ndim != ndim or len(tensor) != len(q):
            raise ValueError(
                f"{name}: expected {ndim} dimensions and {len(q)} requests, as many as q has, got {tuple(tensor.shape)}"
            )


@lru_cache
def _warn_of_the_default_scale() -> None:
    warnings.warn(
        "flash_mla_with_kvcache: softmax_scale was not given, so FlashMLA's default is taken, 576 ** -0.5 for q of 576 "
        "elements a head; the model's is another, (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 (times mscale squared "
        "with YaRN): pass MLAConfig.softmax_scale",
        UserWarning,
        stacklevel=3,
    )
