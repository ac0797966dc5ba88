"""The layer against transformers' attention on the same weights, and its ways of attending against each other."""

import dataclasses
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla import PRESETS, MLAConfig, MultiHeadLatentAttention, begin_step, config_from_json
from mla.cache import PagedCache
from mla.reference import naive_reference
from mla.rope import apply_rope
from mla.weights import split_kv_b_proj

YARN = dict(yarn_factor=40.0, yarn_mscale=0.707, yarn_mscale_all_dim=0.707, original_max_seq_len=64)
CONFIGS = {
    "low-rank": PRESETS["tiny"],
    "direct-yarn": dataclasses.replace(PRESETS["tiny"], q_lora_rank=None, **YARN),
    "uneven-widths": dataclasses.replace(PRESETS["tiny"], qk_nope_head_dim=24, v_head_dim=40, rope_order="halves"),
}
PAGE_SIZE = 8
NUM_LAYERS = 2


def _layer(config: MLAConfig, device="cpu", dtype=torch.float32) -> MultiHeadLatentAttention:
    generator = torch.Generator().manual_seed(0)
    layer = MultiHeadLatentAttention(config, layer_idx=1, dtype=dtype)
    for parameter in layer.parameters():
        # scores of order 1 to 10, so that the softmax is no mean, and norms that are not all ones
        std = 2.0 * parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 1.0
        parameter.data.normal_(std=std, generator=generator)
    return layer.requires_grad_(False).to(device)


def _hidden(num_tokens, config, device="cpu", dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, config.hidden_size, generator=generator).to(device, dtype)


def _cache(config, device="cpu", num_pages=40, dtype=torch.float32) -> PagedCache:
    return PagedCache(
        num_pages, PAGE_SIZE, config.cache_dim, num_layers=NUM_LAYERS, dtype=dtype, device=device, poison=True
    )


def _run(layer, cache, requests, hidden_states, num_tokens):
    """One pass; hidden_states request by request."""
    return layer(hidden_states, begin_step(cache, requests, num_tokens, num_heads=layer.config.num_heads))


@pytest.fixture(params=CONFIGS)
def layer(request, device):
    return _layer(CONFIGS[request.param], device)


def test_decode_is_the_naive_reference(device):
    """By hand from the parameters: projections, norms, rotation, then `naive_reference` for the last token."""
    layer = _layer(CONFIGS["direct-yarn"], device)
    config, n = layer.config, 21
    x = _hidden(n, config, device)
    positions = torch.arange(n, device=device)
    q = (x @ layer.q_proj.weight.T).view(n, config.num_heads, config.qk_head_dim)
    q_pe = apply_rope(q[-1, :, config.qk_nope_head_dim :], positions[-1:], config, "interleaved")
    latent, k_pe = (x @ layer.kv_a_proj_with_mqa.weight.T).split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
    latent = latent * (latent.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * layer.kv_a_layernorm.weight
    rows = torch.cat((latent, apply_rope(k_pe, positions, config, "interleaved")), dim=-1)
    expected, _ = naive_reference(
        q[-1:, :, : config.qk_nope_head_dim], q_pe[None], rows[None],
        *split_kv_b_proj(layer.kv_b_proj.weight, config), torch.tensor([n]), softmax_scale=config.softmax_scale,
    )  # fmt: skip
    cache = _cache(config, device)
    request = cache.allocate()
    _run(layer, cache, [request], x[:-1], n - 1)
    out = _run(layer, cache, [request], x[-1:], 1)
    torch.testing.assert_close(out, expected.flatten(1) @ layer.o_proj.weight.T, atol=2e-5, rtol=2e-5)


def test_cache_holds_one_latent_row_a_token(layer, device):
    """The rows are in the layer's own pool, and nothing else is written."""
    config = layer.config
    cache = _cache(config, device)
    request = cache.allocate()
    x = _hidden(11, config, device)
    _run(layer, cache, [request], x, 11)
    assert cache.kv_cache.isnan()[0].all()
    written = ~cache.kv_cache[1].isnan()
    assert written.all(-1).sum() == 11
    assert written.sum() == 11 * config.cache_dim


def _in_chunks(layer, x, chunks, device):
    cache = _cache(layer.config, device)
    request = cache.allocate()
    ends = itertools.accumulate(chunks)
    return torch.cat([_run(layer, cache, [request], x[e - n : e], n) for e, n in zip(ends, chunks, strict=True)])


@pytest.mark.parametrize("chunks", [(20,), (7, 13), (1, 9, 8, 2), (8, 12), (19, 1)], ids=str)
def test_chunks_are_the_whole(layer, chunks, device, monkeypatch):
    """Prefill at once, in chunks and token by token is one function; cached tokens come in blocks of two pages."""
    monkeypatch.setattr("mla.layer.CONTEXT_TOKENS", 2 * PAGE_SIZE)
    x = _hidden(20, layer.config, device)
    whole = layer(x[None])[0]
    torch.testing.assert_close(_in_chunks(layer, x, chunks, device), whole, atol=2e-5, rtol=2e-5)


def test_token_by_token_is_the_whole(layer, device):
    x = _hidden(6, layer.config, device)
    torch.testing.assert_close(_in_chunks(layer, x, (1,) * 6, device), layer(x[None])[0], atol=2e-5, rtol=2e-5)


def test_ragged_batch(layer, device):
    """Requests of different lengths, in different states, give what each gives alone."""
    config = layer.config
    prompts, chunks = [5, 17, 8], [4, 1, 10]
    x = [_hidden(a + b + 1, config, device, seed=i) for i, (a, b) in enumerate(zip(prompts, chunks, strict=True))]
    cache = _cache(config, device)
    requests = [cache.allocate() for _ in x]
    firsts = _run(layer, cache, requests, torch.cat([r[:n] for r, n in zip(x, prompts, strict=True)]), prompts)
    seconds = torch.cat([r[n : n + m] for r, n, m in zip(x, prompts, chunks, strict=True)])
    seconds = _run(layer, cache, requests, seconds, chunks)
    last = _run(layer, cache, requests, torch.stack([r[-1] for r in x]), 1)
    for b, (first, second) in enumerate(zip(firsts.split(prompts), seconds.split(chunks), strict=True)):
        whole = layer(x[b][None])[0]
        got = torch.cat((first, second, last[b : b + 1]))
        torch.testing.assert_close(got, whole, atol=2e-5, rtol=2e-5)


def test_even_batch(layer, device):
    config = layer.config
    x = torch.stack([_hidden(14, config, device, seed=i) for i in range(3)])
    cache = _cache(config, device)
    requests = [cache.allocate() for _ in x]
    first = _run(layer, cache, requests, x[:, :9].flatten(0, 1), 9).view(3, 9, -1)
    second = _run(layer, cache, requests, x[:, 9:].flatten(0, 1), 5).view(3, 5, -1)
    torch.testing.assert_close(torch.cat((first, second), dim=1), layer(x), atol=2e-5, rtol=2e-5)


def test_decode_rebuilds_nothing(device, monkeypatch):
    layer = _layer(CONFIGS["low-rank"], device)
    cache = _cache(layer.config, device)
    request = cache.allocate()
    x = _hidden(9, layer.config, device)
    _run(layer, cache, [request], x[:-1], 8)

    def fail(*arguments):
        raise AssertionError("keys and values were rebuilt")

    monkeypatch.setattr(layer, "_rebuild", fail)
    monkeypatch.setattr(layer.kv_b_proj, "forward", fail)
    assert _run(layer, cache, [request], x[-1:], 1).isfinite().all()


class _LargestOutput(TorchDispatchMode):
    """Elements of the largest tensor that any operator returned."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("v_head_dim", [16, 48], ids=lambda v: f"v{v}")
def test_prefill_holds_no_square_matrix(v_head_dim, device):
    """Values narrower and wider than keys; the largest tensor grows with the tokens, not with their square."""
    layer = _layer(dataclasses.replace(PRESETS["tiny"], num_heads=2, v_head_dim=v_head_dim), device)

    def largest(num_tokens):
        x = _hidden(num_tokens, layer.config, device)
        with _LargestOutput() as mode, torch.no_grad():
            layer(x[None])
        return mode.numel

    assert largest(2048) == 4 * largest(512)
    assert largest(2048) < 2048**2 / 8


def test_gradient_without_a_cache(device):
    """Against finite differences, along one direction."""
    layer = _layer(CONFIGS["uneven-widths"]).double()
    x = _hidden(7, layer.config).double()[None].requires_grad_()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (layer(x).square().sum()).backward()
    with torch.no_grad():
        up, down = (layer(x + e * direction).square().sum() for e in (1e-5, -1e-5))
    torch.testing.assert_close((x.grad * direction).sum(), (up - down) / 2e-5, rtol=1e-5, atol=1e-5)


def _transformers(family: str, **changes):
    transformers = pytest.importorskip("transformers")
    module = __import__(
        f"transformers.models.deepseek_{family.lower()}.modeling_deepseek_{family.lower()}", fromlist=["x"]
    )
    options = dict(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24, num_hidden_layers=1, vocab_size=32,
        max_position_embeddings=256, attn_implementation="eager",
    ) | changes  # fmt: skip
    config = getattr(transformers, f"Deepseek{family}Config")(**options)
    return config, getattr(module, f"Deepseek{family}Attention"), getattr(module, f"Deepseek{family}RotaryEmbedding")


HF_YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=8.0, mscale=0.707, mscale_all_dim=0.5, beta_fast=32, beta_slow=1,
    original_max_position_embeddings=32,
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("V2", dict(q_lora_rank=None)),
        ("V2", dict(rope_parameters=HF_YARN)),
        ("V3", dict(rope_parameters=HF_YARN)),
        ("V3", dict(rope_interleave=False, rope_parameters=dict(rope_type="default", rope_theta=500.0))),
        ("V3", dict(attention_bias=True)),
    ],
    ids=["v2-direct", "v2-yarn", "v3-yarn", "v3-halves", "v3-bias"],
)
def test_equals_transformers(family, changes, device):
    hf_config, attention, rotary = _transformers(family, **changes)
    config = config_from_json(hf_config.to_dict())
    ours = _layer(config, device)
    theirs = attention(hf_config, layer_idx=0).eval().to(device)
    theirs.load_state_dict(ours.state_dict())
    n = 40
    x = torch.stack([_hidden(n, config, device, seed=i) for i in range(2)])
    positions = torch.arange(n, device=device)[None].expand(2, -1)
    mask = torch.full((n, n), -torch.inf, device=device).triu(1)[None, None]
    with torch.no_grad():
        embeddings = rotary(hf_config).to(device)(x, positions)
        expected, _ = theirs(x, position_embeddings=embeddings, attention_mask=mask)
    torch.testing.assert_close(ours(x), expected, atol=3e-5, rtol=3e-5)
    cache = _cache(config, device)
    requests = [cache.allocate() for _ in x]
    _run(ours, cache, requests, x[:, :-1].flatten(0, 1), n - 1)
    torch.testing.assert_close(_run(ours, cache, requests, x[:, -1], 1), expected[:, -1], atol=3e-5, rtol=3e-5)


def test_wrong_shapes_are_refused(device):
    layer = _layer(CONFIGS["low-rank"], device)
    x = _hidden(6, layer.config, device)
    with pytest.raises(ValueError, match=r"expected \(batch_size, tokens, 64\).*got \(6, 64\)"):
        layer(x)
    cache = _cache(layer.config, device)
    request = cache.allocate()
    with pytest.raises(ValueError, match=r"expected \(5, 64\), the step's \(5,\) new tokens.*got \(6, 64\)"):
        layer(x, begin_step(cache, [request], 5))
    with pytest.raises(ValueError, match="at least 1 new token of every request, got"):
        begin_step(cache, [request], 0)
    layer.layer_idx = NUM_LAYERS
    with pytest.raises(ValueError, match="expected rows of 48 for layer 2, got rows of 48 in 2 layers"):
        layer(x, begin_step(cache, [request], 6))
    layer.layer_idx = 0
    with pytest.raises(ValueError, match="expected rows of 48 for layer 0, got rows of 40"):
        layer(x, begin_step(other := PagedCache(4, 8, 40, dtype=torch.float32, device=device), [other.allocate()], 6))
