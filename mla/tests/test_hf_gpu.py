"""Patched transformers models on a GPU: bf16 at real widths, compiled decode, memory of a long prompt."""

# before transformers, as in the other tests of models
import mla.kernels  # noqa: F401

# isort: split
import copy

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, StaticCache

from mla import patch_model
from mla.hf.cache import latent_layers
from mla.tests.hf_models import name_of_cache, run

pytestmark = pytest.mark.gpu
_DENSE = dict(
    vocab_size=512, intermediate_size=512, num_hidden_layers=2, first_k_dense_replace=2, n_routed_experts=4,
    num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, max_position_embeddings=200_000, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    initializer_range=0.05,
)  # fmt: skip
SHAPES = {
    "v2-lite": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        dict(hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None),
    ),
    "v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        dict(hidden_size=1024, num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536),
    ),
}


def make_model(shape, dtype=torch.float32, **changes):
    cls, config, options = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device("cuda"):
        return cls(config(**(_DENSE | options | changes))).to(dtype).eval()


@pytest.fixture
def tokens():
    return torch.randint(2, 512, (4, 700), generator=torch.Generator().manual_seed(0)).cuda()


@pytest.fixture
def mask(tokens):
    mask = torch.ones_like(tokens)
    mask[1, :100], mask[2, :129] = 0, 0
    return mask


@pytest.mark.parametrize("shape", SHAPES)
def test_logits(shape, tokens, mask):
    """fp32 to rounding; in bf16 the patched model errs at most twice as much as the original does."""
    original = make_model(shape)
    pieces = tokens.split([600, *[1] * 20, 80], dim=1)
    expected, _ = run(original, pieces, mask)
    real = mask.bool()
    actual, _ = run(patch_model(copy.deepcopy(original)), pieces, mask)
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=2e-3)
    half = original.bfloat16()
    errors = {}
    for name, model in (("original", copy.deepcopy(half)), ("patched", patch_model(half))):
        logits, cache = run(model, pieces, mask)
        errors[name] = ((logits.float() - expected)[real].norm() / expected[real].norm()).item()
    assert latent_layers(cache)[0].store.seq_lens.tolist() == [700, 600, 571, 700]
    assert errors["patched"] <= 2 * errors["original"], errors


def test_decoding_never_synchronises(tokens):
    model = patch_model(make_model("v3", torch.bfloat16))
    _, cache = run(model, tokens[:, :100].split([98, 1, 1], dim=1))
    name = name_of_cache(model)
    token = tokens[:, :1].clone()
    positions = torch.full((4, 1), 100, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            model(token, position_ids=positions, **{name: cache})
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_generate_with_a_static_cache(tokens, mask, is_compiled):
    """`generate` compiles decoding by itself where the cache is static, and replays it as CUDA graphs."""
    original = make_model("v2-lite", num_hidden_layers=1, first_k_dense_replace=1)
    options = dict(max_new_tokens=12, do_sample=False, attention_mask=mask[:, :200])
    with torch.no_grad():
        expected = original.generate(tokens[:, :200], **options)
        patched = patch_model(original)
        actual = patched.generate(
            tokens[:, :200], cache_implementation="static", disable_compile=not is_compiled, **options
        )
    assert torch.equal(actual, expected)


def test_a_prompt_of_128k_tokens():
    """No (tokens, tokens) matrix anywhere: at 16 heads in bf16 its scores alone would take 512 GiB."""
    model = patch_model(make_model("v2-lite", torch.bfloat16, num_hidden_layers=1, first_k_dense_replace=1))
    prompt = torch.randint(2, 512, (1, 131_072), device="cuda")
    cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + 64)
    name = name_of_cache(model)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        for piece in prompt.split([65_536, 65_535, 1], dim=1):
            logits = model(piece, logits_to_keep=1, **{name: cache}).logits
    assert torch.isfinite(logits).all()
    assert torch.cuda.max_memory_allocated() - before < 12 * 2**30
