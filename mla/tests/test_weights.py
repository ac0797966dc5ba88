"""Checkpoints as they are on the Hub, written here with random tensors: found, checked, read, dequantised, cut."""

import dataclasses
import json

import pytest
import torch

from mla import (
    PRESETS,
    MultiHeadLatentAttention,
    config_from_json,
    inspect_weights,
    load_attention,
    split_kv_b_proj,
)
from mla.checkpoint import FP8_BLOCK, dequantise_blocks
from mla.weights import expected_shapes

save_file = pytest.importorskip("safetensors.torch").save_file

CONFIG = dataclasses.replace(PRESETS["tiny"], num_layers=2)
DIRECT = dataclasses.replace(CONFIG, q_lora_rank=None)
# widths that end inside a block of 128
FP8 = dataclasses.replace(CONFIG, hidden_size=200, kv_lora_rank=128, num_heads=8, v_head_dim=32)


def _tensors(config=CONFIG, layers=(0, 1), dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.zeros(4, config.hidden_size, dtype=dtype)}
    for layer in layers:
        for name, shape in expected_shapes(config).items():
            tensor = torch.randn(shape, generator=generator).to(dtype)
            tensors[f"model.layers.{layer}.self_attn.{name}"] = tensor
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.zeros(2, 2, dtype=dtype)
    return tensors


def _config_json(config):
    names = ("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    content = {name: getattr(config, name) for name in names}
    return content | {"num_attention_heads": config.num_heads, "num_hidden_layers": config.num_layers}


def _single(folder, tensors, config=CONFIG):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config_json(config)))
    return folder


def _sharded(folder, tensors, config=CONFIG):
    """Every other tensor in the other shard, so that each layer lies in both."""
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {name: shards[i % 2] for i, name in enumerate(tensors)}
    for shard in shards:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(_config_json(config)))
    return folder


@pytest.mark.parametrize("save", [_single, _sharded])
@pytest.mark.parametrize("config", [CONFIG, DIRECT], ids=["low-rank", "direct"])
@pytest.mark.parametrize("layer", [0, 1])
def test_reads_what_was_written(save, config, layer, tmp_path):
    tensors = _tensors(config)
    weights = load_attention(save(tmp_path, tensors, config), layer)
    assert list(weights) == list(expected_shapes(config))
    for name, weight in weights.items():
        assert torch.equal(weight, tensors[f"model.layers.{layer}.self_attn.{name}"])
    assert {w.dtype for w in load_attention(tmp_path, layer, dtype=torch.float32).values()} == {torch.float32}


def test_files_may_be_named(tmp_path):
    _sharded(tmp_path, _tensors())
    assert load_attention(tmp_path / "model.safetensors.index.json", 1)
    _single(tmp_path, _tensors())
    # an index beside a file of all weights goes first
    assert inspect_weights(tmp_path).rows[0].file.name.startswith("model-0000")
    assert inspect_weights(tmp_path / "model.safetensors").rows[0].file.name == "model.safetensors"


def test_the_table_tells_what_is_there(tmp_path):
    table = inspect_weights(_sharded(tmp_path, _tensors()), 1)
    first, *_, last = table.rows
    assert (first.name, first.shape, first.dtype) == ("model.layers.1.self_attn.q_a_proj.weight", (32, 64), "BF16")
    assert (last.name, last.role) == ("model.layers.1.self_attn.o_proj.weight", "output")
    assert len(table.rows) == len(expected_shapes(CONFIG))
    lines = str(table).splitlines()
    assert lines[0].split() == ["name", "shape", "dtype", "role"]
    assert lines[1].split()[1:5] == ["32", "x", "64", "BF16"]


def test_layer_from_weights(tmp_path):
    tensors = _tensors(dtype=torch.float32)
    # norms in another dtype than the matrices, as some checkpoints have them
    tensors["model.layers.1.self_attn.kv_a_layernorm.weight"] = torch.ones(32, dtype=torch.float64)
    layer = MultiHeadLatentAttention.from_weights(_single(tmp_path, tensors), 1)
    assert layer.layer_idx == 1
    assert not any(p.requires_grad for p in layer.parameters())
    other = MultiHeadLatentAttention(CONFIG)
    other.load_state_dict(load_attention(tmp_path, 1))
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x), other(x))


def test_rows_of_kv_b_proj_go_by_head_keys_before_values():
    """Each row carries its head, whether it is a key's or a value's, and its channel."""
    config = dataclasses.replace(CONFIG, num_heads=3, qk_nope_head_dim=4, v_head_dim=2, kv_lora_rank=1)
    rows = [
        [100.0 * head + 10 * is_value + channel]
        for head in range(3)
        for is_value, width in ((0, 4), (1, 2))
        for channel in range(width)
    ]
    weight = torch.tensor(rows)
    w_uk, w_uv = split_kv_b_proj(weight, config)
    assert w_uk.squeeze(-1).tolist() == [[100.0 * h + c for c in range(4)] for h in range(3)]
    assert w_uv.squeeze(-1).tolist() == [[100.0 * h + 10 + c for c in range(2)] for h in range(3)]
    assert w_uk.data_ptr() == weight.data_ptr()
    with pytest.raises(ValueError, match=r"kv_b_proj: expected shape \(18, 1\), got \(17, 1\)"):
        split_kv_b_proj(weight[:-1], config)


def test_the_tutorials_names(tmp_path):
    """kv_down_proj, k_up_proj, v_up_proj: other names for the same numbers, up to the order of rows."""
    tensors = _tensors(DIRECT)
    expected = load_attention(_single(tmp_path, tensors, DIRECT))
    prefix = "model.layers.0.self_attn."
    tensors[prefix + "kv_down_proj.weight"] = tensors.pop(prefix + "kv_a_proj_with_mqa.weight")
    w_uk, w_uv = split_kv_b_proj(tensors.pop(prefix + "kv_b_proj.weight"), DIRECT)
    tensors[prefix + "k_up_proj.weight"] = w_uk.flatten(0, 1).contiguous()
    tensors[prefix + "v_up_proj.weight"] = w_uv.flatten(0, 1).contiguous()
    _single(tmp_path, tensors, DIRECT)
    for name, weight in load_attention(tmp_path).items():
        assert torch.equal(weight, expected[name])
    assert any("tutorial's half of kv_b_proj: keys" in row.role for row in inspect_weights(tmp_path).rows)
    # as the tutorial has it the down-projection makes no rotary key
    tensors[prefix + "kv_down_proj.weight"] = tensors[prefix + "kv_down_proj.weight"][:32].clone()
    with pytest.raises(ValueError, match=r"kv_down_proj\.weight: expected shape \(48, 64\), got \(32, 64\)"):
        load_attention(_single(tmp_path, tensors, DIRECT))


def _quantise(weight):
    """FP8 blocks of 128 x 128, each with the scale that makes its largest value 448, and the rounded weight."""
    blocks = [-(-n // FP8_BLOCK) for n in weight.shape]
    scale_inv = torch.empty(blocks)
    quantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    rounded = torch.empty(weight.shape)
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            place = tuple(slice(k * FP8_BLOCK, (k + 1) * FP8_BLOCK) for k in (i, j))
            scale_inv[i, j] = weight[place].abs().max() / 448.0
            quantised[place] = (weight[place] / scale_inv[i, j]).to(torch.float8_e4m3fn)
            rounded[place] = quantised[place].float() * scale_inv[i, j]
    return quantised, scale_inv, rounded


@pytest.mark.parametrize("save", [_single, _sharded])
def test_fp8_blocks_are_dequantised(save, tmp_path):
    tensors, expected = _tensors(FP8, layers=(0,)), {}
    for name in [n for n in tensors if ("self_attn" in n and n.endswith("proj.weight")) or "with_mqa" in n]:
        # scales that differ from block to block
        weight = tensors[name].float() * torch.linspace(0.1, 3.0, tensors[name].shape[1])
        tensors[name], tensors[name + "_scale_inv"], expected[name] = _quantise(weight)
        assert (expected[name] - weight).norm() / weight.norm() < 0.04
    assert tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (2, 2)
    save(tmp_path, tensors, FP8)
    weights = load_attention(tmp_path, dtype=torch.float32)
    for name, weight in expected.items():
        assert torch.equal(weights[name.removeprefix("model.layers.0.self_attn.")], weight)
    assert {w.dtype for w in load_attention(tmp_path).values()} == {torch.bfloat16}
    scales = [row for row in inspect_weights(tmp_path).rows if row.role == "scales of its FP8 blocks"]
    assert len(scales) == len(expected)
    assert {row.dtype for row in scales} == {"F32"}


PREFIX = "model.layers.0.self_attn."
WRONG = {
    "missing": (
        lambda t: t.pop(PREFIX + "kv_a_layernorm.weight"),
        r"model\.layers\.0\.self_attn\.kv_a_layernorm\.weight: expected shape \(32,\), got no such tensor",
    ),
    "missing query": (
        lambda t: t.pop(PREFIX + "q_b_proj.weight"), r"q_b_proj\.weight: .* got no such tensor; q_lora_rank is 32",
    ),
    "superfluous": (
        lambda t: t.update({PREFIX + "indexer.wk.weight": torch.zeros(2)}),
        r"self_attn\.indexer\.wk\.weight: expected no tensors but .*o_proj\.weight, got indexer\.wk\.weight",
    ),
    "misshapen": (
        lambda t: t.update({PREFIX + "kv_b_proj.weight": torch.zeros(64, 32)}),
        r"kv_b_proj\.weight: expected shape \(128, 32\), got \(64, 32\)",
    ),
    "FP8 without scales": (
        lambda t: t.update({PREFIX + "kv_b_proj.weight": torch.zeros(128, 32, dtype=torch.float8_e4m3fn)}),
        r"kv_b_proj\.weight_scale_inv: expected it beside weights in FP8.*got none beside",
    ),
    "scales without FP8": (
        lambda t: t.update({PREFIX + "kv_b_proj.weight_scale_inv": torch.zeros(1, 1)}),
        r"kv_b_proj\.weight_scale_inv: expected it beside weights in FP8.*got one beside",
    ),
    "scales of nothing": (
        lambda t: t.update({PREFIX + "v_proj.weight_scale_inv": torch.zeros(1, 1)}),
        r"v_proj\.weight_scale_inv: expected no tensors but",
    ),
    "misshapen scales": (
        lambda t: t.update(
            {
                PREFIX + "kv_b_proj.weight": torch.zeros(128, 32, dtype=torch.float8_e4m3fn),
                PREFIX + "kv_b_proj.weight_scale_inv": torch.zeros(2, 1),
            }
        ),
        r"kv_b_proj\.weight_scale_inv: expected shape \(1, 1\).*got \(2, 1\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_checkpoint_that_does_not_fit_is_refused(case, tmp_path):
    change, message = WRONG[case]
    tensors = _tensors()
    change(tensors)
    with pytest.raises(ValueError, match=message):
        load_attention(_single(tmp_path, tensors))


def test_buffers_of_old_checkpoints_are_no_weights(tmp_path):
    assert load_attention(_single(tmp_path, _tensors() | {PREFIX + "rotary_emb.inv_freq": torch.zeros(8)}))


def test_missing_files_and_layers(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected one \.safetensors file, or shards with one .* found none"):
        inspect_weights(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"expected a \.safetensors file, an index of shards or a folder"):
        inspect_weights(tmp_path / "other.safetensors")
    _sharded(tmp_path, _tensors())
    with pytest.raises(ValueError, match=r"expected tensors named model\.layers\.7\..* got those of layers 0 to 1"):
        inspect_weights(tmp_path, 7)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shards = sorted(set(content["weight_map"].values()))
    content["weight_map"] = dict.fromkeys(content["weight_map"], shards[0])
    index.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"-of-00002\.safetensors: expected it to hold model\.layers\.0\..* as the index"
    ):
        load_attention(tmp_path)
    (tmp_path / shards[0]).unlink()
    with pytest.raises(FileNotFoundError, match=r"00001-of-00002\.safetensors: expected the shard that holds"):
        load_attention(tmp_path)
    index.unlink()
    (tmp_path / shards[0]).write_bytes((tmp_path / shards[1]).read_bytes())
    with pytest.raises(FileNotFoundError, match=r"found model-00001.*, model-00002.*; name the file"):
        load_attention(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="expected an index with a weight_map, got nothing"):
        inspect_weights(index)
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match="got none of any layer's self_attn"):
        inspect_weights(tmp_path / "head.safetensors")


def test_dequantised_values():
    weight = torch.full((130, 2), 2.0).to(torch.float8_e4m3fn)
    found = dequantise_blocks(weight, torch.tensor([[0.5], [3.0]]))
    assert found.dtype == torch.float32
    assert (found[:128] == 1.0).all()
    assert (found[128:] == 6.0).all()


V3_JSON = _config_json(PRESETS["deepseek-v3"]) | {
    "model_type": "deepseek_v3", "rms_norm_eps": 1e-6, "max_position_embeddings": 163840, "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip


def test_config_of_the_published_model(tmp_path):
    """Both spellings of the rotary parameters, from a file, a folder and a dict; the preset says the same."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(V3_JSON))
    expected = PRESETS["deepseek-v3"]
    new = {k: v for k, v in V3_JSON.items() if not k.startswith("rope_")}
    scaling = {k: v for k, v in V3_JSON["rope_scaling"].items() if k != "type"}
    new["rope_parameters"] = scaling | {"rope_type": "yarn", "rope_theta": 10000.0}
    for source in (path, str(tmp_path), V3_JSON, new):
        assert dataclasses.replace(config_from_json(source), source=expected.source) == expected
    assert config_from_json(path).source == str(path)


def test_config_without_extension():
    plain = config_from_json({**V3_JSON, "rope_scaling": None, "rope_theta": 5e5, "q_lora_rank": None})
    assert (plain.yarn_factor, plain.rope_theta, plain.q_lora_rank) == (1.0, 5e5, None)
    default = {"rope_type": "default", "rope_theta": 123.0}
    flags = {"rope_interleave": False, "attention_bias": True}
    other = config_from_json({**V3_JSON, "rope_scaling": None, "rope_parameters": default, **flags})
    assert (other.rope_theta, other.rope_order, other.attention_bias) == (123.0, "halves", True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rope_scaling={"type": "linear", "factor": 2.0}), "expected rotary positions .* got 'linear'"),
        (dict(rope_parameters={"attention_factor": 1.5}), "got 'yarn' with attention_factor"),
        (dict(rope_parameters={"truncate": False}), "got 'yarn' with truncate"),
        (dict(rope_scaling={"type": "yarn"}), "expected YaRN's factor"),
        (dict(kv_lora_rank=0), "kv_lora_rank: expected a positive width"),
    ],
)
def test_config_that_is_not_known_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_json({**V3_JSON, **changes})


def test_config_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"without kv_lora_rank, qk_nope_head_dim.*model_type 'llama'"):
        config_from_json({"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1})
