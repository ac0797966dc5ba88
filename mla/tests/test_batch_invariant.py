"""With `batch_invariant` the bits of a request's result are the same alone and in any batch."""

import dataclasses

import pytest
import torch

from mla import mla_decode, plan_decode
from mla.kernels import portable
from mla.tests.kernel_cases import (
    DEVICE,
    KERNELS,
    LENGTHS,
    ON_GPU,
    assert_same_bits,
    check,
    decode,
    make,
    request,
)


def _decode(kernel, p, **options):
    return decode(kernel, p, **{"num_splits": None, "batch_invariant": True, **options})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_heads", [4, pytest.param(128, marks=pytest.mark.gpu)], ids=lambda h: f"h{h}")
def test_alone_and_in_batches(kernel, num_heads):
    """Also with a wider table, and among very many, of which each is a small share of the GPU's work."""
    if kernel == "portable" and ON_GPU:
        pytest.skip("mla_decode takes the Hopper kernel here; num_splits=1 is what the portable one is given")
    p = make(LENGTHS, num_heads, page_size=64)
    together = _decode(kernel, p)
    check(together, p)
    for b in range(len(LENGTHS)):
        alone = request(p, b)
        table = torch.nn.functional.pad(alone.block_table, (0, 40), value=-1)
        assert_same_bits(
            _decode(kernel, dataclasses.replace(alone, block_table=table)),
            (together[0][b : b + 1], together[1][b : b + 1]),
        )
    if ON_GPU:
        many = torch.arange(700, device=DEVICE) % len(LENGTHS)
        out, lse = mla_decode(
            p.q_absorbed[many], p.kv_cache, p.block_table[many], p.seq_lens[many], softmax_scale=p.softmax_scale,
            batch_invariant=True,
        )  # fmt: skip
        assert_same_bits((out, lse), (together[0][many], together[1][many]))


def test_the_batch_does_not_choose_the_splits(monkeypatch):
    """As it does on a GPU otherwise: with few requests, many parts each. fp32 is the portable kernel's everywhere."""
    monkeypatch.setattr(portable, "default_num_splits", lambda q, *_: 1 + len(q))
    p = make(dtype=torch.float32)
    b = LENGTHS.index(max(LENGTHS))
    for invariant in (True, False):
        out, lse = _decode("portable", p, batch_invariant=invariant)
        alone = _decode("portable", request(p, b), batch_invariant=invariant)
        assert torch.equal(alone[0], out[b : b + 1]) == invariant
        assert torch.equal(alone[1], lse[b : b + 1]) or not invariant


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_it_matters(kernel):
    """A batch that is divided gives other bits in places, or the test above would show nothing."""
    p = make([9000, 100], 128, page_size=64)
    divided = decode(kernel, p)
    whole = _decode(kernel, p)
    check(whole, p)
    assert not torch.equal(divided[0], whole[0])


def test_a_plan_carries_the_mode():
    p = make()
    plan = plan_decode(p.seq_lens, 4, batch_invariant=True)
    assert_same_bits(_decode("portable", p, plan=plan), _decode("portable", p))
    with pytest.raises(ValueError, match="got a plan with True; make the plan anew or pass batch_invariant=True"):
        _decode("portable", p, plan=plan, batch_invariant=False)
    with pytest.raises(ValueError, match="got a plan with False"):
        _decode("portable", p, plan=plan_decode(p.seq_lens, 4))


def test_inside_the_operator():
    p = make()
    arguments = (
        p.q_absorbed,
        p.kv_cache,
        p.block_table,
        p.seq_lens,
        p.softmax_scale,
        p.config.kv_lora_rank,
        None,
        True,
    )
    assert_same_bits(torch.ops.mla.decode(*arguments), _decode("portable", p))


def test_a_given_number_of_splits_is_kept():
    p = make()
    assert_same_bits(_decode("portable", p, num_splits=2), _decode("portable", p, num_splits=2, batch_invariant=False))
