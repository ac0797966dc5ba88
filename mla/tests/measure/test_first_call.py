"""The first call: fresh processes, an empty cache and then a filled one, and the file that is written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mla.measure import first_call, provenance, records

SCRIPT = """
import os, pathlib, sys
cache = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
print("compiling", sys.argv[1])
print(0.5 if list(cache.iterdir()) else 4.25)
(cache / "kernel").touch()
"""


def _replace_child(monkeypatch, script):
    original = subprocess.run

    def run(command, **options):
        assert command[1:3] == ["-m", "mla.measure.first_call"]
        return original([sys.executable, "-c", script, command[3]], **options)

    monkeypatch.setattr(first_call.subprocess, "run", run)


def test_each_repeat_begins_with_an_empty_cache(monkeypatch):
    _replace_child(monkeypatch, SCRIPT)
    found = first_call.measure(["portable", "hopper"], repeats=2, timeout_s=20)
    assert found == {n: {"empty_cache": [4.25] * 2, "filled_cache": [0.5] * 2} for n in ("portable", "hopper")}


def test_a_failed_process_says_why(monkeypatch):
    with monkeypatch.context() as patch:
        _replace_child(patch, "import sys; sys.exit('no compiler')")
        with pytest.raises(ValueError, match="portable: expected a first call, got a process that ended with 1: no c"):
            first_call.measure(["portable"], repeats=1, timeout_s=20)
    _replace_child(monkeypatch, "import time; time.sleep(60)")
    with pytest.raises(ValueError, match="portable: expected a first call within 1 s"):
        first_call.measure(["portable"], repeats=1, timeout_s=1)


def test_the_first_round_is_left_out_of_the_time_on_the_host(monkeypatch):
    """Calls of 2 and 3 us on a clock that only they move; the first one compiles for a second."""
    clock, first = [0.0], [1.0]

    def call(us):
        clock[0] += us * 1e-6 + (first.pop() if first else 0)

    monkeypatch.setattr(first_call.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(first_call.time, "perf_counter", lambda: clock[0])
    calls = {"fast": lambda: call(2), "slow": lambda: call(3)}
    assert first_call.host_us(calls, rounds=3) == {"fast": 2.0, "slow": 3.0}


def test_the_file_holds_provenance_and_is_not_measured_twice(monkeypatch, tmp_path, capsys):
    asked = []

    def measure(names, repeats, timeout_s):
        asked.append(names)
        return {n: {"empty_cache": [4.0] * repeats, "filled_cache": [0.5] * repeats} for n in names}

    monkeypatch.setattr(first_call, "measure", measure)
    monkeypatch.setattr(first_call, "measure_host", lambda names: dict.fromkeys(names, 20.0))
    monkeypatch.setattr(first_call.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(first_call.torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(records.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(provenance, "machine", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(provenance, "clocks", lambda: {})
    assert first_call.main(["--output", str(tmp_path)]) == 0
    # without a Hopper GPU only the portable kernel
    assert asked == [["portable"]]
    (path,) = tmp_path.iterdir()
    assert path.name == f"first_call_h200_{provenance.utc_now()[:10]}.json"
    record = json.loads(path.read_text())
    assert record["seconds"] == {"portable": {"empty_cache": [4.0] * 3, "filled_cache": [0.5] * 3}}
    assert record["host_us"]["portable"] == 20.0
    assert record["gpu"] == "NVIDIA H200"
    assert record["case"]["batch_size"] == 8
    assert {"command", "commit", "dirty", "source_sha256", "date_utc", "clocks"} <= set(record)
    assert str(Path.home()) not in path.read_text()
    assert first_call.main(["--output", str(tmp_path)]) == 0
    assert len(asked) == 1
    assert "is there already" in capsys.readouterr().err
    assert first_call.main(["--output", str(tmp_path), "--again"]) == 0
    assert len(asked) == 2


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(first_call.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        first_call.main(["--output", "data"])
    assert "expected a CUDA GPU" in capsys.readouterr().err
