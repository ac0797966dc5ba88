"""Prefill: many query tokens a request against keys and values of every head, fused, forward only (Triton).

A program takes BLOCK_M query tokens of one head and walks the keys that they see, tile by tile, with the running
maximum and sum in registers: no score is ever written to memory, and memory grows with the tokens, not their square.
A head's query and key are qk_nope_head_dim + qk_rope_head_dim wide (128 + 64 for DeepSeek), its value v_head_dim; the
two parts of the key come in as they are made, the rotated one shared by all heads, so that no 192-wide key is put
together.

It is what the tutorial's `mla_fwd_kernel` sets out to be. That one
- normalises each tile by itself and adds the results, which is right for a single tile only: tiles have to share one
  maximum and one sum, and what was added under an older maximum has to be corrected;
- takes 0.125 for the scale, which is right for heads of 64, and knows no YaRN;
- lets every token see all later ones;
- gives keys past the end of the sequence a score of 0 instead of minus infinity, so that they take part in the sum;
- reads `Q.shape` of what is a pointer in a kernel, and stores and multiplies in fp16 whatever comes in;
- has one width for query, key and value, and no way to begin after tokens that are cached already.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mla.kernels.launch import device_facts, device_guard
from mla.kernels.tile import LOG2_E, normalise


@dataclass(frozen=True)
class PrefillConfig:
    """Tile shape and launch parameters.

    Args:
        block_m: query tokens a program takes, 16 or more.
        block_n: keys a tile holds, 16 or more.
        num_warps, num_stages: Triton's.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# The first that fits a device's shared memory is taken; `triton-mla-bench prefill` measures all that fit. On an H200
# (data/prefill_h200_2026-11-30.csv) the first is the fastest in 15 of 16 cases, and half a per cent behind the second
# in the other, 1K tokens and 128 heads; the second also fits where a block has no more than 104 KB. Keys in tiles of
# 128, two at a time, were never the fastest in an earlier file.
CONFIGS = (
    PrefillConfig(128, 64, num_warps=8, num_stages=3),
    PrefillConfig(64, 64, num_warps=4, num_stages=2),
)
# For 4-byte elements and where shared memory is shorter still.
SMALL_CONFIGS = (
    PrefillConfig(32, 32, num_warps=4, num_stages=2),
    PrefillConfig(16, 16, num_warps=4, num_stages=1),
)


@triton.jit
def _load_rows(base, tokens, end, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_FULL: tl.constexpr):
    """Rows `tokens`, zeros from `end` on and from WIDTH up to BLOCK, the next power of two: (len(tokens), BLOCK)."""
    channels = tl.arange(0, BLOCK)[None, :]
    rows = base + tokens[:, None].to(tl.int64) * stride + channels
    if WIDTH == BLOCK:
        if IS_FULL:
            return tl.load(rows)
        return tl.load(rows, mask=tokens[:, None] < end, other=0.0)
    return tl.load(rows, mask=(tokens[:, None] < end) & (channels < WIDTH), other=0.0)


@triton.jit
def _attend_keys(
    q_nope, q_rope, k_nope_ptr, k_rope_ptr, v_ptr, first, last, kv_len, positions, scale_log2,
    row_max, row_sum, acc, stride_k_token, stride_rope_token, stride_v_token,
    BLOCK_N: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr,
    NOPE_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    IS_CAUSAL: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    """Keys [first, last) met by the running softmax; IS_FULL where every query sees all of them."""
    for start in range(first, last, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        k_nope = _load_rows(k_nope_ptr, tokens, kv_len, stride_k_token, NOPE, NOPE_BLOCK, IS_FULL)
        k_rope = _load_rows(k_rope_ptr, tokens, kv_len, stride_rope_token, ROPE, ROPE_BLOCK, IS_FULL)
        scores = tl.dot(q_nope, tl.trans(k_nope), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee") * scale_log2  # (BLOCK_M, BLOCK_N)
        if not IS_FULL:
            is_seen = tokens[None, :] < kv_len
            if IS_CAUSAL:
                is_seen &= tokens[None, :] <= positions[:, None]
            scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # a query that has seen no key yet; minus infinity from itself would be NaN
        shift = new_max if IS_FULL else tl.where(new_max == float("-inf"), 0.0, new_max)
        correction = tl.exp2(row_max - shift)
        p = tl.exp2(scores - shift[:, None])
        row_sum = row_sum * correction + tl.sum(p, axis=1)
        v = _load_rows(v_ptr, tokens, kv_len, stride_v_token, V, V_BLOCK, IS_FULL)
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
        row_max = new_max
    return row_max, row_sum, acc


# not specialised on counts that change from call to call: a new value must not compile the kernel again
@triton.jit(do_not_specialize=["q_len", "max_kv_len"])
def _mla_prefill_kernel(
    q_ptr, k_nope_ptr, k_rope_ptr, v_ptr, cached_lens_ptr, kv_lens_ptr, out_ptr, lse_ptr,
    q_len, max_kv_len, num_heads, scale_log2,
    stride_q_batch, stride_q_token, stride_q_head, stride_k_batch, stride_k_token, stride_k_head,
    stride_rope_batch, stride_rope_token, stride_v_batch, stride_v_token, stride_v_head,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr,
    NOPE_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    # One grid axis, since the others end at 65,535. Neighbouring programs read the same keys, which the next then finds
    # in L2; a head's last queries, which see the most keys, come first, so that none of them is started late.
    blocks = tl.cdiv(q_len, BLOCK_M)
    program = tl.program_id(0)
    first_query = (blocks - 1 - program % blocks) * BLOCK_M
    head = (program // blocks % num_heads).to(tl.int64)
    b = (program // (blocks * num_heads)).to(tl.int64)
    queries = first_query + tl.arange(0, BLOCK_M)

    kv_len = max_kv_len
    if kv_lens_ptr is not None:
        kv_len = tl.minimum(tl.load(kv_lens_ptr + b), max_kv_len)
    cached = max_kv_len - q_len
    if cached_lens_ptr is not None:
        cached = tl.load(cached_lens_ptr + b)
    positions = cached + queries
    # keys that any of these queries sees, and those that all of them see
    last, last_full = kv_len, kv_len
    if IS_CAUSAL:
        last = tl.maximum(tl.minimum(kv_len, cached + tl.minimum(first_query + BLOCK_M, q_len)), 0)
        last_full = tl.maximum(tl.minimum(kv_len, cached + first_query + 1), 0)
    last_full = last_full // BLOCK_N * BLOCK_N

    q_ptr += b * stride_q_batch + head * stride_q_head
    q_nope = _load_rows(q_ptr, queries, q_len, stride_q_token, NOPE, NOPE_BLOCK, False)
    q_rope = _load_rows(q_ptr + NOPE, queries, q_len, stride_q_token, ROPE, ROPE_BLOCK, False)
    k_nope_ptr += b * stride_k_batch + head * stride_k_head
    k_rope_ptr += b * stride_rope_batch
    v_ptr += b * stride_v_batch + head * stride_v_head

    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, V_BLOCK), tl.float32)
    row_max, row_sum, acc = _attend_keys(
        q_nope, q_rope, k_nope_ptr, k_rope_ptr, v_ptr, 0, last_full, kv_len, positions, scale_log2,
        row_max, row_sum, acc, stride_k_token, stride_rope_token, stride_v_token,
        BLOCK_N, NOPE, ROPE, V, NOPE_BLOCK, ROPE_BLOCK, V_BLOCK, IS_CAUSAL, True,
    )  # fmt: skip
    row_max, row_sum, acc = _attend_keys(
        q_nope, q_rope, k_nope_ptr, k_rope_ptr, v_ptr, last_full, last, kv_len, positions, scale_log2,
        row_max, row_sum, acc, stride_k_token, stride_rope_token, stride_v_token,
        BLOCK_N, NOPE, ROPE, V, NOPE_BLOCK, ROPE_BLOCK, V_BLOCK, IS_CAUSAL, False,
    )  # fmt: skip

    out, lse = normalise(row_max, row_sum, acc)
    rows = (b * q_len + queries) * num_heads + head
    values = tl.arange(0, V_BLOCK)[None, :]
    is_query = queries < q_len
    tl.store(out_ptr + rows[:, None] * V + values, out, mask=is_query[:, None] & (values < V))
    tl.store(lse_ptr + rows, lse, mask=is_query)


def shared_bytes(config: PrefillConfig, width: int, v_width: int, element_size: int) -> int:
    """Shared memory that the query's tile and the keys' and values' stages want, by widths rounded up."""
    return element_size * (config.block_m * width + config.num_stages * config.block_n * (width + v_width))


def fitting_configs(nope: int, rope: int, v: int, element_size: int, device: torch.device) -> list[PrefillConfig]:
    """Configurations that fit widths, elements and device, the preferred first."""
    width = _padded(nope) + _padded(rope)
    candidates = (*CONFIGS, *SMALL_CONFIGS) if element_size == 2 else SMALL_CONFIGS
    limit = device_facts(device).shared_bytes
    return [c for c in candidates if shared_bytes(c, width, _padded(v), element_size) <= limit]


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def launch_prefill(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    cached_lens: torch.Tensor | None,
    kv_lens: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    is_causal: bool,
    config: PrefillConfig | None = None,
) -> None:
    """Launch the kernel; arguments as checked by `mla.prefill.mla_prefill`.

    Args:
        out: (batch_size, q_len, num_heads, v_head_dim), contiguous, any float dtype, written.
        lse: (batch_size, q_len, num_heads) fp32, contiguous, written.
        config: the first of `fitting_configs` if None.

    Raises:
        RuntimeError: no configuration fits the device.
    """
    batch_size, q_len, num_heads, _ = q.shape
    nope, rope, v_width = k_nope.shape[-1], k_pe.shape[-1], v.shape[-1]
    if config is None:
        fitting = fitting_configs(nope, rope, v_width, q.element_size(), q.device)
        if not fitting:
            raise RuntimeError(
                f"mla_prefill: expected a device with enough shared memory for heads of {nope} + {rope} and {v_width} "
                f"channels of {q.element_size()} bytes, got {device_facts(q.device).shared_bytes} bytes a block; use "
                f"16-bit inputs"
            )
        config = fitting[0]
    grid = (triton.cdiv(q_len, config.block_m) * num_heads * batch_size,)
    with device_guard(q.device):
        _mla_prefill_kernel[grid](
            q, k_nope, k_pe, v, cached_lens, kv_lens, out, lse,
            q_len, k_nope.shape[1], num_heads, softmax_scale * LOG2_E,
            q.stride(0), q.stride(1), q.stride(2), k_nope.stride(0), k_nope.stride(1), k_nope.stride(2),
            k_pe.stride(0), k_pe.stride(1), v.stride(0), v.stride(1), v.stride(2),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, NOPE=nope, ROPE=rope, V=v_width,
            NOPE_BLOCK=_padded(nope), ROPE_BLOCK=_padded(rope), V_BLOCK=_padded(v_width), IS_CAUSAL=is_causal,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
