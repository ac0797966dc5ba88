"""The inner step that all Triton rungs share: one tile of cached tokens meets the running softmax."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend_tile(
    q_latent, q_rope, latent, k_rope, is_token,
    row_max, row_sum, acc,
    scale_log2,
    IS_FULL: tl.constexpr,
):  # fmt: skip
    """Scores of one tile, the running maximum and sum moved on, and the tile's values added.

    q_latent (BLOCK_H, RANK), q_rope (BLOCK_H, ROPE); latent (BLOCK_N, RANK), k_rope (BLOCK_N, ROPE): the tile is
    loaded once and used twice, as keys and as values. is_token (BLOCK_N,) is looked at unless IS_FULL; where it is
    false the tile must hold zeros. row_max and row_sum (BLOCK_H,) are in base 2, acc is (BLOCK_H, RANK) fp32.
    """
    scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee") * scale_log2  # (BLOCK_H, BLOCK_N)
    if not IS_FULL:
        scores = tl.where(is_token[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # what was added so far was scaled by the old maximum
    correction = tl.exp2(row_max - new_max)
    p = tl.exp2(scores - new_max[:, None])
    row_sum = row_sum * correction + tl.sum(p, axis=1)
    acc = tl.dot(p.to(latent.dtype), latent, acc * correction[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def normalise(row_max, row_sum, acc):
    """The finished output (BLOCK_H, RANK) and lse (BLOCK_H,), natural logarithm; no tokens give 0 and -inf."""
    is_empty = row_sum == 0.0
    safe_sum = tl.where(is_empty, 1.0, row_sum)
    lse = tl.where(is_empty, float("-inf"), (row_max + tl.log2(safe_sum)) * LN_2)
    return acc / safe_sum[:, None], lse
