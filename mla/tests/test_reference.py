import dataclasses

import pytest
import torch

from mla import PRESETS
from mla.problem import UNUSED_PAGE_ID, make_problem
from mla.reference import absorbed_reference, naive_reference, project_values
from mla.stages import absorbed, naive

LENGTHS = [1, 0, 15, 16, 17, 64, 33]


def _naive(p, **options):
    return naive_reference(p.q_nope, p.q_pe, p.kv, p.w_uk, p.w_uv, p.seq_lens, softmax_scale=p.softmax_scale, **options)


def _absorbed(p, **options):
    rank = p.config.kv_lora_rank
    return absorbed_reference(
        p.q_absorbed, p.kv, p.seq_lens, softmax_scale=p.softmax_scale, kv_lora_rank=rank, **options
    )


@pytest.mark.parametrize("preset", ["tiny", "deepseek-v2-lite"])
@pytest.mark.parametrize("logit_scale", [1.0, 30.0])
def test_naive_and_absorbed_are_the_same_function(preset, logit_scale):
    p = make_problem(PRESETS[preset], LENGTHS, page_size=16, dtype=torch.float64, logit_scale=logit_scale)
    out, lse = _naive(p)
    latent, absorbed_lse = _absorbed(p)
    torch.testing.assert_close(project_values(latent, p.w_uv), out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(absorbed_lse, lse, rtol=1e-12, atol=1e-12)


def test_reference_matches_torch_attention():
    """An independent implementation: scaled_dot_product_attention over keys and values built per head."""
    p = make_problem(PRESETS["tiny"], [40], dtype=torch.float64)
    rank = p.config.kv_lora_rank
    latent, k_pe = p.kv[..., :rank], p.kv[..., rank:]
    k = torch.cat((torch.einsum("bnr,hdr->bhnd", latent, p.w_uk), k_pe[:, None].expand(-1, 4, -1, -1)), dim=-1)
    v = torch.einsum("bnr,hvr->bhnv", latent, p.w_uv)
    q = torch.cat((p.q_nope, p.q_pe), dim=-1)[:, :, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=p.softmax_scale)[:, :, 0]
    torch.testing.assert_close(_naive(p)[0], expected)


@pytest.mark.parametrize("rung", [naive, absorbed], ids=lambda rung: rung.__name__.rsplit(".")[-1])
@pytest.mark.parametrize("lengths", [LENGTHS, [20, 20], [0, 0]], ids=["ragged", "even", "empty"])
def test_torch_rungs_match_their_reference(rung, lengths):
    p = make_problem(PRESETS["tiny"], lengths, dtype=torch.float64, logit_scale=5.0)
    out, lse = rung.decode(p)
    expected, expected_lse = (_naive if rung is naive else _absorbed)(p)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_empty_request_gives_zero_and_minus_infinity():
    p = make_problem(PRESETS["tiny"], [0, 3], dtype=torch.float64)
    out, lse = _absorbed(p)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    assert torch.isfinite(lse[1]).all()


def test_rounding_makes_an_error_of_the_dtypes_size():
    p = make_problem(PRESETS["tiny"], [100], dtype=torch.float16)
    exact, _ = _absorbed(p, compute_dtype=torch.float64)
    rounded, _ = _absorbed(p, compute_dtype=torch.float64, round_to=torch.float16)
    error = ((rounded - exact).norm() / exact.norm()).item()
    assert 1e-5 < error < torch.finfo(torch.float16).eps


def test_pages_hold_the_contiguous_cache_and_nothing_else():
    config = dataclasses.replace(PRESETS["tiny"], num_heads=1)
    p = make_problem(config, LENGTHS, page_size=16)
    seen = torch.isnan(p.kv_cache).all(dim=-1)
    for b, n in enumerate(LENGTHS):
        pages = p.block_table[b, : -(-n // 16)].long()
        torch.testing.assert_close(p.kv_cache[pages].flatten(0, 1)[:n], p.kv[b, :n])
        assert (p.block_table[b, len(pages) :] == UNUSED_PAGE_ID).all()
        slots = torch.zeros_like(seen[pages]).flatten()
        slots[:n] = True
        seen[pages] |= slots.view(len(pages), 16)
    # every slot is either a request's or NaN
    assert seen.all()


def test_same_seed_same_problem():
    first, second, third = (make_problem(PRESETS["tiny"], [9, 4], seed=s) for s in (1, 1, 2))
    assert torch.equal(first.q_absorbed, second.q_absorbed)
    assert torch.equal(first.block_table, second.block_table)
    assert not torch.equal(first.q_absorbed, third.q_absorbed)
