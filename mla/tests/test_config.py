import dataclasses

import pytest

from mla import PRESETS, MLAConfig


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_name_their_source(name):
    assert PRESETS[name].source


def test_deepseek_v3_has_the_published_dimensions():
    config = PRESETS["deepseek-v3"]
    assert (config.num_heads, config.qk_head_dim, config.cache_dim) == (128, 192, 576)
    # 61 layers of 576 bf16 elements
    assert config.bytes_per_token() == 70_272


def test_softmax_scale_comes_from_the_width_before_absorption():
    plain = dataclasses.replace(PRESETS["deepseek-v3"], yarn_factor=1.0)
    assert plain.softmax_scale == pytest.approx(192**-0.5)
    # with YaRN: 0.1 * ln(40) + 1 = 1.3689, squared
    assert PRESETS["deepseek-v3"].softmax_scale == pytest.approx(192**-0.5 * 1.3688879454**2)


@pytest.mark.parametrize("change", [{"kv_lora_rank": 0}, {"num_heads": -1}, {"qk_rope_head_dim": 63}])
def test_impossible_dimensions_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        MLAConfig(**{"hidden_size": 64, "num_heads": 4, **change})
