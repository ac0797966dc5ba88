"""The sanitizer command with a tool that only pretends: what it finds, how it judges, what it keeps."""

import csv
import os
import stat
import subprocess
import sys

import pytest

from mla.measure import provenance, records, sanitize
from mla.schema import SANITIZER_COLUMNS


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
    row = sanitize.sanitize(str(_tool(tmp_path / "bin")), "memcheck", "portable", "kernel", limit_s=0.5)
    assert (row["errors"], row["verdict"]) == (None, "timeout")
    assert row["seconds"] < 20


FAKE = """
test "$1" = --version && { echo "Version 2025.3.0.0 (build 1)"; exit 0; }
test "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 || exit 3
case "$2-$*" in
    racecheck-*"needle"*)
        echo "========= Error: Race reported between Write access at k(int *)+0x70 in k.cu:4"
        echo "=========     and Read access at k(int *)+0x90 in k.cu:5 [34 hazards]"
        echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)" ;;
    *) echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""


def _rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("found_in", [None, "needle", "hopper needle"])
@pytest.mark.parametrize("is_false_alarm", [False, True])
def test_the_table_is_kept(found_in, is_false_alarm, monkeypatch, tmp_path, capsys):
    tool = _tool(tmp_path / "bin", FAKE)
    targets = [("memcheck", "straw", "kernel"), ("racecheck", "needle", "planted"), ("synccheck", "hay", "planted")]
    control = "needle of a control" if is_false_alarm else "control"
    targets += [("racecheck", control, "control")]
    targets += [("racecheck", found_in, "kernel")] if found_in else []
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: str(tool))
    monkeypatch.setattr(sanitize, "_plan", lambda tools: targets)
    by_itself = []
    monkeypatch.setattr(sanitize, "_run_without_a_tool", lambda name, limit_s: by_itself.append(name))
    monkeypatch.setattr(sanitize.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize.torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(records.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(provenance, "machine", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(provenance, "clocks", lambda: {})
    # a control's false alarm excuses the Hopper kernel alone
    fails = found_in == "needle" or (found_in is not None and not is_false_alarm)
    assert sanitize.main(["--output", str(tmp_path)]) == int(fails)
    stem = f"sanitizer_h200_{provenance.utc_now()[:10]}"
    rows = _rows(tmp_path / f"{stem}.csv")
    assert list(rows[0]) == SANITIZER_COLUMNS
    verdicts = ["clean", "seen", "not seen", "false alarm" if is_false_alarm else "clean"]
    assert [row["verdict"] for row in rows] == verdicts + ["errors"] * (found_in is not None)
    assert {row["tool_version"] for row in rows} == {"2025.3.0.0"}
    assert rows[0]["where"] == ""
    assert rows[1]["where"] == "34 x race: Write at k k.cu:4, Read at k k.cu:5"
    assert (tmp_path / f"{stem}.json").exists()
    # planted faults may crash, so they run under their tool alone
    assert set(by_itself) == {"straw", control, found_in} - {None}
    printed = capsys.readouterr().out
    assert "34 x race: Write at k k.cu:4, Read at k k.cu:5" in printed
    assert "synccheck: clean says nothing of what it does not see: hay" in printed
    assert ("racecheck: errors in the Hopper kernel prove nothing" in printed) == is_false_alarm
    if is_false_alarm:
        assert "not counted as findings: " + ("hopper needle" if found_in == "hopper needle" else "none") in printed


def test_a_call_that_fails_without_a_tool_is_said_first(monkeypatch):
    monkeypatch.setattr(sanitize.sys, "executable", "false")
    with pytest.raises(ValueError, match="portable: expected a call that passes without a tool, got"):
        sanitize._run_without_a_tool("portable", 20)


def test_every_tool_has_every_kernel_and_a_planted_fault(monkeypatch):
    monkeypatch.setattr(sanitize.torch.cuda, "get_device_capability", lambda: (9, 0))
    planned = sanitize._plan(list(sanitize.TOOLS))
    kernels = {target for _, target, kind in planned if kind == "kernel"}
    assert len(kernels) == 4
    for tool in sanitize.TOOLS:
        assert {target for t, target, kind in planned if t == tool and kind == "kernel"} == kernels
        assert any(t == tool and kind == "planted" for t, _, kind in planned)
    assert {tool for tool, _, kind in planned if kind == "control"} == {"racecheck", "initcheck"}
    # a run is told by its tool and name
    assert len({target for _, target, _ in planned}) == len(kernels) + sum(kind != "kernel" for _, _, kind in planned)
    monkeypatch.setattr(sanitize.torch.cuda, "get_device_capability", lambda: (8, 0))
    assert {kind for _, _, kind in sanitize._plan(["racecheck"])} == {"kernel", "planted"}
    assert not [target for _, target, _ in sanitize._plan(["memcheck"]) if "hopper" in target]


def test_help_says_what_the_exit_code_means(capsys):
    with pytest.raises(SystemExit):
        sanitize.main(["--help"])
    assert "Exit code: 1 where a tool finds errors in a kernel, unless" in capsys.readouterr().out


@pytest.mark.slow
def test_planted_faults_and_controls_compile():
    """In a process of its own, since Gluon has no interpreter."""
    code = """
from mla.measure import sanitize_controls as c, sanitize_suite as s
from mla.measure.compiled import inspect_kernel
box = f"tensordesc<bf16[64, 64],{c.BOX!r}>"
for waits in (True, False):
    facts = inspect_kernel(s._tma_copy_kernel, {"desc": box, "out_ptr": "*bf16"}, {"WAITS": waits}, num_warps=4)
    assert facts["UTMALDG"] == 1
assert inspect_kernel(s._arrive_kernel, {"out_ptr": "*i32"}, {}, num_warps=4)["arrivals"] == 1

# groups of warps: one arrival a direction, each behind a barrier among its warps, as in the Hopper kernel
options = dict(num_warps=4, maxnreg=c._MAX_REGISTERS.value)
for waits in (True, False):
    types = {"x_ptr": "*bf16", "out_ptr": "*fp32"}
    facts = inspect_kernel(c._hand_over_kernel, types, {"WAITS": waits}, **options)
    assert (facts["arrivals"], facts["lone_arrivals"], facts["spilled_bytes"]) == (2, 0, 0)
    assert facts["USETMAXREG"] > 0
types = {"x_ptr": "*fp32", "out_ptr": "*fp32"}
barriers = [inspect_kernel(c._groups_kernel, types, {"SHARES": s}, **options)["BAR"] for s in (True, False)]
assert barriers[0] == barriers[1] + 2

types = {"desc": box, "x_ptr": "*bf16"}
assert inspect_kernel(c._tma_store_kernel, types, {}, num_warps=4)["UTMASTG"] == 1
types |= {"parts_ptr": "*bf16", "counter_ptr": "*i32", "out_ptr": "*bf16"}
assert inspect_kernel(c._swap_kernel, types, {}, num_warps=4)["UTMASTG"] == 1
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
