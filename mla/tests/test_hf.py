"""Patched transformers models give the original's logits, from a cache of latent rows, without rebuilding keys."""

# before transformers, which imports triton: without a GPU the interpreter must be chosen first
import mla.kernels  # noqa: F401

# isort: split
import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from mla import patch_model, unpatch_model
from mla.hf.cache import LatentLayer, latent_layers
from mla.hf.store import PAGE_SIZE
from mla.tests.hf_models import FAMILIES, assert_close, counted_expansions, name_of_cache, run, tiny_model

NEW_TOKENS = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(original, patched) of a family; made once."""
    made = {}

    def get(family):
        if family not in made:
            original = tiny_model(family, tmp_path_factory.mktemp(family))
            made[family] = original, patch_model(copy.deepcopy(original))
        return made[family]

    return get


@pytest.fixture
def tokens():
    return torch.randint(2, 61, (3, 9 + NEW_TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_originals(models, tokens, family):
    """A prompt, decoded tokens and a chunk after them, in a batch with padding on the left."""
    original, patched = models(family)
    # the interpreter takes its time: DeepSeek's own families at length, those alike in short
    num_decoded = NEW_TOKENS if family in ("v2-lite", "v2", "v3") else 5
    mask = torch.ones(len(tokens), tokens.shape[1] + 4, dtype=torch.long)
    mask[1, :4], mask[2, :8] = 0, 0
    tokens = torch.cat((tokens, tokens[:, :4]), dim=1)
    pieces = tokens[:, : 13 + num_decoded].split([9, *[1] * num_decoded, 4], dim=1)
    # recurrent layers take a chunk only as the first
    pieces = pieces[:-1] if family == "kimi-linear" else pieces
    expected, cache = run(original, pieces, mask)
    assert not latent_layers(cache)
    with counted_expansions(patched) as expansions:
        actual, cache = run(patched, pieces[:1], mask)
        attention_layers = len(latent_layers(cache))
        # expansions of the prompt, none of decode steps
        assert len(expansions) == attention_layers > 0
        decoded, cache = run(patched, pieces[1 : 1 + num_decoded], mask, cache)
        assert len(expansions) == attention_layers
        logits = torch.cat((actual, decoded), dim=1)
        if chunk := pieces[1 + num_decoded :]:
            logits = torch.cat((logits, run(patched, chunk, mask, cache)[0]), dim=1)
    real = mask[:, : expected.shape[1]].bool()
    assert_close(logits[real], expected[real])


def test_all_that_is_cached_is_latent_rows(models, tokens):
    """kv_lora_rank + qk_rope_head_dim values a token and layer, without the padding, and a spare quarter at most."""
    _, patched = models("v3")
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    _, cache = run(patched, tokens.split([9, *[1] * NEW_TOKENS], dim=1), mask)
    layers = latent_layers(cache)
    assert len(layers) == len(cache.layers) == patched.config.num_hidden_layers
    assert layers[0].store.seq_lens.tolist() == [29, 24, 29]
    for layer in layers:
        assert layer.keys is None and layer.values is None
        assert layer.rows.shape == (3, PAGE_SIZE, 16 + 16)
    assert cache.get_seq_length() == 29
    # past one page memory grows by a quarter, not twofold
    _, cache = run(patched, [tokens[:, :1].expand(3, 3 * PAGE_SIZE)], None)
    assert latent_layers(cache)[0].rows.shape[1] == 4 * PAGE_SIZE


@pytest.mark.parametrize("family", ["v2", "v3"])
def test_chunks_equal_the_whole(models, tokens, family):
    original, patched = models(family)
    expected, _ = run(original, [tokens])
    for sizes in ([29], [1, 8, 5, 15], [10, 1, 1, 17]):
        assert_close(run(patched, tokens.split(sizes, dim=1))[0], expected)


def test_without_a_cache(models, tokens):
    original, patched = models("v3")
    mask = torch.ones_like(tokens)
    mask[1, :5], mask[2, -3:] = 0, 0
    with torch.no_grad():
        expected = original(tokens, attention_mask=mask, use_cache=False).logits
        actual = patched(tokens, attention_mask=mask, use_cache=False).logits
        assert_close(patched(tokens, use_cache=False).logits, original(tokens, use_cache=False).logits)
    assert_close(actual[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("use_cache", [False, True])
def test_gradients(models, tokens, use_cache):
    """Training a patched model works as before."""
    grads = []
    for model in models("v2"):
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=use_cache).loss.backward()
        grads.append(model.model.layers[0].self_attn.kv_b_proj.weight.grad.clone())
        model.zero_grad()
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["empty dynamic", "dynamic with config", "static"])
def test_takes_the_librarys_caches(models, tokens, kind):
    original, patched = models("v3")
    config = patched.config
    cache = {
        "empty dynamic": lambda: DynamicCache(),
        "dynamic with config": lambda: DynamicCache(config=config),
        "static": lambda: StaticCache(config=config, max_cache_len=40),
    }[kind]()
    pieces = tokens[:, :12].split([9, 1, 1, 1], dim=1)
    actual, returned = run(patched, pieces, cache=cache)
    assert returned is cache
    assert all(isinstance(layer, LatentLayer) for layer in cache.layers)
    assert_close(actual, run(original, pieces)[0])
    if kind == "static":
        assert cache.layers[0].rows.shape == (3, PAGE_SIZE, 32)
        assert cache.get_max_length() == 40
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert_close(run(patched, pieces, cache=cache)[0], actual)


def test_a_cache_follows_changes_of_the_batch(models, tokens):
    original, patched = models("v3")
    pieces = tokens[:2, :10].split([9, 1], dim=1)
    _, cache = run(patched, pieces[:1])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    expected, _ = run(original, [pieces[0].flip(0), pieces[1].flip(0)])
    assert_close(run(patched, [pieces[1].flip(0)], cache=cache)[0], expected[:, -1:])


def test_unpatch_restores_the_model(models, tokens):
    original = models("v3")[0]
    model = copy.deepcopy(original)
    before = model.config.to_dict()
    patch_model(model)
    _, cache = run(model, [tokens])
    unpatch_model(model)
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == original.config._attn_implementation
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, original(tokens).logits)
    with pytest.raises(RuntimeError, match=r"expected a model that mla\.patch_model has changed"):
        run(model, [tokens[:, :1]], cache=cache)
    with pytest.raises(ValueError, match="is not patched"):
        unpatch_model(model)


def test_unsupported_models_are_refused(tmp_path):
    small = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=61)
    with pytest.raises(ValueError, match=r"DeepseekV3Attention.*got LlamaForCausalLM"):
        patch_model(LlamaForCausalLM(LlamaConfig(**small)))
    with pytest.raises(ValueError, match="expected a transformers PreTrainedModel, got Linear"):
        patch_model(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="powers of two from 16 up, got 24 and 16"):
        patch_model(tiny_model("v3", tmp_path, kv_lora_rank=24))
    model = tiny_model("v3", tmp_path)
    model.model.layers[0].self_attn.kv_b_proj.to(torch.float64)
    with pytest.raises(ValueError, match=r"plain Linear in bf16, fp16 or fp32, got Linear in torch\.float64"):
        patch_model(model)
    # such as an adapter puts around it
    model.model.layers[0].self_attn.kv_b_proj = torch.nn.Sequential(torch.nn.Linear(16, 88, bias=False))
    model.model.layers[0].self_attn.kv_b_proj.weight = torch.nn.Parameter(torch.zeros(88, 16))
    with pytest.raises(ValueError, match="got Sequential in"):
        patch_model(model)


def test_sparse_attention_is_refused():
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    config = DeepseekV32Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16, index_n_heads=2, index_head_dim=32,
    )  # fmt: skip
    with pytest.raises(ValueError, match="got DeepseekV32Attention"):
        patch_model(DeepseekV32ForCausalLM(config))


def test_unsupported_calls_are_refused(models, tokens):
    original, patched = models("v3")
    name = name_of_cache(patched)
    with pytest.raises(ValueError, match="got one that is; "):
        patch_model(patched)
    with pytest.raises(ValueError, match=r"attention_mask: expected \(batch_size, tokens\).*got \(3, 1, 29, 29\)"):
        patched(tokens, attention_mask=torch.ones(3, 1, 29, 29))
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        patched(tokens, output_attentions=True)
    with pytest.raises(ValueError, match="several sequences packed"):
        patched(tokens[:1, :6], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)
    _, cache = run(original, [tokens])
    with pytest.raises(ValueError, match="one that an unpatched model filled"):
        patched(tokens[:, :1], **{name: cache})
    offloaded = DynamicCache()
    offloaded.offloading = True
    with pytest.raises(ValueError, match="offloading"):
        patched(tokens[:, :1], **{name: offloaded})
    _, cache = run(patched, [tokens])
    with pytest.raises(ValueError, match="batch size that it was filled with, 3, got 2"):
        patched(tokens[:2, :1], **{name: cache})
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        cache.crop(-1)
