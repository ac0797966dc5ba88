"""The Gluon rungs against the reference, on the GPU that they are written for."""

import dataclasses

import pytest
import torch

from mla import PRESETS
from mla.measure.gate import check_result
from mla.problem import make_problem
from mla.stages import gluon_simple, gluon_warp_specialised

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
RUNGS = {"gluon_simple": gluon_simple, "gluon_warp_specialised": gluon_warp_specialised}
# around one tile, two tiles (a pair), an odd and an even number of tiles; empty ones inside and at the end
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 1000, 4097, 0, 2048, 193, 577, 0]


@pytest.fixture(params=RUNGS)
def rung(request):
    return RUNGS[request.param]


def _problem(num_heads=128, lengths=LENGTHS, dtype=torch.bfloat16, **options):
    config = dataclasses.replace(PRESETS["deepseek-v3"], num_heads=num_heads)
    return make_problem(config, lengths, page_size=64, dtype=dtype, device="cuda", **options)


def _check(out, lse, p):
    assert out.dtype == p.q_absorbed.dtype
    assert lse.dtype == torch.float32
    verdict = check_result(out, lse, p, rounds_scores=False, is_per_head=False)
    assert verdict.passed, verdict.status
    is_empty = p.seq_lens == 0
    assert (out[is_empty] == 0).all()
    assert (lse[is_empty] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_splits", [None, 1, 3, 40], ids=lambda s: f"s{s}")
@pytest.mark.parametrize("num_heads", [1, 16, 64, 100, 128], ids=lambda h: f"h{h}")
def test_heads_and_splits(rung, num_heads, num_splits, dtype):
    """Shuffled pages, NaN in every unused slot and page, garbage in unused table entries (see `make_problem`)."""
    p = _problem(num_heads, dtype=dtype, logit_scale=3.0)
    _check(*rung.decode(p, num_splits=num_splits), p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logit_scale", [1.0, 10.0, 60.0])
@pytest.mark.parametrize(
    "lengths", [LENGTHS, [3000], [40_000, 0, 70], [512] * 150, [0, 0]], ids=["mixed", "one", "long", "many", "empty"]
)
def test_dtypes_logits_and_lengths(rung, lengths, logit_scale, dtype):
    p = _problem(lengths=lengths, dtype=dtype, logit_scale=logit_scale)
    _check(*rung.decode(p), p)


@pytest.mark.parametrize("num_splits", [1, 3], ids=lambda s: f"s{s}")
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_moving_maximum(rung, order, num_splits):
    """Rows that grow along the context move the maximum again and again; shrinking ones must change nothing."""
    p = _problem(lengths=[2000, 700], logit_scale=4.0)
    ramp = torch.linspace(0.1, 4.0, p.kv.shape[1], device="cuda")
    ramp = ramp if order == "rising" else ramp.flip(0)
    kv = (p.kv.float() * ramp[:, None]).to(p.kv.dtype)
    kv_cache = p.kv_cache.clone()
    for b, n in enumerate(p.seq_lens.tolist()):
        pages = p.block_table[b, : -(-n // 64)].long()
        flat = kv_cache[pages].flatten(0, 1)
        flat[:n] = kv[b, :n]
        kv_cache[pages] = flat.view(len(pages), 64, -1)
    p = dataclasses.replace(p, kv=kv, kv_cache=kv_cache)
    _check(*rung.decode(p, num_splits=num_splits), p)


@pytest.mark.parametrize("num_heads", [1, 63, 100], ids=lambda h: f"h{h}")
def test_heads_past_the_end_are_not_written(rung, num_heads):
    """Results lie inside a larger allocation, whose neighbours must stay as they are."""
    p = _problem(num_heads, lengths=[300, 0, 64])
    rows = 3 * num_heads
    guarded_out = torch.full((rows + 256, 512), 7.0, dtype=torch.bfloat16, device="cuda")
    guarded_lse = torch.full((rows + 256,), 7.0, device="cuda")
    out, lse = guarded_out[128 : 128 + rows], guarded_lse[128 : 128 + rows]

    class Query(torch.Tensor):
        """Hands out the guarded memory where the launcher allocates results."""

        def new_empty(self, *shape, dtype=None):
            return (lse if dtype == torch.float32 else out).view(3, num_heads, *shape[2:])

    query = p.q_absorbed.as_subclass(Query)
    got = rung.decode(dataclasses.replace(p, q_absorbed=query), num_splits=1)
    assert got[0].data_ptr() == out.data_ptr()
    _check(*got, p)
    for guarded in (guarded_out, guarded_lse):
        assert (guarded[:128] == 7.0).all()
        assert (guarded[128 + rows :] == 7.0).all()


@pytest.mark.parametrize("lengths", [LENGTHS, [1024] * 8, [8000] * 2], ids=["mixed", "even", "long"])
def test_same_input_same_bits_200_times(rung, lengths):
    p = _problem(lengths=lengths)
    first = rung.decode(p)
    for _ in range(200):
        out, lse = rung.decode(p)
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])
