"""Tiny random models of every supported family, and how the tests run them."""

# before transformers, which imports triton: without a GPU the interpreter must be chosen first
import mla.kernels  # noqa: F401

# isort: split
import inspect
from contextlib import contextmanager

import torch
import transformers
from transformers import AutoConfig

_COMMON = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    # large enough that attention decides what token comes next
    initializer_range=0.3,
)  # fmt: skip
_MOE = dict(
    moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1,
    first_k_dense_replace=1,
)  # fmt: skip
_YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=32.0,
    beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
)  # fmt: skip

# model type, class, and what its config has besides
FAMILIES = {
    "v2-lite": ("deepseek_v2", "DeepseekV2ForCausalLM", _MOE | dict(q_lora_rank=None)),
    "v2": ("deepseek_v2", "DeepseekV2ForCausalLM", _MOE | dict(rope_parameters=_YARN)),
    "v3": ("deepseek_v3", "DeepseekV3ForCausalLM", _MOE | dict(rope_parameters=_YARN)),
    "v3-halves": ("deepseek_v3", "DeepseekV3ForCausalLM", _MOE | dict(rope_interleave=False)),
    "glm4-moe-lite": ("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _MOE),
    "axk1": ("axk1", "AXK1ForCausalLM", _MOE),
    "youtu": ("youtu", "YoutuForCausalLM", {}),
    "minicpm3": ("minicpm3", "MiniCPM3ForCausalLM", dict(initializer_range=0.1, scale_emb=1)),
    "mistral4": (
        "mistral4", "Mistral4ForCausalLM",
        _MOE | dict(rope_parameters=_YARN | dict(llama_4_scaling_beta=0.1, original_max_position_embeddings=8)),
    ),
    "longcat-flash": (
        "longcat_flash", "LongcatFlashForCausalLM",
        dict(num_layers=1, ffn_hidden_size=48, expert_ffn_hidden_size=16, n_routed_experts=4, moe_topk=2,
             zero_expert_num=1, head_dim=16),
    ),
    "kimi-linear": (
        "kimi_linear", "KimiLinearForCausalLM",
        _MOE | dict(num_experts=4, num_experts_per_token=2, num_shared_experts=1, head_dim=16,
                    layer_types=["linear_attention", "full_attention"]),
    ),
}  # fmt: skip


def make_config(family: str, **changes):
    """A tiny config of a family."""
    model_type, _, options = FAMILIES[family]
    return AutoConfig.for_model(model_type, **(_COMMON | options | changes))


def tiny_model(family: str, folder, **changes):
    """A model of a family, fp32, seeded, saved as safetensors to `folder` and loaded back."""
    cls = getattr(transformers, FAMILIES[family][1])
    torch.manual_seed(0)
    cls(make_config(family, **changes)).save_pretrained(folder)
    return cls.from_pretrained(folder, dtype=torch.float32).eval()


@contextmanager
def counted_expansions(model):
    """Counts the calls of kv_b_proj, which are what rebuilding keys and values takes."""
    calls = []
    hooks = [
        module.kv_b_proj.register_forward_hook(lambda *_: calls.append(1))
        for module in model.modules()
        if hasattr(module, "kv_b_proj")
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def cache_of(output):
    """Its name depends on the release of transformers."""
    return output["cache"] if "cache" in output else output["past_key_values"]


def name_of_cache(model):
    return "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"


def run(model, pieces, mask=None, cache=None):
    """Logits (batch_size, tokens, vocabulary) of tokens that come piece by piece, and the cache."""
    logits, seen, begin = [], 0, 0 if cache is None else int(cache.get_seq_length())
    with torch.no_grad():
        for piece in pieces:
            seen += piece.shape[1]
            own = None if mask is None else mask[:, : begin + seen]
            positions = None if own is None else (own.long().cumsum(-1) - 1).clamp(min=0)[:, -piece.shape[1] :]
            arguments = {name_of_cache(model): cache}
            output = model(piece, attention_mask=own, position_ids=positions, use_cache=True, **arguments)
            cache = cache_of(output)
            logits.append(output.logits)
    return torch.cat(logits, dim=1), cache


def assert_close(actual, expected):
    """fp32 rounding: logits are of order 5, in other orders of summation."""
    assert expected.std() > 0.5
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
