"""What the two torch rungs share: which tokens count, and the softmax over them."""

import torch

from mla.problem import Problem


def mask_unused(problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The contiguous cache with zeros where no token lives, and the mask of used tokens; None if all are used.

    Zeros, since a probability of 0 times a NaN left in an unused slot is still NaN.
    """
    if not problem.has_unused_rows:
        return problem.kv, None
    positions = torch.arange(problem.kv.shape[1], device=problem.kv.device)
    is_used = positions < problem.seq_lens[:, None]  # (batch_size, max_seq_len)
    return problem.kv.masked_fill(~is_used[..., None], 0.0), is_used


def softmax_and_lse(
    scores: torch.Tensor, softmax_scale: float, is_used: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the tokens, computed in fp32 or wider and returned in the scores' dtype, and its log-sum-exp.

    Args:
        scores: (batch_size, num_heads, tokens), unscaled.
        softmax_scale: factor on the scores.
        is_used: (batch_size, tokens) bool, or None where every token is used.
    """
    logits = scores.to(torch.promote_types(scores.dtype, torch.float32)) * softmax_scale
    if is_used is not None:
        logits = logits.masked_fill(~is_used[:, None, :], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    probabilities = torch.softmax(logits, dim=-1)
    if is_used is not None:
        # a request without tokens: softmax gives 0 / 0
        probabilities = probabilities.masked_fill(~is_used[:, None, :], 0.0)
    return probabilities.to(scores.dtype), lse
