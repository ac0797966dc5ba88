"""The layer and its prefill kernel where only a GPU can show them: bf16 at real widths, long prompts, CUDA graphs."""

import dataclasses

import pytest
import torch

from mla import PRESETS, CacheStep, MultiHeadLatentAttention, begin_step, mla_prefill, prefill
from mla.cache import PagedCache
from mla.measure.prefill_cases import Gate, PrefillCase, draw_inputs

pytestmark = pytest.mark.gpu
LITE = PRESETS["deepseek-v2-lite"]
# V3's widths and rank of the query, fewer heads: what the kernel sees is the same
V3 = dataclasses.replace(PRESETS["deepseek-v3"], num_heads=32, hidden_size=1024)


def _layer(config, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    layer = MultiHeadLatentAttention(config, device="cuda", dtype=dtype).requires_grad_(False)
    for parameter in layer.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return layer


def _hidden(num_tokens, config, dtype=torch.bfloat16, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(num_tokens, config.hidden_size, generator=generator, device="cuda").to(dtype)


def _cache(config, num_tokens, batch_size=1, dtype=torch.bfloat16):
    cache = PagedCache(batch_size * (num_tokens // 64 + 2), 64, config.cache_dim, dtype=dtype, poison=True)
    return cache, [cache.allocate() for _ in range(batch_size)]


def _error(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(
    "case",
    [
        PrefillCase(1000, 1000),
        PrefillCase(1000, 5000),
        PrefillCase(1, 777),
        PrefillCase(257, 300, "deepseek-v2-lite", batch_size=3),
        PrefillCase(500, 900, dtype="float16"),
        PrefillCase(300, 300, "deepseek-v2-lite", dtype="float32"),
    ],
    ids=lambda c: f"{c.name}-{c.dtype}",
)
def test_kernel_at_real_widths(case):
    (inputs,) = draw_inputs(case, "cuda", seed=0, at_most=1)
    if case.dtype == "float32":
        # the benchmark's reference is in fp32 itself
        out, lse = mla_prefill(*inputs, softmax_scale=case.config.softmax_scale)
        expected, expected_lse = mla_prefill(*(x.half() for x in inputs), softmax_scale=case.config.softmax_scale)
        assert _error(out, expected) < 2e-3
        assert _error(lse, expected_lse) < 1e-3
        return
    verdict = Gate(case, inputs).check(*mla_prefill(*inputs, softmax_scale=case.config.softmax_scale))
    assert verdict["passed"], verdict


@pytest.mark.parametrize("has_cudnn", [True, False], ids=["cudnn", "no-cudnn"])
@pytest.mark.parametrize("n", [8192, 8201], ids=lambda n: f"n{n}")
def test_a_long_prompt_is_cudnns_where_it_can(n, has_cudnn, monkeypatch):
    """Also at lengths that fill no tile; the fused kernel's where cuDNN is switched off."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("what attends on other GPUs than Hopper is torch's choice")
    case, taken = PrefillCase(n, n, "deepseek-v2-lite"), []
    monkeypatch.setattr(prefill, "CUDNN_FROM", 16 * 8192**2)
    for name in ("sdpa_prefill", "mla_prefill"):
        function = getattr(prefill, name)
        monkeypatch.setattr(
            prefill, name, lambda *x, f=function, **o: taken.append(o.get("backends", ("fused",))) or f(*x, **o)
        )
    (inputs,) = draw_inputs(case, "cuda", seed=0, at_most=1)
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
    try:
        out = prefill.attend_prompt(*inputs, softmax_scale=case.config.softmax_scale)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)
    assert taken == [("cudnn",) if has_cudnn else ("fused",)]
    verdict = Gate(case, inputs).check(out, None)
    assert verdict["passed"], verdict


@pytest.mark.parametrize("config", [LITE, V3], ids=["v2-lite", "v3"])
def test_chunks_and_decode_are_the_whole(config):
    """Chunk by chunk, no further from the layer in fp32 than twice the error of the whole prompt at once in bf16."""
    n, chunks = 1203, (700, 502, 1)
    layer, x = _layer(config), _hidden(1203, config)
    exact = _layer(config, torch.float32)
    exact.load_state_dict(layer.state_dict())
    with torch.no_grad():
        expected, whole = exact(x.float()[None])[0], layer(x[None])[0]
    cache, requests = _cache(config, n)
    outs = [layer(part, begin_step(cache, requests, len(part), num_heads=config.num_heads)) for part in x.split(chunks)]
    assert _error(whole, expected) < 0.015
    for got, at_once, want in zip(outs, whole.split(chunks), expected.split(chunks), strict=True):
        assert _error(got, want) <= 2 * _error(at_once, want)


def test_prompt_of_128k_tokens():
    """Scores of 16 heads would be 512 GiB. What is held is a small multiple of queries, keys and values."""
    n = 131_072
    layer, x = _layer(LITE), _hidden(131_072, LITE)
    cache, requests = _cache(LITE, n)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = layer(x, begin_step(cache, requests, n))
    peak = torch.cuda.max_memory_allocated() - before
    assert out.isfinite().all()
    one = n * LITE.num_heads * LITE.qk_head_dim * 2
    assert peak < 12 * one, f"{peak / one:.1f} times the queries"
    # the same rows decode on: the last token again, as one more
    again = layer(x[-1:], begin_step(cache, requests, 1))
    assert again.isfinite().all()


def _decode_step(cache, requests):
    slots = torch.zeros(len(requests), dtype=torch.int64, device="cuda")
    table = torch.zeros(len(requests), 20, dtype=torch.int32, device="cuda")
    seq_lens = torch.zeros(len(requests), dtype=torch.int32, device="cuda")

    def refill():
        cache.reserve(requests, 1, out=slots)
        cache.update_tables(requests, table, seq_lens)

    return CacheStep(cache, slots, table, seq_lens, (1,) * len(requests)), refill


def test_decode_in_a_graph_without_synchronisation():
    """Replayed with lengths that grow in place, it gives what eager calls on another cache give."""
    layer, prompt = _layer(LITE), _hidden(3 * 200, LITE)
    tokens = [_hidden(3, LITE, seed=10 + i) for i in range(70)]
    caches = [_cache(LITE, 400, batch_size=3) for _ in range(2)]
    for cache, requests in caches:
        layer(prompt, begin_step(cache, requests, 200))
    (cache, requests), (eager_cache, eager_requests) = caches
    step, refill = _decode_step(cache, requests)
    x = tokens[0].clone()
    refill()
    layer(x, step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, step)
    for i, token in enumerate(tokens):
        if i > 0:
            refill()
        x.copy_(token)
        graph.replay()
        expected = layer(token, begin_step(eager_cache, eager_requests, 1, num_heads=LITE.num_heads))
        assert _error(out, expected) < 1e-2, i
