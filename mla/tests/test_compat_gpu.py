"""`mla.compat` on a GPU: DeepSeek's widths in bf16, CUDA graphs, streams, no synchronisation, and FlashMLA itself."""

import dataclasses

import pytest
import torch

from mla import PRESETS
from mla.compat import flash_mla_with_kvcache, get_mla_metadata
from mla.measure import peers
from mla.measure.gate import check_result
from mla.problem import make_problem

pytestmark = pytest.mark.gpu
LENGTHS = [1, 63, 64, 65, 0, 1000, 4097, 2]
SCALE = PRESETS["deepseek-v3"].softmax_scale


def _case(q_len, lengths=LENGTHS, seed=0, num_heads=128):
    """q (batch_size, q_len, num_heads, 576), FlashMLA's arguments after it, and the problem that has the cache."""
    config = dataclasses.replace(PRESETS["deepseek-v3"], num_heads=q_len * num_heads)
    p = make_problem(config, lengths, dtype=torch.bfloat16, device="cuda", seed=seed)
    q = p.q_absorbed.unflatten(1, (q_len, num_heads))
    return q, (p.kv_cache[:, :, None], p.block_table, p.seq_lens, 512), p


def _check(got, q, p, causal, seq_lens=None):
    out, lse = got
    seq_lens = p.seq_lens if seq_lens is None else seq_lens
    assert lse.shape == (len(q), q.shape[2], q.shape[1])
    for i in range(q.shape[1]):
        seen = (seq_lens - (q.shape[1] - 1 - i)).clamp(min=0) if causal else seq_lens
        token = dataclasses.replace(p, q_absorbed=q[:, i], seq_lens=seen)
        verdict = check_result(out[:, i], lse[:, :, i], token, rounds_scores=False, is_per_head=False)
        assert verdict.passed, verdict.status
        assert (lse[seen == 0, :, i] == torch.inf).all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("q_len", [1, 2, 4])
def test_tokens_and_mask(q_len, causal):
    q, arguments, p = _case(q_len)
    _check(flash_mla_with_kvcache(q, *arguments, *get_mla_metadata(), SCALE, causal), q, p, causal)


@pytest.mark.skipif(peers.flashmla_version() is None, reason="sgl-flash-mla is not installed")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_agrees_with_flashmla(causal):
    """Shapes, order of the lse, sign of its empty rows, alignment of the mask."""
    q, (k_cache, table, seq_lens, rank), _ = _case(2)
    theirs = peers._flashmla_op()(q, k_cache, rank, seq_lens, table, SCALE, causal, None, None)[:2]
    ours = flash_mla_with_kvcache(q, k_cache, table, seq_lens, rank, *get_mla_metadata(), SCALE, causal)
    for x, y, tolerance in zip(ours, theirs, (1e-2, 1e-4), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_metadata_that_outlives_its_lengths(causal):
    """Three steps with lengths that change in place, several layers each, one after the other on two streams."""
    q, arguments, p = _case(2)
    metadata, seq_lens = get_mla_metadata(), arguments[2]
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.current_stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(3):
                got = flash_mla_with_kvcache(q, *arguments, *metadata, SCALE, causal)
            _check(got, q, p, causal)
            seq_lens[5:7] //= 2
    torch.cuda.synchronize()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_graph_captured_after_a_warm_up_with_the_same_metadata(causal):
    """The plan of the warm-up must not be what the graph reads: its lengths change before the replay."""
    q, arguments, p = _case(2)
    metadata, seq_lens = get_mla_metadata(), arguments[2]
    full = seq_lens.clone()
    seq_lens.clamp_(max=1)
    flash_mla_with_kvcache(q, *arguments, *metadata, SCALE, causal)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = [flash_mla_with_kvcache(q, *arguments, *metadata, SCALE, causal) for _ in range(2)]
    for lengths in (full, full // 3, full):
        seq_lens.copy_(lengths)
        graph.replay()
        for got in layers:
            _check(got, q, p, causal, lengths)
    # and the graph's plan must not be what an eager call reads
    seq_lens.copy_(full // 2)
    _check(flash_mla_with_kvcache(q, *arguments, *metadata, SCALE, causal), q, p, causal, full // 2)


def test_never_synchronises():
    q, arguments, p = _case(2)
    metadata = get_mla_metadata()
    for causal in (False, True):
        flash_mla_with_kvcache(q, *arguments, *metadata, SCALE, causal)
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = flash_mla_with_kvcache(q, *arguments, *get_mla_metadata(), SCALE, causal)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        _check(got, q, p, causal)
