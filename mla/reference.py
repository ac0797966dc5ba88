"""What every kernel is compared with: MLA decode in plain torch, one request at a time, any float dtype.

`naive_reference` builds keys and values per head from the cached latents; `absorbed_reference` attends over the
latents themselves. With `q_absorbed = absorb_query(...)` and `project_values(out, w_uv)` they are the same function.
"""

import torch


def absorb_query(q_nope: torch.Tensor, q_pe: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """Fold the keys' up-projection into the query: `q · (W c) = (Wᵀ q) · c`.

    Args:
        q_nope: (batch_size, num_heads, qk_nope_head_dim).
        q_pe: (batch_size, num_heads, qk_rope_head_dim), already rotated.
        w_uk: (num_heads, qk_nope_head_dim, kv_lora_rank).

    Returns:
        (batch_size, num_heads, kv_lora_rank + qk_rope_head_dim), latent part first.

    Reference: DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
    """
    # what einsum("bhd,hdr->bhr") does, in half the time on the host
    q_latent = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
    return torch.cat((q_latent, q_pe), dim=-1)


def project_values(out: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Apply the values' up-projection to the attended latents.

    Args:
        out: (batch_size, num_heads, kv_lora_rank).
        w_uv: (num_heads, v_head_dim, kv_lora_rank).

    Returns:
        (batch_size, num_heads, v_head_dim).
    """
    # what einsum("bhr,hvr->bhv") does, in half the time on the host
    return torch.bmm(out.transpose(0, 1), w_uv.mT).transpose(0, 1)


def _attend(scores: torch.Tensor, values: torch.Tensor, rounded=lambda x: x) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension, then the weighted sum; no tokens give 0 and -inf.

    Args:
        scores: (num_heads, tokens), scaled.
        values: (tokens, dim) shared by the heads, or (num_heads, tokens, dim).
        rounded: applied to the probabilities before they meet the values.
    """
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = rounded(torch.exp(scores - lse[:, None]))
    return (probabilities[:, None, :] @ values)[:, 0] if values.ndim == 3 else probabilities @ values, lse


def naive_reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    compute_dtype: torch.dtype | None = None,
    round_to: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode one token a request with keys and values rebuilt for every head and every cached token.

    Args:
        q_nope, q_pe, w_uk, w_uv: as in `absorb_query` and `project_values`.
        kv: (batch_size, max_seq_len, kv_lora_rank + qk_rope_head_dim); rows past a request's length are not read.
        seq_lens: (batch_size,) integers.
        softmax_scale: `qk_head_dim ** -0.5`, times YaRN's mscale squared.
        compute_dtype: what inputs are converted to, one request at a time; q_nope's dtype if None.
        round_to: round every intermediate that eager torch would store (keys, values, scores, probabilities) and the
            output to this dtype; the error that this alone makes is the measure for eager torch (`mla.measure.gate`).

    Returns:
        out (batch_size, num_heads, v_head_dim) and lse (batch_size, num_heads), natural logarithm, in compute_dtype.
    """
    compute_dtype = compute_dtype or q_nope.dtype
    rounded = _rounding(round_to, compute_dtype)
    q_nope, q_pe, w_uk, w_uv = (x.to(compute_dtype) for x in (q_nope, q_pe, w_uk, w_uv))
    rank = w_uk.shape[-1]
    outs, lses = [], []
    for b, length in enumerate(seq_lens.tolist()):
        rows = kv[b, :length].to(compute_dtype)
        latent, k_pe = rows[:, :rank], rows[:, rank:]
        k_nope = rounded(torch.einsum("nr,hdr->hnd", latent, w_uk))
        values = rounded(torch.einsum("nr,hvr->hnv", latent, w_uv))
        scores = rounded(rounded(torch.einsum("hd,hnd->hn", q_nope[b], k_nope)) + rounded(q_pe[b] @ k_pe.T))
        out, lse = _attend(scores * softmax_scale, values, rounded)
        outs.append(rounded(out))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def _rounding(round_to: torch.dtype | None, compute_dtype: torch.dtype):
    """A function that rounds to `round_to` and comes back, or that does nothing."""
    return lambda x: x if round_to is None else x.to(round_to).to(compute_dtype)


def absorbed_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    compute_dtype: torch.dtype | None = None,
    round_to: torch.dtype | None = None,
    round_scores: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode one token a request in absorbed form: `softmax(softmax_scale * q kvᵀ) kv[:, :kv_lora_rank]`.

    Args:
        q: (batch_size, num_heads, cache_dim), from `absorb_query`.
        kv: (batch_size, max_seq_len, cache_dim); rows past a request's length are not read.
        seq_lens: (batch_size,) integers.
        softmax_scale: `qk_head_dim ** -0.5`, times YaRN's mscale squared.
        kv_lora_rank: width of the latent part, which is also the value.
        compute_dtype: what inputs are converted to, one request at a time; q's dtype if None.
        round_to: round the probabilities, as anything that feeds them to tensor cores does, and the output to this
            dtype; the error that this alone makes is the measure for kernels (`mla.measure.gate`).
        round_scores: round the scores as well, as a matrix product with 16-bit output does.

    Returns:
        out (batch_size, num_heads, kv_lora_rank) and lse (batch_size, num_heads), natural logarithm, both in
        compute_dtype. A request without tokens gives 0 and -inf.
    """
    compute_dtype = compute_dtype or q.dtype
    rounded = _rounding(round_to, compute_dtype)
    outs, lses = [], []
    for b, length in enumerate(seq_lens.tolist()):
        rows = kv[b, :length].to(compute_dtype)
        scores = q[b].to(compute_dtype) @ rows.T
        if round_scores:
            scores = rounded(scores)
        out, lse = _attend(scores * softmax_scale, rows[:, :kv_lora_rank], rounded)
        outs.append(rounded(out))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)
