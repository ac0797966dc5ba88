"""How the contestants that have no interpreter are called, with stand-ins for them."""

import sys
import types

import pytest
import torch

from mla.kernels import hopper_launch
from mla.measure import peers
from mla.measure.cases import CPU_CASES, draw_problems
from mla.measure.implementations import ABLATIONS, IMPLEMENTATIONS, STAIRCASE, Refused, prepare_hopper


@pytest.fixture
def problems():
    return draw_problems(CPU_CASES[-1], "cpu", seed=0, at_most=2)


@pytest.fixture
def launches(monkeypatch):
    """The Hopper kernel's launcher replaced: what it was made with, and what was launched."""
    made = []

    class Launch:
        # the same parameters as the real one
        def __init__(self, q, kv_cache, block_table, out, *, prefetch=None, pdl=True):
            self.options = {"prefetch": prefetch, "pdl": pdl}
            self.calls = []
            made.append(self)

        def __call__(self, q, kv_cache, block_table, seq_lens, out, lse, softmax_scale, plan):
            self.calls.append((q, kv_cache, block_table, seq_lens, softmax_scale, plan))
            out.fill_(1.0)
            lse.fill_(2.0)

    monkeypatch.setattr(hopper_launch, "hopper_fits", lambda *tensors: True)
    monkeypatch.setattr(hopper_launch, "plan_hopper", lambda seq_lens, num_heads, *, mode=None: (num_heads, mode))
    monkeypatch.setattr(hopper_launch, "HopperLaunch", Launch)
    return made


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hopper_without_prefetch", {"prefetch": False, "pdl": True}),
        ("hopper_without_pdl", {"prefetch": None, "pdl": False}),
    ],
)
def test_ablations_switch_one_idea_off(name, options, problems, launches):
    prepared = IMPLEMENTATIONS[name].prepare(problems)
    for call, p in zip(prepared.calls, problems, strict=True):
        out, lse = call()
        assert out.shape == (*p.q_absorbed.shape[:2], p.config.kv_lora_rank)
        assert (out.dtype, lse.dtype, lse.shape) == (p.q_absorbed.dtype, torch.float32, out.shape[:2])
    # one launch and one plan serve all problems
    (launch,) = launches
    assert launch.options == options
    assert [call[0] is p.q_absorbed for call, p in zip(launch.calls, problems, strict=True)] == [True, True]
    assert {call[-1] for call in launch.calls} == {(problems[0].config.num_heads, None)}
    assert prepared.plan() == (problems[0].config.num_heads, None)


def test_a_mode_reaches_the_plan(problems, launches):
    prepare_hopper(problems, mode=2).calls[0]()
    assert launches[0].calls[0][-1] == (problems[0].config.num_heads, 2)


def test_what_the_hopper_kernel_does_not_take_is_refused(problems):
    with pytest.raises(Refused, match="hopper_fits"):
        prepare_hopper(problems)


def test_the_real_launcher_takes_these_options(problems):
    q, kv_cache, table = (getattr(problems[0], n) for n in ("q_absorbed", "kv_cache", "block_table"))
    launch = hopper_launch.HopperLaunch(q, kv_cache, table, q, prefetch=True, pdl=False)
    # what the sweep reads (mla.measure.tune_hopper)
    assert launch.prefetch is True


def test_the_staircase_ends_with_the_finished_kernel():
    assert set(STAIRCASE) <= set(IMPLEMENTATIONS)
    assert set(ABLATIONS) <= set(STAIRCASE)
    assert (STAIRCASE[0], STAIRCASE[-1]) == ("portable", "hopper")


def test_flashinfer_is_given_ragged_lengths(problems, monkeypatch):
    """Each request's own pages and no other entry of the table, in the layout of its planner (CSR)."""
    given = {}

    def csr(qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        given.update(starts=kv_indptr.tolist(), pages=kv_indices.tolist(), lengths=kv_len_arr.tolist())
        given["queries"] = qo_indptr.tolist()

    stand_in = types.SimpleNamespace(MLAPlanMetadata=types.SimpleNamespace(csr=csr))
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(mla=stand_in))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", stand_in)
    p = problems[0]
    peers.flashinfer_metadata(p)
    lengths, page_size = CPU_CASES[-1].seq_lens, p.kv_cache.shape[1]
    assert len(set(lengths)) == len(lengths) == 3
    assert given["lengths"] == lengths
    assert given["queries"] == [0, 1, 2, 3]
    for b, n in enumerate(lengths):
        pages = given["pages"][given["starts"][b] : given["starts"][b + 1]]
        assert pages == p.block_table[b, : -(-n // page_size)].tolist()
    assert max(given["pages"]) < len(p.kv_cache)


def test_flashmla_is_given_ragged_lengths(problems, monkeypatch):
    """Its plan is made from the lengths on the device, which all problems of a case share."""
    calls = []

    def op(q, kv_cache, rank, seq_lens, block_table, scale, causal, metadata, num_splits):
        calls.append((seq_lens.tolist(), block_table, metadata, num_splits))
        return q[..., :rank], q[..., 0].transpose(1, 2), "metadata", "num_splits"

    monkeypatch.setattr(peers, "_flashmla_op", lambda: op)
    prepared = IMPLEMENTATIONS["flashmla"].prepare(problems)
    for call in prepared.calls:
        call()
    lengths = CPU_CASES[-1].seq_lens
    assert [(c[0], c[2], c[3]) for c in calls] == [(lengths, None, None), *[(lengths, "metadata", "num_splits")] * 2]
    assert [c[1] is p.block_table for c, p in zip(calls[1:], problems, strict=True)] == [True, True]
