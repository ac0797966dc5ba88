"""The arithmetic between a clock and a published number, with clocks of our own."""

import random

import pytest
import torch

from mla.measure import timing, worker
from mla.measure.cases import CPU_CASES, draw_problems
from mla.measure.implementations import IMPLEMENTATIONS, Prepared


class FakeEvent:
    now_ms = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at_ms = FakeEvent.now_ms

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


@pytest.fixture
def fake_gpu(monkeypatch):
    """torch's events and synchronisation, with time that passes when a stretch runs."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def _stretch(ms, num_calls, log=None, name=None):
    def run():
        FakeEvent.now_ms += ms
        if log is not None:
            log.append(name)

    return timing.Stretch(run, num_calls, [])


def test_time_is_a_calls(fake_gpu):
    times = timing.time_in_rounds({"a": _stretch(6.0, 3), "b": _stretch(8.0, 1)}, random.Random(0), rounds=4)
    assert times["a"] == pytest.approx([2.0] * 8)
    assert times["b"] == pytest.approx([8.0] * 8)


def test_rounds_are_shuffled(fake_gpu):
    log = []
    stretches = {n: _stretch(1.0, 1, log, n) for n in "abcd"}
    timing.time_in_rounds(stretches, random.Random(0), rounds=6, repeats=1)
    # after one run of each to see which are slow, every round runs each twice, warm-up included
    rounds = [log[4 + 8 * i : 12 + 8 * i : 2] for i in range(6)]
    assert all(sorted(r) == list("abcd") for r in rounds)
    assert len({tuple(r) for r in rounds}) > 2


def test_quantiles():
    got = timing.quantiles_us([0.001 * i for i in range(1, 102)])
    assert got == {"latency_us_p20": 21.0, "latency_us_p50": 51.0, "latency_us_p80": 81.0}


def test_ceilings():
    assert timing.matmul_tflops(1.0) == pytest.approx(2 * 8192**3 / 1e-3 / 1e12)
    assert timing.read_gbps(1.0) == pytest.approx(2**30 / 1e-3 / 1e9)


def test_plan_is_what_comes_on_top_of_a_decode(fake_gpu, monkeypatch):
    """The same stretch with and without the plan; the difference in microseconds."""
    plan, decode = object(), object()
    monkeypatch.setattr(timing, "graph_stretch", lambda calls: _stretch(5.0 if calls[0] is plan else 3.0, 1))
    assert worker._plan_us(Prepared([decode], plan=plan, plan_decodes=True)) == pytest.approx(2000.0)
    assert worker._plan_us(Prepared([decode])) is None


def test_calls_of_a_stretch_are_a_multiple_of_the_inputs():
    assert timing._calls_per_stretch(26, call_ms=0.02) == 78
    assert timing._calls_per_stretch(3, call_ms=100.0) == 3
    assert timing._calls_per_stretch(26, call_ms=1e-6) <= 400


def test_a_captured_graph_is_held_against_the_reference(monkeypatch):
    """What a replay writes is checked on the last of the inputs; a wrong graph is a failure, not a time."""
    problems = draw_problems(CPU_CASES[1], "cpu", seed=0, at_most=2)
    right = {"absorbed": IMPLEMENTATIONS["absorbed"].prepare(problems)}
    first_only = Prepared([right["absorbed"].calls[0]])

    def out_of_memory():
        raise torch.OutOfMemoryError("no memory")

    def capture(calls, pool):
        out, lse = calls[-1]()
        value = out.clone()
        return timing.Stretch(lambda: out.copy_(value), 1, calls, (out, lse))

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(timing, "graph_stretch", capture)
    contestants = right | {"portable": first_only, "naive": Prepared([out_of_memory])}
    stretches, failures = worker._stretches(contestants, "cuda_graph", problems[-1])
    assert set(stretches) == {"absorbed"}
    assert failures["naive"] == "out_of_memory"
    assert failures["portable"].startswith("failed: replayed graph: failed: relative error")
