"""The prefill benchmark without a GPU: its gate, its contestants, and the rows that it writes. Nothing is timed."""

import csv
import dataclasses
import json

import pytest
import torch

from mla.kernels.prefill import PrefillConfig
from mla.measure import prefill, provenance, records, timing
from mla.measure.prefill_cases import CASES, Gate, PrefillCase, draw_inputs, reference
from mla.prefill import mla_prefill
from mla.schema import PREFILL_COLUMNS

PROMPT = PrefillCase(40, 40, "tiny", batch_size=2, dtype="float16")
CHUNK = PrefillCase(10, 50, "tiny", dtype="float16")


def _solve(case, inputs):
    return mla_prefill(*inputs, softmax_scale=case.config.softmax_scale)


@pytest.mark.parametrize("case", [PROMPT, CHUNK], ids=lambda c: c.name)
def test_the_gate_passes_what_is_right_and_only_that(case):
    (inputs,) = draw_inputs(case, "cpu", seed=0, at_most=1)
    gate = Gate(case, inputs)
    out, lse = _solve(case, inputs)
    assert gate.check(out, lse)["status"] == "ok"
    assert gate.check(out, None)["passed"]
    assert gate.check(out, lse + 1e-3 * lse.abs().clamp(min=1.0))["status"].startswith("failed: error of lse")
    # the last query of the last head alone is wrong, by about 1 percent
    out[-1, -1, -1] *= 1.01
    assert gate.check(out, lse)["status"].startswith("failed: relative error of out")
    assert not gate.check(torch.full_like(out, torch.nan), None)["passed"]


def test_the_reference_is_causal_attention():
    (inputs,) = draw_inputs(CHUNK, "cpu", seed=0, at_most=1)
    q, k_nope, k_pe, v = (x.double() for x in inputs)
    keys = torch.cat((k_nope, k_pe[:, :, None].expand(-1, -1, 4, -1)), dim=-1)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * 0.3
    scores = scores.masked_fill(~torch.ones(10, 50, dtype=torch.bool).tril(40), -torch.inf)
    expected = torch.einsum("bhqk,bkhv->bqhv", scores.softmax(-1), v)
    queries = torch.tensor([0, 3, 9])
    out, lse = reference(inputs, queries, 0.3)
    torch.testing.assert_close(out.double(), expected[:, queries], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1).transpose(1, 2)[:, queries], atol=1e-5, rtol=1e-5)


def test_cases_and_their_cost():
    assert {c.config.num_heads for c in CASES} == {16, 128}
    assert {c.q_len for c in CASES if c.q_len == c.context_len} == {2**n for n in range(10, 16)}
    pairs = sum(40 + i + 1 for i in range(10))
    assert CHUNK.flops == 2 * (32 + 16) * 4 * pairs
    assert PROMPT.flops == 2 * 2 * (32 + 16) * 4 * sum(range(1, 41))
    first, second = draw_inputs(PROMPT, "cpu", seed=0, at_most=2)
    assert not torch.equal(first[0], second[0])


@pytest.fixture
def on_the_interpreter(monkeypatch):
    """A machine without a GPU plays one: the calls are made, their times are made up."""
    monkeypatch.setattr(
        prefill, "draw_inputs", lambda case, device, seed, **_: draw_inputs(case, "cpu", seed, at_most=1)
    )
    for name, value in {
        "is_available": True, "get_device_name": "NVIDIA H200", "reset_peak_memory_stats": None, "empty_cache": None,
        "memory_allocated": 0, "max_memory_allocated": 0, "mem_get_info": (1, 1), "graph_pool_handle": None,
        "get_device_capability": (8, 0),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(provenance, "machine", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(provenance, "clocks", lambda: {})
    monkeypatch.setattr(timing, "graph_stretch", lambda calls, pool: calls)
    monkeypatch.setattr(timing, "ceiling_stretches", lambda seed: {"matmul": None})
    monkeypatch.setattr(timing, "time_in_rounds", lambda stretches, rng, rounds: {n: [1.0, 2.0] for n in stretches})


def test_rows_of_a_case(on_the_interpreter):
    rows = {(r["implementation"], r.get("config"), r["assembly"]): r for r in prefill.measure_case(PROMPT, seed=0)}
    fused = [row for (name, *_), row in rows.items() if name == "fused"]
    assert len(fused) >= 3
    for row in (*fused, rows["sdpa_flash", None, "timed"], rows["sdpa_flash", None, "untimed"]):
        assert (row["status"], row["latency_us_p50"], row["repeats"]) == ("ok", 1500.0, 2)
    # a GPU's backends do not take what lies on a CPU
    assert rows["sdpa_cudnn", None, "timed"]["status"] != "ok"
    assert "latency_us_p50" not in rows["sdpa_cudnn", None, "timed"]
    assert ("sdpa_math", None, "untimed") not in rows
    assert all(set(row) <= set(PREFILL_COLUMNS) for row in rows.values())


def test_a_new_length_is_timed_once(on_the_interpreter, monkeypatch):
    """At a length that is none of the cases'."""
    lengths = []
    monkeypatch.setattr(prefill, "mla_prefill", lambda q, *_, **__: lengths.append(q.shape[1]))
    monkeypatch.setattr(prefill, "_wall_us", lambda call: call() or 30.0)
    fused, cudnn = prefill.measure_new_length(PROMPT, seed=0)
    assert lengths == [48]
    assert (fused["timer"], fused["latency_us_p50"], fused["context_len"], fused["passed"]) == (
        "new_length", 30.0, 40, True,
    )  # fmt: skip
    # not on a CPU
    assert cudnn["status"].startswith("failed: ")
    assert "latency_us_p50" not in cudnn
    assert set(fused) | set(cudnn) <= set(PREFILL_COLUMNS)


def test_what_is_wrong_or_too_large_is_not_timed(on_the_interpreter, monkeypatch):
    monkeypatch.setattr(prefill, "mla_prefill", lambda *x, **o: tuple(t * 1.1 for t in mla_prefill(*x, **o)))
    monkeypatch.setattr(prefill, "fitting_configs", lambda *_: [PrefillConfig(16, 16, 4, 1)])
    rows = prefill.measure_case(PROMPT, seed=0)
    assert all(r["status"].startswith("failed: relative") for r in rows if r["implementation"] == "fused")
    assert not any("latency_us_p50" in r for r in rows if r["implementation"] == "fused")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2)
    assert {r["status"] for r in prefill.measure_case(PROMPT, seed=0) if r["implementation"] == "sdpa_math"} == {
        "out_of_memory"
    }


def test_the_file_is_written_once(on_the_interpreter, monkeypatch, tmp_path):
    small = dataclasses.replace(CHUNK, q_len=3, context_len=20)
    monkeypatch.setattr(prefill, "CASES", (small, PROMPT))
    monkeypatch.setattr(records.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    path = tmp_path / "prefill_h200.csv"
    # rows that failed are kept, and end the command with an error: here the backends that are a GPU's
    arguments = ["--output", str(path), "--max-context", "20"]
    prefill.main(arguments)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == PREFILL_COLUMNS
    assert {row["context_len"] for row in rows} == {"20"}
    assert {row["run_id"] for row in rows} == {"prefill_h200-1"}
    (run,) = json.loads(path.with_suffix(".json").read_text())["runs"]
    assert run["command"].startswith("triton-mla-bench prefill --output")
    records._LOCKS.pop().close()
    assert prefill.main(arguments) == 0
    assert len(path.read_text().splitlines()) == len(rows) + 1
    records._LOCKS.pop().close()


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        prefill.main(["--output", "data"])
    assert "expected a CUDA GPU" in capsys.readouterr().err
