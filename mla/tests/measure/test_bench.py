import csv
import json
import subprocess
import sys

import pytest
import torch

from mla.measure import bench, gates, records, subprocesses
from mla.measure.cases import Case
from mla.measure.gate import Verdict
from mla.measure.provenance import gpu_name, source_digest
from mla.schema import DECODE_COLUMNS

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


def _bench(*arguments):
    return subprocess.run([sys.executable, "-m", "mla.measure.bench", *arguments], capture_output=True, text=True)


@without_gpu
def test_without_a_gpu_it_says_so_in_one_line():
    done = _bench()
    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) == 1
    assert "--check" in done.stderr


@without_gpu
@pytest.mark.slow
def test_check_passes_on_the_interpreter():
    done = _bench("--check")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 25
    assert all("  ok  relative error" in line for line in lines)


@without_gpu
def test_check_fails_when_a_case_fails():
    done = _bench("--check", "--implementations", "portable", "--gate-timeout", "0.01", "--batch-size", "1")
    assert done.returncode == 1
    assert "no answer within" in done.stdout


def test_unknown_implementation_is_one_line_of_error():
    done = _bench("--check", "--implementations", "flash")
    assert done.returncode == 2
    assert "expected one of naive" in done.stderr.strip().splitlines()[-1]


def test_a_crash_costs_one_case(monkeypatch):
    """The gate process dies at the second case: the third goes to a new process."""
    script = """
import json, os, sys
for line in sys.stdin:
    if json.loads(line)["batch_size"] == 2:
        print("broken", file=sys.stderr)
        os._exit(3)
    print(json.dumps({"rel_err": 0.5, "passed": True, "status": "ok"}), flush=True)
"""
    _replace_child(monkeypatch, script)
    cases = [Case(b, 16) for b in (1, 2, 3)]
    found = list(subprocesses.gate_in_process("portable", cases, device="cpu", seed=0, timeout_s=20))
    assert [case for case, _ in found] == cases
    assert [v.passed for _, v in found] == [True, False, True]
    assert found[1][1].status == "failed: the process ended with code 3: broken"


def test_a_hang_costs_one_case(monkeypatch):
    script = """
import json, sys, time
for line in sys.stdin:
    if json.loads(line)["batch_size"] == 2:
        time.sleep(60)
    print(json.dumps({"rel_err": 0.5, "passed": True, "status": "ok"}), flush=True)
"""
    _replace_child(monkeypatch, script)
    found = list(subprocesses.gate_in_process("x", [Case(b, 16) for b in (1, 2, 3)], device="cpu", seed=0, timeout_s=2))
    assert [v.status for _, v in found] == ["ok", "failed: no answer within 2 s", "ok"]


def test_a_timing_process_that_fails_leaves_rows_that_say_so(monkeypatch):
    _replace_child(monkeypatch, "import sys; sys.exit('no memory')")
    rows = subprocesses.time_in_process(Case(1, 16), ["a", "b"], timers=["eager"], seed=0, timeout_s=20)
    assert [r["implementation"] for r in rows] == ["a", "b"]
    assert all(r["status"] == "failed: the timing process ended with code 1: no memory" for r in rows)


def _replace_child(monkeypatch, script):
    """Children run `script` in place of the module they were asked for."""
    for name in ("Popen", "run"):
        original = getattr(subprocess, name)
        monkeypatch.setattr(
            subprocesses.subprocess,
            name,
            lambda command, *args, original=original, **kwargs: original(
                [sys.executable, "-c", script], *args, **kwargs
            ),
        )


def test_a_second_run_skips_what_is_done(monkeypatch, tmp_path):
    """Gate and timing replaced: what is asked for, what is written, and that failures are kept."""
    asked = []

    def gate(selected, device, seed, timeout_s, progress):
        pairs = [(n, c) for c, names in selected.items() for n in names]
        asked.extend((n, c.name) for n, c in pairs)
        failed = Verdict(0.5, False, "failed: relative error")
        return {(n, c): failed if n == "naive" else Verdict(1e-3, True, "ok") for n, c in pairs}

    def time_case(case, names, *, timers, seed, timeout_s):
        return [
            {
                "implementation": n,
                "timer": t,
                "status": "ok",
                "matmul_tflops": 700.0,
                "read_gbps": 4500.0,
                **dict.fromkeys(("latency_us_p20", "latency_us_p50", "latency_us_p80"), 10.0),
            }
            for n in names
            for t in timers
        ]

    monkeypatch.setattr(bench, "gate_group", gate)
    monkeypatch.setattr(bench, "time_in_process", time_case)
    monkeypatch.setattr(records.provenance, "machine", lambda: {"gpu": "NVIDIA H200"})
    path = tmp_path / "decode_h200_2026-01-01.csv"
    common = [
        "--output",
        str(path),
        "--implementations",
        "naive",
        "portable",
        "--context-len",
        "1024",
        "--num-heads",
        "128",
        "--batch-size",
    ]
    for batches, num_failed in ((["8"], 2), (["8", "32"], 2)):
        records._LOCKS.clear()
        args = bench._parser().parse_args([*common, *batches])
        assert bench.run_benchmark(args, common) == num_failed
    assert asked == [(n, f"b{b}-n1024-h128") for b in (8, 32) for n in ("naive", "portable")]
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == DECODE_COLUMNS
    assert len(rows) == 2 * 2 * 2
    failed = [r for r in rows if r["implementation"] == "naive"]
    assert {(r["passed"], r["status"], r["latency_us_p50"]) for r in failed} == {
        ("False", "failed: relative error", "")
    }
    # --again measures anew what it is told to, and keeps the old rows beside the file
    records._LOCKS.clear()
    args = bench._parser().parse_args([*common, "8", "--again", "--timer", "eager"])
    bench.run_benchmark(args, common)
    with path.open() as file:
        again = list(csv.DictReader(file))
    is_new = {id(r): r["run_id"].endswith("-3") for r in again}
    assert {(r["batch_size"], r["timer"]) for r in again if is_new[id(r)]} == {("8", "eager")}
    assert sum(is_new.values()) == 2
    assert len(again) == len(rows)
    with path.with_suffix(".replaced.csv").open() as file:
        replaced = list(csv.DictReader(file))
    assert {(r["batch_size"], r["timer"], r["run_id"][-1]) for r in replaced} == {("8", "eager", "1")}
    for part in ("", "1/2"):
        with pytest.raises(ValueError, match="only run that writes it"):
            records.start_run(path, common, 0, part)
    records._LOCKS.clear()
    sidecar = json.loads(path.with_suffix(".json").read_text())
    assert [r["run_id"] for r in sidecar["runs"]] == [f"decode_h200_2026-01-01-{i}" for i in (1, 2, 3)]
    assert {r["source_sha256"] for r in sidecar["runs"]} == {source_digest()}


def test_runs_that_share_the_cases_write_one_file(monkeypatch, tmp_path):
    """Each part once, and nobody else meanwhile."""
    path = tmp_path / "decode_h200_2026-01-01.csv"
    monkeypatch.setattr(records.provenance, "machine", lambda: {})
    assert [records.start_run(path, [], 0, part) for part in ("1/2", "2/2")] == [f"{path.stem}-{i}" for i in (1, 2)]
    for part in ("1/2", "2/2", ""):
        with pytest.raises(ValueError, match="only run that writes it"):
            records.start_run(path, [], 0, part)
    records._LOCKS.clear()


def test_only_what_is_missing_is_measured(monkeypatch, tmp_path):
    """One timer first, then both, then one more implementation: no row twice."""
    path = tmp_path / "decode_h200_2026-01-01.csv"
    ok = Verdict(1e-3, True, "ok")
    monkeypatch.setattr(
        bench, "gate_group", lambda selected, *_: {(n, c): ok for c, names in selected.items() for n in names}
    )
    monkeypatch.setattr(
        bench,
        "time_in_process",
        lambda case, names, *, timers, **_: [
            {"implementation": n, "timer": t, "status": "out_of_memory"} for n in names for t in timers
        ],
    )
    monkeypatch.setattr(records.provenance, "machine", lambda: {})
    for extra in (["8", "--timer", "eager"], ["8"], ["8", "32", "--implementations", "portable", "naive"]):
        records._LOCKS.clear()
        argv = ["--output", str(path), "--context-len", "1024", "--implementations", "portable", "--batch-size", *extra]
        bench.run_benchmark(bench._parser().parse_args(argv), argv)
    records._LOCKS.clear()
    rows = records.read_rows(path)
    keys = [bench._key(row) for row in rows]
    assert len(keys) == len(set(keys)) == 8
    assert {row["passed"] for row in rows} == {"False"}


def test_a_refusal_is_kept_and_is_no_failure(monkeypatch, tmp_path):
    """torch.compile on a ragged batch: a row that says so, and a run that ends well."""
    path = tmp_path / "decode_h200_2026-01-01.csv"
    refused = Verdict(None, False, "refused: ragged")
    monkeypatch.setattr(
        bench, "gate_group", lambda selected, *_: {(n, c): refused for c in selected for n in selected[c]}
    )
    monkeypatch.setattr(bench, "time_in_process", lambda *_, **__: [])
    monkeypatch.setattr(records.provenance, "machine", lambda: {})
    records._LOCKS.clear()
    argv = ["--output", str(path), "--implementations", "absorbed", "--batch-size", "2", "--context-len", "300"]
    argv += ["--lengths", "log-uniform", "even"]
    assert bench.run_benchmark(bench._parser().parse_args(argv), argv) == 0
    records._LOCKS.clear()
    rows = records.read_rows(path)
    assert {(row["lengths"], row["status"], row["passed"]) for row in rows} == {
        ("log-uniform", "refused: ragged", "False"),
        ("even", "refused: ragged", "False"),
    }


def test_a_file_of_another_version_is_not_appended_to(tmp_path):
    path = tmp_path / "decode_h200_2026-01-01.csv"
    path.write_text(",".join(c for c in DECODE_COLUMNS if c != "lengths") + "\n")
    args = bench._parser().parse_args(["--output", str(path), "--implementations", "absorbed"])
    with pytest.raises(ValueError, match="differs in lengths; name another file"):
        bench.run_benchmark(args, [])
    with pytest.raises(ValueError, match="differs in lengths"):
        records.append_rows(path, DECODE_COLUMNS, [])


def test_large_inputs_are_checked_by_fewer_gates_at_a_time(monkeypatch):
    class H200:
        total_memory = 150e9

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    assert gates._gate_jobs([Case(8, 1024)], "cuda") == gates._GATE_JOBS
    assert gates._gate_jobs([Case(8, 1024), Case(128, 131072, lengths="one-long")], "cuda") == 1
    assert gates._gate_jobs([Case(128, 131072)], "cpu") == gates._GATE_JOBS


def test_a_failure_in_timing_overrides_the_gates_verdict():
    row = bench._row(Case(1, 16), "portable", "eager", Verdict(1e-3, True, "ok"), {"status": "failed: hung"}, "run")
    assert (row["status"], row["passed"]) == ("failed: hung", False)


def test_a_contestants_own_prints_are_not_answers(monkeypatch):
    script = """
import sys
for line in sys.stdin:
    print("hello")
    print('{"rel_err": 0.5, "passed": true, "status": "ok"}', flush=True)
"""
    _replace_child(monkeypatch, script)
    ((_, verdict),) = subprocesses.gate_in_process("x", [Case(1, 16)], device="cpu", seed=0, timeout_s=20)
    assert verdict.status == "ok"


@without_gpu
def test_bf16_is_refused_without_a_gpu():
    done = _bench("--check", "--dtype", "bfloat16")
    assert done.returncode == 2
    assert "expected float16 without a GPU" in done.stderr


@pytest.mark.parametrize(
    ("device_name", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_files_are_named_by_gpu(device_name, short):
    assert gpu_name(device_name) == short
