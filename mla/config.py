"""The dimensions of a Multi-head Latent Attention layer, and those of published models."""

import math
from dataclasses import dataclass


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
        source: where the figures come from.

    Raises:
        ValueError: a dimension is not positive, or the rotated width is odd.
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
