"""Cache sizes and memory needs from model dimensions: one table of dimensions, each with its source, and arithmetic."""

from typing import NamedTuple

GIB = 2**30
BF16_BYTES = 2


class Model(NamedTuple):
    """Dimensions of a model; `cached_values`: numbers cached a token and layer."""

    num_layers: int
    num_heads: int
    qk_head_dim: int
    cached_values: int
    num_parameters: float
    source: str


MODELS = {
    "Llama-2-7B (MHA)": Model(
        32, 32, 128, 2 * 32 * 128, 6.74e9, "config.json of meta-llama/Llama-2-7b; arXiv:2307.09288"
    ),
    "DeepSeek-V2-Lite (MLA)": Model(27, 16, 192, 512 + 64, 15.7e9, "arXiv:2405.04434, appendix B"),
    "DeepSeek-V3 (MLA)": Model(61, 128, 192, 512 + 64, 671e9, "arXiv:2412.19437, section 4.2"),
}
MHA_7B, MLA_LITE, MLA_V3 = MODELS.values()
RTX_4090_BYTES = 24 * GIB


def cache_bytes_per_token(model: Model) -> int:
    """Bytes that one more token of context costs, over all layers, in a 16-bit type."""
    return model.num_layers * model.cached_values * BF16_BYTES


def weight_bytes(model: Model) -> float:
    """Bytes of the weights in a 16-bit type."""
    return model.num_parameters * BF16_BYTES


def context_limit(model: Model, memory_bytes: float, bytes_per_token: int) -> int:
    """Tokens of context that fit beside the model's weights, one sequence, without activations."""
    return max(0, int((memory_bytes - weight_bytes(model)) // bytes_per_token))


def plain_attention_bytes(model: Model, num_tokens: int) -> int:
    """Bytes of one layer's scores during a prefill by plain matmul, as the tutorial's module holds them.

    A score is there three times at once: in 16 bits, as the fp32 result of softmax, and cast back to 16 bits.
    """
    return model.num_heads * num_tokens**2 * (2 + 4 + 2)


def mqa_cached_values() -> int:
    """Numbers that multi-query attention with heads of 128 would cache a token and layer: one key, one value."""
    return 2 * 128


def models_markdown() -> list[dict[str, str]]:
    """The table of dimensions and what follows from it, a row a model."""
    return [
        {
            "model": name,
            "layers": str(model.num_layers),
            "cached values a token and layer": str(model.cached_values),
            "cache a token, bytes": str(cache_bytes_per_token(model)),
            "cache at 128K, GiB": f"{131072 * cache_bytes_per_token(model) / GIB:.1f}",
            "weights, GiB": f"{weight_bytes(model) / GIB:.1f}",
            "source": model.source,
        }
        for name, model in MODELS.items()
    ]
