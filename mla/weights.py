"""Weights of MLA layers: found in DeepSeek-family checkpoints, checked, dequantised, cut for absorption."""

from dataclasses import dataclass
from pathlib import Path

import torch

from mla.checkpoint import SCALE, AttentionFiles
from mla.config import MLAConfig, config_from_json

ROLES = {
    "q_proj": "query of all heads, in one step",
    "q_a_proj": "query, down to q_lora_rank",
    "q_a_layernorm": "RMSNorm of the query's low rank",
    "q_b_proj": "query, up to all heads",
    "kv_a_proj_with_mqa": "down to the latent and the shared rotary key",
    "kv_a_layernorm": "RMSNorm of the latent",
    "kv_b_proj": "latent up to keys and values of all heads",
    "o_proj": "output",
    # the tutorial's names
    "kv_down_proj": "the tutorial's kv_a_proj_with_mqa",
    "k_up_proj": "the tutorial's half of kv_b_proj: keys",
    "v_up_proj": "the tutorial's half of kv_b_proj: values",
}


@dataclass(frozen=True)
class FoundTensor:
    """A tensor of a layer's attention in a checkpoint.

    Args:
        name: in full.
        shape: of the tensor.
        dtype: as safetensors calls it, such as BF16 or F8_E4M3.
        role: what it is for.
        file: that holds it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    file: Path


@dataclass(frozen=True)
class WeightTable:
    """What `inspect_weights` found; printed, it is a table."""

    rows: tuple[FoundTensor, ...]

    def __str__(self) -> str:
        cells = [("name", "shape", "dtype", "role")]
        cells += [(r.name, " x ".join(map(str, r.shape)), r.dtype, r.role) for r in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def split_kv_b_proj(weight: torch.Tensor, config: MLAConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut kv_b_proj into the up-projections of keys and values, without a copy.

    Its rows go head by head, and within a head first the keys' qk_nope_head_dim rows, then the values' v_head_dim.

    Args:
        weight: (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank), any float dtype.
        config: the layer's dimensions.

    Returns:
        w_uk (num_heads, qk_nope_head_dim, kv_lora_rank) and w_uv (num_heads, v_head_dim, kv_lora_rank), views.

    Raises:
        ValueError: the weight has another shape.
    """
    per_head = config.qk_nope_head_dim + config.v_head_dim
    expected = (config.num_heads * per_head, config.kv_lora_rank)
    if tuple(weight.shape) != expected:
        raise ValueError(f"kv_b_proj: expected shape {expected}, got {tuple(weight.shape)}; is it of another config?")
    heads = weight.view(config.num_heads, per_head, config.kv_lora_rank)
    return heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]


def expected_shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's weights, by the names that follow `model.layers.N.self_attn.` in a checkpoint."""
    hidden, heads, rank = config.hidden_size, config.num_heads, config.q_lora_rank
    query_width = heads * config.qk_head_dim
    if rank is None:
        shapes = {"q_proj.weight": (query_width, hidden)}
    else:
        shapes = {
            "q_a_proj.weight": (rank, hidden),
            "q_a_layernorm.weight": (rank,),
            "q_b_proj.weight": (query_width, rank),
        }
    shapes |= {
        "kv_a_proj_with_mqa.weight": (config.cache_dim, hidden),
        "kv_a_layernorm.weight": (config.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "o_proj.weight": (hidden, heads * config.v_head_dim),
    }
    if config.attention_bias:
        biased = [n for n in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if f"{n}.weight" in shapes]
        shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased}
    return shapes


def _with_tutorial_names(shapes: dict, found: set[str], config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """`shapes` by the names that a checkpoint has, where they are the tutorial's."""
    shapes = dict(shapes)
    if "kv_down_proj.weight" in found:
        shapes["kv_down_proj.weight"] = shapes.pop("kv_a_proj_with_mqa.weight")
    if found & {"k_up_proj.weight", "v_up_proj.weight"}:
        del shapes["kv_b_proj.weight"]
        for name, width in (("k_up_proj", config.qk_nope_head_dim), ("v_up_proj", config.v_head_dim)):
            shapes[f"{name}.weight"] = (config.num_heads * width, config.kv_lora_rank)
    return shapes


def _with_checkpoint_names(weights: dict[str, torch.Tensor], config: MLAConfig) -> dict[str, torch.Tensor]:
    """The tutorial's tensors as those that checkpoints have."""
    weights = dict(weights)
    if "kv_down_proj.weight" in weights:
        weights["kv_a_proj_with_mqa.weight"] = weights.pop("kv_down_proj.weight")
    if "k_up_proj.weight" in weights:
        halves = (weights.pop(f"{name}.weight") for name in ("k_up_proj", "v_up_proj"))
        by_head = [half.unflatten(0, (config.num_heads, -1)) for half in halves]
        weights["kv_b_proj.weight"] = torch.cat(by_head, dim=1).flatten(0, 1)
    return weights


def inspect_weights(path: str | Path, layer: int = 0) -> WeightTable:
    """Tell what a checkpoint holds for one layer's attention; reads headers, no data.

    Args:
        path: a .safetensors file, an index of shards (.safetensors.index.json), or a folder with either.
        layer: its number.

    Returns:
        A WeightTable: `rows` to work with, or to be printed.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: the layer is not there, or an index does not fit its shards.
    """
    places = {part: place for place, part in enumerate(ROLES)}
    with AttentionFiles(path, layer) as files:
        rows = []
        for key in sorted(files.files, key=lambda key: (places.get(key.split(".")[0], len(places)), key)):
            role = ROLES.get(key.split(".")[0], "not known to Multi-head Latent Attention")
            if key.endswith(SCALE):
                role = "scales of its FP8 blocks"
            name, file = files.files[key]
            rows.append(FoundTensor(name, *files.shape_and_dtype(key), role, file))
    return WeightTable(tuple(rows))


def load_attention(
    path: str | Path, layer: int = 0, config: MLAConfig | None = None, *, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Read one layer's attention weights, after a check that they are all there and nothing else is.

    FP8 weights are dequantised. The tutorial's kv_down_proj becomes kv_a_proj_with_mqa, its k_up_proj and v_up_proj
    become kv_b_proj.

    Args:
        path: a .safetensors file, an index of shards (.safetensors.index.json), or a folder with either.
        layer: its number.
        config: the dimensions to expect; default: from the config.json beside the weights.
        dtype: to convert to; default: as stored, and bf16 for what is stored in FP8.

    Returns:
        Tensors on the CPU by their names in `expected_shapes`, which are a `MultiHeadLatentAttention`'s.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a tensor is missing, not known or misshapen; the message names it and what was expected.
    """
    path = Path(path)
    config = config or config_from_json(path if path.is_dir() else path.parent)
    with AttentionFiles(path, layer) as files:
        found = set(files.files)
        scales = {key for key in found if key.endswith(SCALE) and key.removesuffix(SCALE) in found}
        expected = _with_tutorial_names(expected_shapes(config), found, config)
        _check(files, found - scales, expected, config, f"{path}: model.layers.{layer}.self_attn.")
        weights = {key: files.read(key, dtype) for key in expected}
    weights = _with_checkpoint_names(weights, config)
    return {name: weights[name] for name in expected_shapes(config)}


def _check(files: AttentionFiles, found: set[str], expected: dict, config: MLAConfig, prefix: str) -> None:
    for name, shape in expected.items():
        if name not in found:
            hint = f"q_lora_rank is {config.q_lora_rank} here" if name.startswith("q_") else "see mla.inspect_weights"
            raise ValueError(f"{prefix}{name}: expected shape {shape}, got no such tensor; {hint}")
        got, _ = files.shape_and_dtype(name)
        if got != shape:
            raise ValueError(f"{prefix}{name}: expected shape {shape}, got {got}; is the config another model's?")
    if extra := sorted(found - set(expected)):
        raise ValueError(
            f"{prefix}{extra[0]}: expected no tensors but {', '.join(expected)}, got {', '.join(extra)}; "
            f"another kind of attention than plain MLA?"
        )
