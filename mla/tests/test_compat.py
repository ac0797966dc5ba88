import dataclasses
import inspect
import math
import warnings

import pytest
import torch

from mla import PRESETS, compat
from mla.compat import flash_mla_with_kvcache, get_mla_metadata
from mla.problem import make_problem
from mla.reference import absorbed_reference

DTYPE = torch.float16
RANK, SCALE = 32, 0.2
# shorter than q_len, so that with a mask some tokens see nothing
LENGTHS = [0, 1, 2, 37, 50]


def _case(device, q_len=1, lengths=LENGTHS, seed=0, num_heads=4):
    """q (batch_size, q_len, num_heads, 48), FlashMLA's arguments after it, and the contiguous cache."""
    config = dataclasses.replace(PRESETS["tiny"], num_heads=q_len * num_heads)
    p = make_problem(config, lengths, page_size=16, dtype=DTYPE, device=device, seed=seed)
    q = p.q_absorbed.unflatten(1, (q_len, num_heads))
    return q, (p.kv_cache[:, :, None], p.block_table, p.seq_lens, RANK), p.kv


def _expected(q, kv, seq_lens, causal, scale=SCALE):
    """Token by token in fp64, with FlashMLA's layout of the lse and its sign for tokens that see nothing."""
    outs, lses = [], []
    for i in range(q.shape[1]):
        seen = (seq_lens - (q.shape[1] - 1 - i)).clamp(min=0) if causal else seq_lens
        out, lse = absorbed_reference(
            q[:, i], kv, seen, softmax_scale=scale, kv_lora_rank=RANK, compute_dtype=torch.float64
        )
        outs.append(out)
        lses.append(torch.where(seen[:, None] == 0, math.inf, lse))
    return torch.stack(outs, dim=1), torch.stack(lses, dim=2)


def _check(got, expected):
    (out, lse), (expected_out, expected_lse) = got, expected
    assert (out.shape, out.dtype) == (expected_out.shape, DTYPE)
    assert (lse.shape, lse.dtype) == (expected_lse.shape, torch.float32)
    assert lse.is_contiguous()
    # a fp16 value of about 1, and probabilities that were rounded to fp16
    torch.testing.assert_close(out.double(), expected_out, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_matches_the_reference(q_len, causal, device):
    q, arguments, kv = _case(device, q_len)
    got = flash_mla_with_kvcache(q, *arguments, *get_mla_metadata(), SCALE, causal)
    _check(got, _expected(q, kv, arguments[2], causal))
    assert (got[1][0] == math.inf).all()
    assert (got[0][0] == 0).all()


def test_strided_query(device):
    q, arguments, kv = _case(device, q_len=2)
    padded = torch.full((len(q), 4, 2, 56), torch.nan, dtype=DTYPE, device=device)
    strided = padded.transpose(1, 2)[..., :48]
    strided.copy_(q)
    for causal in (False, True):
        got = flash_mla_with_kvcache(strided, *arguments, *get_mla_metadata(), SCALE, causal)
        _check(got, _expected(q, kv, arguments[2], causal))


def test_width_of_deepseek_and_the_default_scale(device):
    """576 ** -0.5, with one warning a process."""
    config = dataclasses.replace(PRESETS["deepseek-v3"], num_heads=2)
    p = make_problem(config, [70, 3], dtype=DTYPE, device=device)
    arguments = (p.q_absorbed[:, None], p.kv_cache[:, :, None], p.block_table, p.seq_lens, 512, *get_mla_metadata())
    compat._warn_of_the_default_scale.cache_clear()
    with pytest.warns(UserWarning, match=r"576 \*\* -0\.5 for q of 576 .*MLAConfig\.softmax_scale") as caught:
        out, lse = flash_mla_with_kvcache(*arguments)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        flash_mla_with_kvcache(*arguments)
    expected_out, expected_lse = absorbed_reference(
        p.q_absorbed, p.kv, p.seq_lens, softmax_scale=576**-0.5, compute_dtype=torch.float64
    )
    _check((out, lse), (expected_out[:, None], expected_lse[:, :, None]))


def test_scale_that_is_given_is_not_warned_of(device):
    compat._warn_of_the_default_scale.cache_clear()
    q, arguments, _ = _case(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        flash_mla_with_kvcache(q, *arguments, *get_mla_metadata(), SCALE)


def test_the_calls_of_both_years(device):
    """FlashMLA's README of 2025, of which the newest one differs in get_mla_metadata() without arguments."""
    q, (k_cache, block_table, cache_seqlens, dv), kv = _case(device, q_len=2)
    tile_scheduler_metadata, num_splits = get_mla_metadata(cache_seqlens, 2 * 4 // 1, 1)
    got = flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, dv, tile_scheduler_metadata, num_splits, softmax_scale=SCALE,
        causal=True,
    )  # fmt: skip
    _check(got, _expected(q, kv, cache_seqlens, True))
    get_mla_metadata(cache_seqlens=cache_seqlens, num_q_tokens_per_head_k=8, num_heads_k=1, num_heads_q=4)
    names = list(inspect.signature(flash_mla_with_kvcache).parameters)
    assert names[:9] == [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
        "softmax_scale", "causal",
    ]  # fmt: skip


@pytest.fixture
def plans(monkeypatch) -> list[torch.Tensor]:
    """The lengths that plans were made of."""
    made, plan_decode = [], compat.plan_decode

    def counting(seq_lens, num_heads):
        made.append(seq_lens.clone())
        return plan_decode(seq_lens, num_heads)

    monkeypatch.setattr(compat, "plan_decode", counting)
    return made


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_layers_share_a_plan_until_the_lengths_change(causal, device, plans):
    q, arguments, kv = _case(device, q_len=2)
    metadata, cache_seqlens = get_mla_metadata(), arguments[2]

    def call():
        return flash_mla_with_kvcache(q, *arguments, *metadata, SCALE, causal)

    for _ in range(3):
        _check(call(), _expected(q, kv, cache_seqlens, causal))
    assert len(plans) == 1
    cache_seqlens[3] -= 20
    for _ in range(2):
        _check(call(), _expected(q, kv, cache_seqlens, causal))
    assert len(plans) == 2
    with torch.inference_mode():
        cache_seqlens[4:].sub_(30)
    _check(call(), _expected(q, kv, cache_seqlens, causal))
    assert len(plans) == 3
    assert all((lengths >= 0).all() for lengths in plans)


def test_another_call_gets_another_plan(device, plans):
    """Other lengths, heads, tokens and mask, one after the other, with the same metadata."""
    metadata = get_mla_metadata()
    q, arguments, kv = _case(device, q_len=3)
    others = (*arguments[:2], arguments[2].clone(), RANK)
    calls = [
        (q, arguments, False),
        (q, others, False),
        (q[:, :, :3], others, False),
        (q[:, 1:, :3], others, False),
        (q[:, 1:, :3], others, True),
    ]
    for n, (query, rest, causal) in enumerate(calls, 1):
        got = flash_mla_with_kvcache(query, *rest, *metadata, SCALE, causal)
        _check(got, _expected(query, kv, rest[2], causal))
        assert len(plans) == n


def test_lengths_without_a_count_of_changes_are_planned_at_every_call(device, plans):
    q, arguments, kv = _case(device)
    with torch.inference_mode():
        cache_seqlens = arguments[2].clone()
        arguments = (*arguments[:2], cache_seqlens, RANK)
        metadata = get_mla_metadata()
        for n in range(1, 3):
            got = flash_mla_with_kvcache(q, *arguments, *metadata, SCALE)
            _check(got, _expected(q, kv, cache_seqlens, False))
            assert len(plans) == n
            cache_seqlens[3] -= 1


def test_inside_torch_compile(device):
    q, arguments, kv = _case(device, q_len=2)
    metadata = get_mla_metadata()
    for causal in (False, True):
        step = torch.compile(
            lambda q, *rest, causal=causal: flash_mla_with_kvcache(q, *rest, *metadata, SCALE, causal),
            fullgraph=True,
            backend="aot_eager",
        )
        _check(step(q, *arguments), _expected(q, kv, arguments[2], causal))


WRONG = {
    "fp8": (ValueError, "is_fp8_kvcache: .* FlashMLA", dict(is_fp8_kvcache=True)),
    "sparse": (ValueError, "indices: .* sparse", dict(indices=torch.zeros(5, 1, 8, dtype=torch.int32))),
    "sink": (ValueError, "attn_sink: .* sinks", dict(attn_sink=torch.zeros(4))),
    "extra cache": (ValueError, "extra_k_cache: ", dict(extra_k_cache=torch.zeros(1, 16, 1, 48))),
    "extra indices": (ValueError, "extra_indices_in_kvcache: ", dict(extra_indices_in_kvcache=torch.zeros(5, 1, 8))),
    "top-k": (ValueError, "^topk_length: ", dict(topk_length=torch.zeros(5))),
    "extra top-k": (ValueError, "extra_topk_length: ", dict(extra_topk_length=torch.zeros(5))),
    "no table": (ValueError, "block_table, cache_seqlens: ", dict(block_table=None)),
    "no lengths": (ValueError, "block_table, cache_seqlens: ", dict(cache_seqlens=None)),
    "q is 3-d": (ValueError, "q: expected .*q_len", dict(q=torch.zeros(5, 4, 48))),
    "q has no tokens": (ValueError, "q_len from 1 up", dict(q=torch.zeros(5, 0, 4, 48))),
    "cache is 3-d": (ValueError, "k_cache: expected .*page_size, 1", dict(k_cache=torch.zeros(9, 16, 48))),
    "two cached heads": (ValueError, "share one row a token", dict(k_cache=torch.zeros(9, 16, 2, 48))),
    "table of another batch": (ValueError, "5 requests", dict(block_table=torch.zeros(4, 5, dtype=torch.int32))),
    "lengths of another batch": (ValueError, "5 requests", dict(cache_seqlens=torch.zeros(1, dtype=torch.int32))),
    "lengths are int64": (TypeError, "int32, got torch.int64", dict(cache_seqlens=torch.zeros(5, dtype=torch.int64))),
    "FlashMLA's metadata": (TypeError, "get_mla_metadata", dict(tile_scheduler_metadata=torch.zeros(132, 8))),
    "FlashMLA's splits": (TypeError, "get_mla_metadata", dict(num_splits=torch.zeros(6, dtype=torch.int32))),
    "rank": (ValueError, "powers of two", dict(head_dim_v=48)),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_what_is_not_done_is_refused(case, causal, device):
    error, message, changes = WRONG[case]
    q, (k_cache, block_table, cache_seqlens, rank), _ = _case(device, q_len=2)
    metadata, num_splits = get_mla_metadata()
    arguments = dict(
        q=q, k_cache=k_cache, block_table=block_table, cache_seqlens=cache_seqlens, head_dim_v=rank,
        tile_scheduler_metadata=metadata, num_splits=num_splits, softmax_scale=SCALE, causal=causal,
    )  # fmt: skip
    changes = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in changes.items()}
    with pytest.raises(error, match=message) as caught:
        flash_mla_with_kvcache(**arguments | changes)
    assert "expected" in str(caught.value)
    assert "got" in str(caught.value)


@pytest.mark.parametrize("options", [dict(num_heads_k=8), dict(is_fp8_kvcache=True), dict(topk=2048)], ids=str)
def test_metadata_of_other_attention_is_refused(options):
    with pytest.raises(ValueError, match=rf"{next(iter(options))}: expected .*got"):
        get_mla_metadata(**options)
