"""What one call launches and leaves between its kernels: the bookkeeping without a GPU, and on one the real thing."""

import subprocess
import sys

import pytest
import torch

from mla.measure import intermediates, profiled, provenance, records, subprocesses
from mla.measure.cases import Case
from mla.schema import INTERMEDIATE_COLUMNS


def _event(name, ts, us, cat="kernel", **args):
    return {"name": name, "ts": ts, "dur": us, "cat": cat, "args": args}


TRACE = {
    "traceEvents": [
        {"name": "process_name", "ph": "M"},
        _event("second", 20.0, 4.0, grid=[2, 3, 1], block=[128, 1, 1]),
        _event("cudaLaunchKernel", 1.0, 9.0, cat="cuda_runtime"),
        _event("first", 10.0, 2.0, grid=[132, 1, 1], block=[256, 1, 1]),
        _event("Memset (Device)", 15.0, 1.0, cat="gpu_memset"),
    ]
}


def test_a_traces_work_on_the_gpu_in_order():
    assert profiled.kernels_of(TRACE) == [
        {"kernel_name": "first", "grid": "132 1 1", "block": "256 1 1", "us": 2.0},
        {"kernel_name": "Memset (Device)", "grid": "", "block": "", "us": 1.0},
        {"kernel_name": "second", "grid": "2 3 1", "block": "128 1 1", "us": 4.0},
    ]


def test_repeats_are_summarised_by_position():
    kernels = profiled.kernels_of(TRACE)
    slower = [{**k, "us": k["us"] * 3} for k in kernels]
    found = profiled.summarise("call", [kernels, slower, slower])
    assert [(k["position"], k["kernel_name"], k["latency_us_p50"], k["repeats"]) for k in found] == [
        (0, "first", 6.0, 3),
        (1, "Memset (Device)", 3.0, 3),
        (2, "second", 12.0, 3),
    ]
    for wrong in ([kernels, kernels[:2]], [[], []]):
        with pytest.raises(ValueError, match="call: expected the same kernels at every repeat, at least one"):
            profiled.summarise("call", wrong)


def test_written_scratch_is_what_is_no_longer_nan():
    scratch = [torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(3)]

    def run():
        scratch[0][1] = 0.0
        scratch[1][2] = -torch.inf

    assert profiled.written_bytes(scratch, run) == 4 * 2 + 4


def test_allocated_bytes_are_a_difference_of_counters(monkeypatch):
    counters = iter(({"requested_bytes.all.allocated": 1000}, {"requested_bytes.all.allocated": 5000}))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: next(counters))
    assert profiled.allocated_bytes(lambda: (torch.zeros(2, 8), None)) == (4000, 64)


# In a process of its own, where torch.compile has no interpreter about it.
COMPILED = """
import torch
from mla.measure.profiled import inductor_account
from mla.stages import absorbed
q, kv = torch.randn(2, 8, 16).bfloat16(), torch.randn(2, 64, 16).bfloat16()
attend = torch.compile(lambda: absorbed.attend(q, kv, 0.3, 12)[0], fullgraph=True, dynamic=False)
with inductor_account() as account, torch.inference_mode():
    attend()
    print(account["inductor_read_bytes"], account["inductor_written_bytes"])
"""


@pytest.mark.slow
def test_the_compilers_account_holds_scores_probabilities_and_output():
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    read, written = map(int, done.stdout.split())
    # in 16 bits: scores and probabilities are written and read again, the output is written
    scores, out, inputs = 2 * 2 * 8 * 64, 2 * 2 * 8 * 12, 2 * (2 * 8 * 16 + 2 * 64 * 16)
    assert 2 * scores + out <= written < 4 * scores
    assert inputs + 2 * scores <= read < inputs + 4 * scores + 2 * 2 * 64 * 16


ANSWER = {
    "status": "ok", "rel_err": "2.000e-03", "allocated_bytes": 300, "output_bytes": 100, "scratch_bytes": 0,
    "inductor_written_bytes": 500,
    "kernels": [
        {"step": "call", "position": i, "kernel_name": name, "grid": "1 1 1", "block": "32 1 1", "latency_us_p50": 2.0,
         "repeats": 5} for i, name in enumerate(("bmm", "softmax"))
    ],
}  # fmt: skip


def test_a_row_a_kernel_and_one_for_a_failure(monkeypatch, tmp_path, capsys):
    small = Case(2, 96, num_heads=4, page_size=16, dtype="float16", preset="tiny")
    asked = []

    def answer(module, requests, *, timeout_s):
        for request in requests:
            asked.append(request["name"])
            yield (request, ANSWER, "") if request["name"] == "torch_compile" else (request, None, "failed: no answer")

    monkeypatch.setattr(intermediates, "answers_in_fresh_processes", answer)
    monkeypatch.setattr(intermediates, "CASES", (small,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(records.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(provenance, "machine", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(provenance, "clocks", lambda: {})
    for _ in range(2):
        records._LOCKS.clear()
        assert intermediates.main(["--output", str(tmp_path)]) == 0
    records._LOCKS.clear()
    # a GPU of another kind has no Hopper kernel, and a second run finds all there
    assert asked == ["absorbed", "torch_compile", "torch_compile_paged", "portable"]
    (path,) = tmp_path.glob("intermediates_h200_*.csv")
    rows = records.read_rows(path)
    assert list(rows[0]) == INTERMEDIATE_COLUMNS
    assert [(r["implementation"], r["kernel_name"], r["status"]) for r in rows] == [
        ("absorbed", "", "failed: no answer"),
        ("torch_compile", "bmm", "ok"),
        ("torch_compile", "softmax", "ok"),
        ("torch_compile_paged", "", "failed: no answer"),
        ("portable", "", "failed: no answer"),
    ]
    assert {r["allocated_bytes"] for r in rows[1:3]} == {"300"}
    assert "allocated beside the output 200 bytes" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        intermediates.main(["--output", "data"])
    assert "expected a CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu():
    """The portable kernel and its merge, what they leave between them, and the same of the Hopper kernel."""
    names = ["portable"] + (["hopper"] if torch.cuda.get_device_capability() == (9, 0) else [])
    case = {"batch_size": 2, "context_len": 4096}
    requests = [{"name": name, "case": case, "seed": 0} for name in names]
    found = {}
    for request, answer, reason in subprocesses.answers_in_fresh_processes(
        "mla.measure.profiled", requests, timeout_s=120
    ):
        assert reason == ""
        assert answer["status"] == "ok"
        found[request["name"]] = answer
    calls = {n: [k["kernel_name"] for k in a["kernels"] if k["step"] == "call"] for n, a in found.items()}
    assert len(calls["portable"]) == 2
    assert "merge" in calls["portable"][1]
    portable = found["portable"]
    # partial results in fp32: at least two parts of 2 requests, 128 heads, 512 values and an lse
    assert portable["allocated_bytes"] - portable["output_bytes"] >= 2 * 2 * 128 * 513 * 4
    if "hopper" in found:
        assert len(calls["hopper"]) == 1
        assert found["hopper"]["allocated_bytes"] == found["hopper"]["output_bytes"]
        assert found["hopper"]["scratch_bytes"] >= 2 * 2 * 128 * (512 * 2 + 4)
        assert any(k["step"] == "plan" for k in found["hopper"]["kernels"])
