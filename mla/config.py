"""The dimensions of a Multi-head Latent Attention layer, and those of published models."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MLAConfig:
    """Dimensions and positional parameters of one MLA layer (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Args:
        hidden_size: width of the residual stream.
        num_heads: query heads.
        q_lora_rank: rank of the query's low-rank projection; None where the query is projected directly.
        kv_lora_rank: width of the latent that is cached for every token.
        qk_nope_head_dim: width of a head's query and key without position.
        qk_rope_head_dim: width of the rotated part; its key is shared by all heads and cached beside the latent.
        v_head_dim: width of a head's value.
        num_layers: layers that hold such a cache.
        rope_theta: base of the rotary frequencies.
        yarn_factor: context extension by YaRN; 1.0 means none.
        yarn_mscale_all_dim: YaRN's coefficient for the softmax scale (0.0 leaves the scale alone).
        yarn_mscale: YaRN's coefficient for the rotated part, relative to yarn_mscale_all_dim.
        yarn_beta_fast, yarn_beta_slow: rotations over the original context between which YaRN interpolates.
        original_max_seq_len: context length before extension, in tokens.
        rope_order: "interleaved" where the checkpoint's rotated channels pair as (0, 1), (2, 3), ..., as all published
            ones do; "halves" where channel i pairs with i + qk_rope_head_dim / 2.
        attention_bias: whether q_a_proj, kv_a_proj_with_mqa and o_proj have biases.
        source: where the figures come from.

    Raises:
        ValueError: a dimension is not positive, the rotated width is odd, or the order of channels is unknown.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    num_layers: int = 1
    rope_theta: float = 10000.0
    yarn_factor: float = 1.0
    yarn_mscale: float = 1.0
    yarn_mscale_all_dim: float = 0.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    original_max_seq_len: int = 4096
    rope_order: str = "interleaved"
    attention_bias: bool = False
    source: str = ""

    def __post_init__(self):
        for name in ("hidden_size", "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a positive width, got {getattr(self, name)}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim: expected an even width, since channels are rotated in pairs, "
                f"got {self.qk_rope_head_dim}"
            )
        if self.rope_order not in ("interleaved", "halves"):
            raise ValueError(f"rope_order: expected 'interleaved' or 'halves', got {self.rope_order!r}")

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key before absorption (192 for DeepSeek)."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_dim(self) -> int:
        """Elements that a token leaves in the cache of one layer: the latent, then the rotated key (576)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """`qk_head_dim ** -0.5`, times YaRN's mscale squared: never the absorbed width's."""
        return self.qk_head_dim**-0.5 * yarn_mscale(self.yarn_factor, self.yarn_mscale_all_dim) ** 2

    def bytes_per_token(self, element_size: int = 2) -> int:
        """Bytes that a token occupies in the cache of all layers."""
        return self.num_layers * self.cache_dim * element_size


def yarn_mscale(factor: float, coefficient: float) -> float:
    """YaRN's attention factor, `0.1 * coefficient * ln(factor) + 1`; 1 where the context is not extended.

    Reference: Peng et al., YaRN, arXiv 2309.00071, section 3.4.
    """
    return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1.0 else 1.0


# MLAConfig's name, the one in config.json.
_NAMES = {
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "num_layers": "num_hidden_layers",
}
_YARN_NAMES = {
    "yarn_factor": "factor",
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "original_max_seq_len": "original_max_position_embeddings",
}


def config_from_json(source: str | Path | Mapping[str, Any]) -> MLAConfig:
    """Read a DeepSeek-family checkpoint's config.json.

    Rotary parameters are taken from `rope_theta` and `rope_scaling`, as checkpoints on the Hub have them, or from
    `rope_parameters`, as transformers 5 writes them.

    Args:
        source: the file, its folder, or its content, such as transformers' `config.to_dict()`.

    Returns:
        The attention's dimensions; what the source leaves out has MLAConfig's default, except q_lora_rank, which is
        None then.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a dimension is missing, or the positions are extended by anything but YaRN.
    """
    if isinstance(source, Mapping):
        content, origin = source, str(source.get("_name_or_path") or "config.json")
    else:
        path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
        content, origin = json.loads(path.read_text()), str(path)
    missing = [theirs for theirs in _NAMES.values() if theirs not in content and theirs != "q_lora_rank"]
    if missing:
        raise ValueError(
            f"{origin}: expected the config of a model with Multi-head Latent Attention, got one without "
            f"{', '.join(missing)} (model_type {content.get('model_type')!r})"
        )
    rope = {**(content.get("rope_scaling") or {}), **(content.get("rope_parameters") or {})}
    order = "interleaved" if content.get("rope_interleave", True) is not False else "halves"
    return MLAConfig(
        **{ours: content.get(theirs) for ours, theirs in _NAMES.items()},
        **_yarn_parameters(rope, content, origin),
        rope_theta=float(rope.get("rope_theta") or content.get("rope_theta") or MLAConfig.rope_theta),
        rope_order=order,
        attention_bias=bool(content.get("attention_bias", False)),
        source=origin,
    )


def _yarn_parameters(rope: Mapping[str, Any], content: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """MLAConfig's YaRN fields; none where the context is not extended."""
    # the older spelling of the same key
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return {}
    # each would change frequencies or magnitudes in a way that mla.rope does not know
    harmless = {"attention_factor": (None,), "partial_rotary_factor": (None, 1.0), "truncate": (None, True)}
    unknown = [name for name, values in harmless.items() if rope.get(name) not in values]
    if kind != "yarn" or unknown:
        raise ValueError(
            f"{origin}: expected rotary positions that are plain or extended by YaRN as DeepSeek's are, got "
            f"{kind!r}{' with ' + ', '.join(unknown) if unknown else ''}"
        )
    if "factor" not in rope:
        raise ValueError(f"{origin}: expected YaRN's factor in rope_scaling or rope_parameters, got {dict(rope)}")
    found = {ours: rope[theirs] for ours, theirs in _YARN_NAMES.items() if rope.get(theirs) is not None}
    return {"original_max_seq_len": content.get("max_position_embeddings", MLAConfig.original_max_seq_len), **found}


_HUB = "https://huggingface.co/{}/blob/main/config.json"

PRESETS: dict[str, MLAConfig] = {
    "deepseek-v2-lite": MLAConfig(
        hidden_size=2048, num_heads=16, q_lora_rank=None, num_layers=27,
        yarn_factor=40.0, yarn_mscale=0.707, yarn_mscale_all_dim=0.707,
        source=_HUB.format("deepseek-ai/DeepSeek-V2-Lite"),
    ),
    "deepseek-v2": MLAConfig(
        hidden_size=5120, num_heads=128, num_layers=60,
        yarn_factor=40.0, yarn_mscale=0.707, yarn_mscale_all_dim=0.707,
        source=_HUB.format("deepseek-ai/DeepSeek-V2"),
    ),
    # DeepSeek-R1 has the same attention as V3.
    "deepseek-v3": MLAConfig(
        hidden_size=7168, num_heads=128, num_layers=61,
        yarn_factor=40.0, yarn_mscale=1.0, yarn_mscale_all_dim=1.0,
        source=_HUB.format("deepseek-ai/DeepSeek-V3"),
    ),
    "kimi-k2": MLAConfig(
        hidden_size=7168, num_heads=64, num_layers=61, rope_theta=50000.0,
        yarn_factor=32.0, yarn_mscale=1.0, yarn_mscale_all_dim=1.0, yarn_beta_fast=1.0,
        source=_HUB.format("moonshotai/Kimi-K2-Instruct"),
    ),
    "tiny": MLAConfig(
        hidden_size=64, num_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16, source="no model: small enough to print and for tests on a CPU",
    ),
}  # fmt: skip
