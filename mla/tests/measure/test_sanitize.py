"""The sanitizer command with a tool that only pretends: what it finds, how it judges, what it keeps."""

import csv
import os
import stat
import subprocess
import sys

import pytest

from mla.measure import provenance, records, sanitize
from mla.schema import SANITIZER_COLUMNS


@pytest.mark.parametrize(
    ("output", "returncode", "is_planted", "expected"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0, False, (0, "clean")),
        ("========= ERROR SUMMARY: 3 errors\n", 1, False, (3, "errors")),
        ("========= ERROR SUMMARY: 1 error\n", 0, True, (1, "seen")),
        ("========= ERROR SUMMARY: 0 errors\n", 0, True, (0, "not seen")),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", 0, True, (2, "seen")),
        (None, -9, False, (None, "timeout")),
        # a call that failed is not clean, whatever the count says
        ("RuntimeError: no\n========= ERROR SUMMARY: 0 errors\n", 1, False, (0, "failed: RuntimeError: no")),
        ("========= Error: cannot attach\n", 255, True, (None, "failed: ========= Error: cannot attach")),
        ("", 0, False, (None, "failed: no output")),
    ],
    ids=["clean", "errors", "seen", "not seen", "hazards", "timeout", "failed call", "failed tool", "silent"],
)
def test_verdicts(output, returncode, is_planted, expected):
    assert sanitize.judge(output, returncode, is_planted) == expected


def _tool(folder, body="sleep 60"):
    folder.mkdir(parents=True)
    path = folder / "compute-sanitizer"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_where_the_tool_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(sanitize.glob, "glob", lambda pattern: [str(tmp_path / "cuda" / "bin")])
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(ValueError, match="expected compute-sanitizer on PATH, in CUDA_HOME/bin or in /usr/local/cuda"):
        sanitize.find_sanitizer()
    last = _tool(tmp_path / "cuda" / "bin")
    assert sanitize.find_sanitizer() == str(last)
    home = _tool(tmp_path / "home" / "bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert sanitize.find_sanitizer() == str(home)
    first = _tool(tmp_path / "path")
    assert sanitize.find_sanitizer() == str(first)


def test_a_run_that_passes_its_limit_is_a_timeout(tmp_path):
    row = sanitize.sanitize(str(_tool(tmp_path / "bin")), "memcheck", "portable", False, limit_s=0.5)
    assert (row["errors"], row["verdict"]) == (None, "timeout")
    assert row["seconds"] < 20


FAKE = """
test "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 || exit 3
case "$2-$*" in
    racecheck-*"needle"*) echo "========= RACECHECK SUMMARY: 1 hazard displayed" ;;
    *) echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""


@pytest.mark.parametrize("found_in_kernel", [False, True])
def test_the_table_is_kept(found_in_kernel, monkeypatch, tmp_path, capsys):
    tool = _tool(tmp_path / "bin", FAKE)
    targets = [("memcheck", "straw", False), ("racecheck", "needle", True), ("synccheck", "hay", True)]
    targets += [("racecheck", "needle", False)] if found_in_kernel else []
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: str(tool))
    monkeypatch.setattr(sanitize, "_plan", lambda tools: targets)
    monkeypatch.setattr(sanitize, "_fill_cache", lambda names, limit_s: None)
    monkeypatch.setattr(sanitize.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize.torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(records.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(provenance, "machine", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(provenance, "clocks", lambda: {})
    assert sanitize.main(["--output", str(tmp_path)]) == int(found_in_kernel)
    stem = f"sanitizer_h200_{provenance.utc_now()[:10]}"
    with (tmp_path / f"{stem}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == SANITIZER_COLUMNS
    assert [row["verdict"] for row in rows[:3]] == ["clean", "seen", "not seen"]
    assert (tmp_path / f"{stem}.json").exists()
    assert "not seen" in capsys.readouterr().out


def test_a_call_that_fails_without_a_tool_is_said_first(monkeypatch):
    monkeypatch.setattr(sanitize.sys, "executable", "false")
    with pytest.raises(ValueError, match="portable: expected a call that passes without a tool, got"):
        sanitize._fill_cache(["portable"], 20)


def test_every_tool_has_every_kernel_and_a_planted_fault(monkeypatch):
    monkeypatch.setattr(sanitize.torch.cuda, "get_device_capability", lambda: (9, 0))
    planned = sanitize._plan(list(sanitize.TOOLS))
    kernels = {target for _, target, is_planted in planned if not is_planted}
    assert len(kernels) == 4
    for tool in sanitize.TOOLS:
        assert {target for t, target, is_planted in planned if t == tool and not is_planted} == kernels
        assert any(t == tool and is_planted for t, _, is_planted in planned)
    monkeypatch.setattr(sanitize.torch.cuda, "get_device_capability", lambda: (8, 0))
    assert not [target for _, target, is_planted in sanitize._plan(["memcheck"]) if "hopper" in target]


@pytest.mark.slow
def test_planted_faults_compile():
    """In a process of its own, since Gluon has no interpreter."""
    code = """
from mla.measure import compiled, sanitize_suite as s
box = f"tensordesc<bf16[64, 64],{s._BOX!r}>"
for waits in (True, False):
    facts = compiled.inspect_kernel(
        s._tma_copy_kernel, {"desc": box, "out_ptr": "*bf16"}, {"WAITS": waits}, num_warps=4
    )
    assert facts["UTMALDG"] == 1
assert compiled.inspect_kernel(s._arrive_kernel, {"out_ptr": "*i32"}, {}, num_warps=4)["arrivals"] == 1
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
