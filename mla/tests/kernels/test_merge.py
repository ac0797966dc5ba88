import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla.kernels.merge import merge_partials

RANK = 32


def _parts(batch_size, num_splits, num_heads, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(batch_size, num_splits, num_heads, RANK, generator=generator)
    lse = torch.randn(batch_size, num_splits, num_heads, generator=generator) * 20
    return out.to(device), lse.to(device)


def _merged(out, lse):
    batch_size, _, num_heads, _ = out.shape
    poison = torch.full((batch_size, num_heads, RANK), torch.nan, device=out.device)
    return merge_partials(out, lse, poison, poison.new_full((batch_size, num_heads), torch.nan))


def _expected(out, lse):
    """fp64, infinities of either sign as empty parts."""
    out, lse = out.double(), lse.double()
    is_empty = torch.isinf(lse)
    lse = lse.masked_fill(is_empty, -torch.inf)
    total = torch.logsumexp(lse, dim=1)
    weights = torch.exp(lse - total[:, None]).masked_fill(is_empty, 0.0)
    return (out.masked_fill(is_empty[..., None], 0.0) * weights[..., None]).sum(1), total


def _assert_close(got, expected):
    torch.testing.assert_close(got[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1].double(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 2, 7, 8, 9, 66], ids=lambda s: f"s{s}")
def test_merge_matches_fp64(num_splits, device):
    out, lse = _parts(2, num_splits, 3, device)
    _assert_close(_merged(out, lse), _expected(out, lse))


@pytest.mark.parametrize("mark", [-torch.inf, torch.inf], ids=["minus", "plus"])
def test_empty_parts_are_ignored_whatever_they_hold(mark, device):
    out, lse = _parts(2, 9, 3, device)
    lse[:, 4:] = mark
    lse[0, :, 1] = mark
    out[torch.isinf(lse)] = torch.nan
    got = _merged(out, lse)
    _assert_close(got, _expected(out, lse))
    assert (got[0][0, 1] == 0).all()
    assert got[1][0, 1] == -torch.inf


def test_large_logarithms_do_not_overflow(device):
    out, lse = _parts(1, 4, 2, device)
    lse = lse + torch.tensor([1e5, -1e5], device=device)
    _assert_close(_merged(out, lse), _expected(out, lse))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), num_splits=st.integers(2, 12), cut=st.integers(1, 11))
def test_merge_is_associative(seed, num_splits, cut):
    """Merging some parts first and the result with the rest gives the same as merging all at once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out, lse = _parts(1, num_splits, 2, device, seed)
    cut = min(cut, num_splits - 1)
    first_out, first_lse = _merged(out[:, :cut].contiguous(), lse[:, :cut].contiguous())
    in_two_steps = _merged(
        torch.cat((first_out[:, None], out[:, cut:]), dim=1), torch.cat((first_lse[:, None], lse[:, cut:]), dim=1)
    )
    _assert_close(in_two_steps, _expected(out, lse))
