"""The prefill kernel against a reference in fp64, and torch's attention in the same shapes."""

import pytest
import torch

from mla import mla_prefill
from mla.kernels import prefill as kernels
from mla.kernels.launch import Device
from mla.kernels.prefill import CONFIGS, SMALL_CONFIGS, PrefillConfig, fitting_configs
from mla.prefill import assemble, attend_prompt, merge_attention, prompt_backends, sdpa_prefill
from mla.tests.conftest import dtype_id, kernel_dtypes

SCALE = 0.2
SMALL = PrefillConfig(16, 16, 4, 1)


def _inputs(
    q_len, kv_len, *, batch_size=2, num_heads=2, widths=(16, 16, 16), dtype=torch.float32, device="cpu", seed=0
):
    """q, k_nope, k_pe, v; scaled scores of a deviation of 3 and more, larger for later keys."""
    nope, rope, v_width = widths
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (batch_size, q_len, num_heads, nope + rope), "k_nope": (batch_size, kv_len, num_heads, nope),
        "k_pe": (batch_size, kv_len, rope), "v": (batch_size, kv_len, num_heads, v_width),
    }  # fmt: skip
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    # maxima that move from tile to tile, which a kernel that forgets to correct gets wrong
    tensors["k_nope"] *= torch.linspace(1.0, 6.0, kv_len)[:, None, None]
    return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}


def _reference(q, k_nope, k_pe, v, is_causal=True, cached_lens=None, kv_lens=None):
    """In fp64, with masked scores; tokens that no query may see are left out, so that they may hold NaN."""
    _, keys, _ = assemble(q, k_nope, k_pe, v, for_flash=False)
    outs, lses = [], []
    for b, (q_len, kv_len) in enumerate([(q.shape[1], k_nope.shape[1])] * len(q)):
        end = kv_len if kv_lens is None else int(kv_lens[b])
        cached = kv_len - q_len if cached_lens is None else int(cached_lens[b])
        scores = torch.einsum("qhd,khd->qhk", q[b].double(), keys[b, :end].double()) * SCALE
        if is_causal:
            is_seen = torch.arange(end)[None] <= cached + torch.arange(q_len)[:, None]
            scores = scores.masked_fill(~is_seen[:, None].to(scores.device), -torch.inf)
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - lse[..., None].nan_to_num(neginf=0.0))
        outs.append(torch.einsum("qhk,khv->qhv", p, v[b, :end].double()))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def _check(inputs, config=SMALL, **options):
    out, lse = mla_prefill(**inputs, softmax_scale=SCALE, config=config, **options)
    expected, expected_lse = _reference(**inputs, **options)
    dtype = inputs["q"].dtype
    # fp16 and bf16: probabilities and output are each rounded once, values are of order 1 to 4
    atol = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", kernel_dtypes(), ids=dtype_id)
@pytest.mark.parametrize("q_len", [1, 15, 16, 17, 50], ids=lambda n: f"q{n}")
def test_prompts(q_len, dtype, device):
    _check(_inputs(q_len, q_len, dtype=dtype, device=device))


@pytest.mark.parametrize("config", [*CONFIGS, *SMALL_CONFIGS, PrefillConfig(16, 64, 4, 1)], ids=str)
def test_every_configuration(config, device):
    _check(_inputs(150, 150, batch_size=1, num_heads=1, dtype=torch.float16, device=device), config)


@pytest.mark.parametrize("widths", [(32, 16, 16), (24, 16, 40), (16, 24, 16), (16, 8, 64)], ids=str)
def test_widths(widths, device):
    """Keys and values of different widths, also such as are no power of two."""
    _check(_inputs(20, 33, widths=widths, device=device))


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 40), (5, 16), (16, 17), (20, 50), (33, 97)])
@pytest.mark.parametrize("dtype", kernel_dtypes(), ids=dtype_id)
def test_chunks_against_cached_keys(q_len, kv_len, dtype, device):
    _check(_inputs(q_len, kv_len, dtype=dtype, device=device))


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_ragged_lengths_with_nan_behind_them(is_causal, device):
    """Each request has cached keys of its own number; what lies behind its last key is never read."""
    kv_lens = torch.tensor([40, 12, 29], dtype=torch.int32, device=device)
    inputs = _inputs(12, 40, batch_size=3, device=device)
    for b, n in enumerate(kv_lens.tolist()):
        for name in ("k_nope", "k_pe", "v"):
            inputs[name][b, n:] = torch.nan
    _check(inputs, is_causal=is_causal, cached_lens=kv_lens - 12, kv_lens=kv_lens)


def test_queries_without_keys(device):
    """No keys at all, and queries that come before the first key: 0 and -inf."""
    inputs = _inputs(20, 30, device=device)
    lens = dict(kv_lens=torch.tensor([0, 30], dtype=torch.int32, device=device))
    _check(inputs, is_causal=False, **lens)
    cached_lens = torch.tensor([-5, -17], dtype=torch.int32, device=device)
    out, lse = mla_prefill(**inputs, softmax_scale=SCALE, cached_lens=cached_lens, config=SMALL)
    assert (out[0, :5] == 0).all()
    assert (lse[1, :17] == -torch.inf).all()
    assert lse[0, 5:].isfinite().all()
    _check(inputs, cached_lens=cached_lens)
    empty = {name: x[:, :0] for name, x in inputs.items() if name != "q"}
    out, lse = mla_prefill(inputs["q"], **empty, softmax_scale=SCALE, config=SMALL)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert mla_prefill(**{n: x[:0] for n, x in inputs.items()}, softmax_scale=SCALE)[0].shape == (0, 20, 2, 16)


def test_strided_views(device):
    """Keys and values cut out of what kv_b_proj returns, the rotated key out of cached rows; the rest is NaN."""
    inputs = _inputs(20, 50, device=device)
    up = torch.full((2, 50, 2, 40), torch.nan, device=device)
    up[..., :16], up[..., 20:36] = inputs["k_nope"], inputs["v"]
    rows = torch.full((2, 55, 48), torch.nan, device=device)
    rows[:, :50, 32:] = inputs["k_pe"]
    q = torch.full((20, 2, 2, 40), torch.nan, device=device)
    q[..., :32] = inputs["q"].transpose(0, 1)
    strided = dict(q=q[..., :32].transpose(0, 1), k_nope=up[..., :16], k_pe=rows[:, :50, 32:], v=up[..., 20:36])
    _check(strided)


def test_large_scores_do_not_overflow(device):
    inputs = _inputs(40, 40, device=device)
    inputs["q"] *= 60.0
    _check(inputs)


def test_parts_merge_to_the_whole(device):
    """Blocks of cached keys without a mask, then the chunk's own, as the layer attends."""
    inputs = _inputs(20, 60, device=device)
    q, keys = inputs.pop("q"), inputs
    options = dict(softmax_scale=SCALE, config=SMALL, out_dtype=torch.float32)
    whole = mla_prefill(q, **keys, **options)
    merged = mla_prefill(q, **{n: x[:, 40:] for n, x in keys.items()}, **options)
    for part in (slice(0, 24), slice(24, 40)):
        other = mla_prefill(q, **{n: x[:, part] for n, x in keys.items()}, is_causal=False, **options)
        merged = merge_attention(*merged, *other)
    torch.testing.assert_close(merged[0], whole[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(merged[1], whole[1], atol=1e-5, rtol=1e-5)
    nothing = torch.zeros_like(whole[0]), torch.full_like(whole[1], -torch.inf)
    assert torch.equal(merge_attention(*whole, *nothing)[0], whole[0])


def _force(monkeypatch, backends):
    monkeypatch.setattr("mla.prefill.prompt_backends", lambda *_, **__: backends)


@pytest.mark.parametrize("widths", [(16, 16, 16), (16, 16, 48)], ids=str)
@pytest.mark.parametrize("backends", [("flash", "math"), ("math",), ("fused",)], ids=str)
def test_prompt_by_every_way(widths, backends, device, monkeypatch):
    """What `attend_prompt` may choose computes the same."""
    _force(monkeypatch, backends)
    inputs = _inputs(30, 30, widths=widths, dtype=torch.float16, device=device)
    out = attend_prompt(**inputs, softmax_scale=SCALE)
    torch.testing.assert_close(out.double(), _reference(**inputs)[0], atol=4e-3, rtol=0)


@pytest.mark.parametrize("backends", [("flash", "math"), ("fused",)], ids=str)
def test_a_chunk_by_every_way(backends, device, monkeypatch):
    """New tokens behind cached ones, which a patched model has."""
    _force(monkeypatch, backends)
    inputs = _inputs(7, 40, dtype=torch.float16, device=device)
    out = attend_prompt(**inputs, softmax_scale=SCALE)
    torch.testing.assert_close(out.double(), _reference(**inputs)[0], atol=4e-3, rtol=0)


@pytest.mark.parametrize("is_there", [True, False], ids=["takes-it", "refuses"])
def test_the_kernel_attends_where_cudnn_refuses(is_there, device, monkeypatch):
    """Keys are put together for cuDNN without padding, and not at all where it would refuse."""
    _force(monkeypatch, ("cudnn", "fused"))
    seen = []
    monkeypatch.setattr("mla.prefill.can_use_cudnn_attention", lambda params: seen.append(params) or is_there)
    monkeypatch.setattr("mla.prefill.SDPAParams", lambda *arguments: arguments)
    monkeypatch.setattr("mla.prefill.mla_prefill", lambda *x, **options: ("fused",))
    made = []
    monkeypatch.setattr("mla.prefill.assemble", lambda *x, **o: made.append(o) or assemble(*x, **o))
    monkeypatch.setattr("mla.prefill.sdpa_prefill", lambda q, k, v, **o: made.append((q, k, v, o)) or v)
    inputs = _inputs(30, 30, widths=(16, 16, 16), dtype=torch.float16, device=device)
    out = attend_prompt(**inputs, softmax_scale=SCALE)
    q, k, v, mask, dropout, is_causal, _ = seen[0]
    assert (q.shape, k.shape, v.shape) == ((2, 2, 30, 32), (2, 2, 30, 32), (2, 2, 30, 16))
    assert (mask, dropout, is_causal) == (None, 0.0, True)
    if not is_there:
        assert (out, made) == ("fused", [])
        return
    assert made[0] == {"for_flash": False}
    q, k, v, options = made[1]
    assert (q.shape[-1], k.shape[-1], v.shape[-1]) == (32, 32, 16)
    assert options["backends"] == ("cudnn",)


RULE = dict(heads=128, widths=(192, 128), dtype=torch.bfloat16, capability=(9, 0))
FLASH, FP32 = ("flash", "efficient"), ("efficient",)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "changes", "expected"),
    [
        (1024, 1024, {}, ("fused",)),
        (4096, 4096, {}, ("fused",)),
        (8191, 8191, {}, ("fused",)),
        (8192, 8192, {}, ("cudnn", "fused")),
        (16384, 16384, {"heads": 16}, ("fused",)),
        (16384, 16384, {"heads": 2 * 16}, ("cudnn", "fused")),
        (100_000, 100_000, {"dtype": torch.float16}, ("cudnn", "fused")),
        (2048, 32768, {}, ("fused",)),
        (16384, 32768, {}, ("fused",)),
        (8192, 8192, {"needs_torch": True}, FLASH),
        (1024, 1024, {"needs_torch": True}, FLASH),
        (8192, 8192, {"dtype": torch.float32}, FP32),
        (1024, 1024, {"dtype": torch.float32, "needs_torch": True}, FP32),
        (8192, 8192, {"widths": (256, 256)}, FLASH),
        (1024, 1024, {"capability": (8, 0)}, FLASH),
        (8192, 8192, {"capability": (10, 0)}, FLASH),
        (8192, 8192, {"capability": None}, ("flash", "math")),
        (7, 40, {"capability": None, "dtype": torch.float64, "needs_torch": True}, ("flash", "math")),
    ],
)  # fmt: skip
def test_what_attends_a_prompt(q_len, kv_len, changes, expected):
    assert prompt_backends(q_len, kv_len, **(RULE | changes)) == expected


def test_dropout_and_gradients_are_torchs(device):
    """The fused kernel has neither."""
    inputs = _inputs(7, 40, device=device)
    kept = [attend_prompt(**inputs, softmax_scale=SCALE, dropout=0.5) for _ in range(2)]
    assert not torch.equal(*kept)
    inputs = {name: x.requires_grad_() for name, x in _inputs(30, 30, device=device).items()}
    attend_prompt(**inputs, softmax_scale=SCALE).sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs.values())


def test_what_the_rule_is_told(device, monkeypatch):
    """Lengths, widths, dtype and whether a gradient or dropout is asked for, read off the inputs."""
    told = []
    monkeypatch.setattr(
        "mla.prefill.prompt_backends", lambda *lens, **facts: told.append((lens, facts)) or ("flash", "math")
    )
    inputs = _inputs(7, 40, widths=(16, 16, 48), device=device)
    attend_prompt(**inputs, softmax_scale=SCALE)
    attend_prompt(**inputs, softmax_scale=SCALE, dropout=0.5)
    inputs["v"].requires_grad_()
    attend_prompt(**inputs, softmax_scale=SCALE)
    with torch.no_grad():
        attend_prompt(**inputs, softmax_scale=SCALE)
    assert [facts["needs_torch"] for _, facts in told] == [False, True, True, False]
    assert [lens for lens, _ in told] == [(7, 40)] * 4
    assert told[0][1]["heads"] == inputs["q"].shape[0] * inputs["q"].shape[2]
    assert (told[0][1]["widths"], told[0][1]["dtype"]) == ((32, 48), torch.float32)
    assert (told[0][1]["capability"] is None) == (device == "cpu")


def test_torchs_attention_of_a_chunk(device):
    """The last query sees the last key, as in the kernel."""
    inputs = _inputs(12, 30, dtype=torch.float16, device=device)
    assembled = assemble(**inputs, for_flash=True)
    out = sdpa_prefill(*assembled, softmax_scale=SCALE, backends=("flash", "math"))[..., :16]
    torch.testing.assert_close(out.double(), _reference(**inputs)[0], atol=4e-3, rtol=0)


def test_same_input_same_bits(device):
    inputs = _inputs(40, 50, dtype=torch.float16, device=device)
    first, again = (mla_prefill(**inputs, softmax_scale=SCALE) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_configurations_fit_shared_memory(monkeypatch, device):
    monkeypatch.setattr(kernels, "device_facts", lambda device: Device(132, 232_448, True))
    assert fitting_configs(128, 64, 128, 2, device)[0] == CONFIGS[0]
    assert fitting_configs(128, 64, 128, 4, device)[0] in SMALL_CONFIGS
    monkeypatch.setattr(kernels, "device_facts", lambda device: Device(108, 101_376, False))
    assert fitting_configs(128, 64, 128, 2, device)[0] in SMALL_CONFIGS
    monkeypatch.setattr(kernels, "device_facts", lambda device: Device(108, 1000, False))
    with pytest.raises(RuntimeError, match=r"expected a device with enough shared memory .* got 1000 bytes"):
        mla_prefill(**_inputs(4, 4, device=device), softmax_scale=SCALE)


WRONG = {
    "q is 3-d": (ValueError, "q: expected 4 dimensions", lambda t: t.update(q=t["q"][0])),
    "key of another width": (ValueError, "k_nope: expected shape", lambda t: t.update(k_nope=t["k_nope"][..., :8])),
    "values of other tokens": (ValueError, "v: expected shape", lambda t: t.update(v=t["v"][:, :-1])),
    "rotated key per head": (ValueError, "k_pe: expected 3", lambda t: t.update(k_pe=t["k_pe"][:, :, None])),
    "channels are strided": (ValueError, "contiguous", lambda t: t.update(v=torch.cat((t["v"],) * 2, -1)[..., ::2])),
    "lengths of another batch": (ValueError, "kv_lens: expected shape", lambda t: t.update(kv_lens=torch.ones(3))),
    "lengths are int64": (TypeError, "kv_lens: expected torch", lambda t: t.update(kv_lens=torch.ones(2).long())),
    "fp64": (TypeError, "q: expected bfloat16", lambda t: t.update(q=t["q"].double())),
    "values of another dtype": (TypeError, "v: expected bfloat16", lambda t: t.update(v=t["v"].half())),
    "another device": (RuntimeError, "v: expected q's device", lambda t: t.update(v=t["v"].to("meta"))),
    "needs a gradient": (RuntimeError, "no gradient", lambda t: t["q"].requires_grad_()),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_unsupported_input_is_refused(case, device):
    error, message, change = WRONG[case]
    inputs = _inputs(6, 6, device=device)
    change(inputs)
    with pytest.raises(error, match=message) as caught:
        mla_prefill(**inputs, softmax_scale=SCALE)
    assert "got" in str(caught.value)
