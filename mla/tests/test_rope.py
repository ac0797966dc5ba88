import dataclasses

import pytest
import torch

from mla import PRESETS
from mla.rope import apply_rope, reorder_rope, rope_frequencies

CONFIG = dataclasses.replace(PRESETS["deepseek-v3"], yarn_factor=1.0)


def _random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_both_orders_give_the_same_scores():
    q, k = _random(5, 64), _random(5, 64)
    positions = torch.tensor([0, 1, 17, 1000, 100_000])
    scores = {}
    for order in ("interleaved", "halves"):
        rotated = [apply_rope(reorder_rope(x, "interleaved", order), positions, CONFIG, order) for x in (q, k)]
        scores[order] = rotated[0] @ rotated[1].T
    torch.testing.assert_close(scores["interleaved"], scores["halves"])


def test_scores_depend_on_the_distance_only():
    q, k = _random(1, 64), _random(1, 64)
    near = apply_rope(q, torch.tensor([7]), CONFIG, "halves") @ apply_rope(k, torch.tensor([3]), CONFIG, "halves").T
    far = apply_rope(q, torch.tensor([907]), CONFIG, "halves") @ apply_rope(k, torch.tensor([903]), CONFIG, "halves").T
    torch.testing.assert_close(near, far)


def test_position_zero_changes_nothing_and_rotation_keeps_the_length():
    x = _random(3, 64)
    torch.testing.assert_close(apply_rope(x, torch.zeros(3), CONFIG, "interleaved"), x)
    rotated = apply_rope(x, torch.tensor([1, 2, 3]), CONFIG, "interleaved")
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))


def test_reordering_there_and_back_changes_nothing():
    x = _random(2, 64)
    assert torch.equal(reorder_rope(reorder_rope(x, "interleaved", "halves"), "halves", "interleaved"), x)


@pytest.mark.parametrize("preset", ["deepseek-v2-lite", "deepseek-v3", "kimi-k2"])
def test_yarn_matches_transformers(preset):
    """An independent implementation: the model library's own YaRN frequencies and attention factor."""
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils", reason="transformers is not installed")
    from transformers import DeepseekV3Config

    config = PRESETS[preset]
    model = DeepseekV3Config(
        qk_rope_head_dim=config.qk_rope_head_dim,
        head_dim=config.qk_rope_head_dim,
        max_position_embeddings=int(config.original_max_seq_len * config.yarn_factor),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": config.rope_theta,
            "factor": config.yarn_factor,
            "original_max_position_embeddings": config.original_max_seq_len,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "mscale": config.yarn_mscale,
            "mscale_all_dim": config.yarn_mscale_all_dim,
        },
    )
    expected, factor = rope_utils.ROPE_INIT_FUNCTIONS["yarn"](model, torch.device("cpu"))
    torch.testing.assert_close(rope_frequencies(config, torch.float32), expected, rtol=1e-5, atol=1e-9)
    # equal mscale and mscale_all_dim cancel in the rotated part
    assert factor == pytest.approx(1.0)


def test_wrong_width_and_order_are_refused():
    with pytest.raises(ValueError, match="64"):
        apply_rope(_random(2, 32), torch.arange(2), CONFIG, "halves")
    with pytest.raises(ValueError, match="order"):
        apply_rope(_random(2, 64), torch.arange(2), CONFIG, "pairs")
