"""Rung 2: the absorbed form, two matrix products over the latent cache with a softmax between (eager torch)."""

import torch

from mla.problem import Problem
from mla.stages.softmax import mask_unused, softmax_and_lse


def attend(
    q: torch.Tensor, kv: torch.Tensor, softmax_scale: float, kv_lora_rank: int, is_used: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed attention: all heads of a request are the rows of one matrix over its shared cache.

    Args:
        q: (batch_size, num_heads, cache_dim).
        kv: (batch_size, tokens, cache_dim).
        softmax_scale: factor on the scores.
        kv_lora_rank: width of the latent part, which is also the value.
        is_used: (batch_size, tokens) bool, or None where every token is used.

    Returns:
        out (batch_size, num_heads, kv_lora_rank), lse (batch_size, num_heads).
    """
    scores = torch.bmm(q, kv.transpose(1, 2))
    probabilities, lse = softmax_and_lse(scores, softmax_scale, is_used)
    return torch.bmm(probabilities, kv[..., :kv_lora_rank]), lse


def decode(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode with the query absorbed, on the contiguous cache.

    Args:
        problem: uses q_absorbed, kv, seq_lens.

    Returns:
        out (batch_size, num_heads, kv_lora_rank) in the problem's dtype, lse (batch_size, num_heads) fp32.

    Reference: DeepSeek-V2, arXiv 2405.04434, section 2.1.2, on absorbing W^UK and W^UV.
    """
    kv, is_used = mask_unused(problem)
    return attend(problem.q_absorbed, kv, problem.softmax_scale, problem.config.kv_lora_rank, is_used)
