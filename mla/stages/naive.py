"""Rung 1: keys and values rebuilt per head, for every cached token, at every step (eager torch)."""

import torch

from mla.problem import Problem
from mla.stages.softmax import mask_unused, softmax_and_lse


def decode(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode with per-head keys and values built from the contiguous cache.

    Args:
        problem: uses q_nope, q_pe, w_uk, w_uv, kv, seq_lens.

    Returns:
        out (batch_size, num_heads, v_head_dim) in the problem's dtype, lse (batch_size, num_heads) fp32.

    Reference: DeepSeek-V2, arXiv 2405.04434, section 2.1.2, equations 9 to 19.
    """
    kv, is_used = mask_unused(problem)
    latent, k_pe = kv.split((problem.config.kv_lora_rank, problem.config.qk_rope_head_dim), dim=-1)
    k_nope = torch.einsum("bnr,hdr->bhnd", latent, problem.w_uk)
    values = torch.einsum("bnr,hvr->bhnv", latent, problem.w_uv)
    scores = torch.einsum("bhd,bhnd->bhn", problem.q_nope, k_nope)
    scores = scores + torch.einsum("bhd,bnd->bhn", problem.q_pe, k_pe)
    probabilities, lse = softmax_and_lse(scores, problem.softmax_scale, is_used)
    return torch.einsum("bhn,bhnv->bhv", probabilities, values), lse
