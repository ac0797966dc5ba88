"""What is read from the output of compute-sanitizer, in the tool's form, and what follows from it."""

import pytest

from mla.measure import sanitize_reports as reports

INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 16 bytes
=========     at mla_decode_hopper_kernel+0x7a30 in hopper_merge.py:73
=========     by thread (0,0,0) in block (0,1,0)
=========     Address 0x7f3c7ec00000
=========     and is inside the nearest allocation at 0x7f3c7ec00000 of size 1,024 bytes
=========
========= Uninitialized __global__ memory read of size 16 bytes
=========     at mla_decode_hopper_kernel+0x7b10 in hopper_merge.py:73
=========     by thread (1,0,0) in block (0,1,0)
=========     Address 0x7f3c7ec00010
=========
a line of the program itself
========= Uninitialized __global__ memory read of size 8 bytes
=========     at void at::native::vectorized_kernel<(int)4, T<a, b>>(int, T2)+0x130
=========     by thread (1,0,0) in block (0,0,0)
=========
========= Host API memory access error at host access to 0x7f1303fd1400 of size 12288 bytes
=========     Uninitialized access at 0x7f1303fd1600 on access by cudaMemcpy source.
=========
========= ERROR SUMMARY: 4 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at mla_decode_hopper_kernel+0x430 in hopper.py:417
=========     and Read access at mla_decode_hopper_kernel+0x770 in hopper.py:505 [248 hazards]
=========     and Read access at mla_decode_hopper_kernel+0x7a0 in hopper.py:505 [8 hazards]
=========     and Write access at mla_decode_hopper_kernel+0x810 in hopper.py:519
=========
========= Warning: Race reported between Read access at copy+0x10
=========     and Write access at copy+0x20 [1 hazard]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
OTHERS = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at divergent+0xd0
=========     by thread (1,0,0) in block (0,0,0)
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call
=========
========= A report of a form that is not known
=========     with details
========= Target application returned an error
========= ERROR SUMMARY: 3 errors
========= ERROR SUMMARY: 1 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""


def test_reports_are_gathered_by_kind_and_place():
    assert reports.find_sites(INITCHECK) == {
        "Uninitialized __global__ memory read of size 16 bytes at mla_decode_hopper_kernel hopper_merge.py:73": 2,
        "Uninitialized __global__ memory read of size 8 bytes at at::native::vectorized_kernel+0x130": 1,
        "Host API memory access error at host access to 0x.. of size 12288 bytes by cudaMemcpy source": 1,
    }
    assert reports.count_errors(INITCHECK) == 4


def test_races_are_pairs_of_places_with_their_hazards():
    write = "race: Write at mla_decode_hopper_kernel hopper.py:417"
    assert reports.find_sites(RACECHECK) == {
        f"{write}, Read at mla_decode_hopper_kernel hopper.py:505": 256,
        f"{write}, Write at mla_decode_hopper_kernel hopper.py:519": 1,
        "race: Read at copy+0x10, Write at copy+0x20": 1,
    }
    assert reports.count_errors(RACECHECK) == 2


def test_a_report_without_a_known_place_is_not_lost():
    sites = reports.find_sites(OTHERS)
    assert sum(sites.values()) == reports.count_errors(OTHERS) == 3
    assert sites["Barrier error detected. Divergent thread(s) in block at divergent+0xd0"] == 1
    assert sites["A report of a form that is not known"] == 1
    # the form that names both accesses in one line
    assert list(reports.find_sites("========= Error: Race reported between Write access at 0x50 in k and more\n"))
    assert not reports.find_sites("") and reports.count_errors("") is None


def test_the_description_is_short_and_says_what_it_leaves_out():
    sites = reports.find_sites(RACECHECK)
    text = reports.describe_sites(sites)
    assert text.startswith("256 x race: Write at")
    assert text.endswith("hopper.py:519; 1 x race: Read at copy+0x10, Write at copy+0x20")
    many = type(sites)({f"error {i} " + "x" * 80: 100 - i for i in range(10)})
    text = reports.describe_sites(many)
    assert text.startswith("100 x error 0") and text.endswith("; and 7 more places")
    assert len(text) < 330
    assert len(reports.describe_sites(type(sites)({"x" * 999: 1}))) == 300
    assert reports.describe_sites(type(sites)()) == ""


@pytest.mark.parametrize(
    ("output", "returncode", "kind", "expected"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0, "kernel", (0, "clean")),
        ("========= ERROR SUMMARY: 3 errors\n", 0, "kernel", (3, "errors")),
        ("========= ERROR SUMMARY: 1 error\n", 0, "planted", (1, "seen")),
        ("========= ERROR SUMMARY: 1 error\n", 1, "planted", (1, "seen")),
        ("========= ERROR SUMMARY: 0 errors\n", 0, "planted", (0, "not seen")),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", 0, "planted", (2, "seen")),
        ("========= ERROR SUMMARY: 0 errors\n", 0, "control", (0, "clean")),
        ("========= ERROR SUMMARY: 9 errors\n", 0, "control", (9, "false alarm")),
        (None, -9, "kernel", (None, "timeout")),
        # a call that failed is neither clean nor a false alarm, whatever the count says
        ("RuntimeError: no\n========= ERROR SUMMARY: 0 errors\n", 1, "kernel", (0, "failed: RuntimeError: no")),
        ("RuntimeError: no\n========= ERROR SUMMARY: 9 errors\n", 1, "kernel", (9, "failed: RuntimeError: no")),
        ("RuntimeError: no\n========= ERROR SUMMARY: 9 errors\n", 1, "control", (9, "failed: RuntimeError: no")),
        ("========= Error: cannot attach\n", 255, "planted", (None, "failed: ========= Error: cannot attach")),
        ("", 0, "kernel", (None, "failed: no output")),
    ],
)
def test_verdicts(output, returncode, kind, expected):
    assert reports.judge(output, returncode, kind) == expected


def _row(tool, target, kind, verdict):
    return {"tool": tool, "target": target, "kind": kind, "verdict": verdict}


HOPPER = _row("racecheck", "hopper", "kernel", "errors")


@pytest.mark.parametrize(
    ("row", "others", "expected"),
    [
        (HOPPER, [], True),
        (HOPPER, [_row("racecheck", "a", "control", "clean")], True),
        (HOPPER, [_row("racecheck", "a", "control", "clean"), _row("racecheck", "b", "control", "false alarm")], False),
        (HOPPER, [_row("initcheck", "a", "control", "false alarm")], True),
        (HOPPER, [_row("racecheck", "a", "control", "failed: wrong")], True),
        ({**HOPPER, "target": "portable"}, [_row("racecheck", "a", "control", "false alarm")], True),
        ({**HOPPER, "verdict": "failed: wrong"}, [_row("racecheck", "a", "control", "false alarm")], True),
        ({**HOPPER, "verdict": "timeout"}, [], False),
        (_row("racecheck", "a", "control", "failed: wrong"), [], True),
        (_row("racecheck", "a", "control", "false alarm"), [], False),
        (_row("racecheck", "a", "planted", "not seen"), [], False),
    ],
)
def test_what_makes_the_command_fail(row, others, expected):
    assert reports.is_finding(row, [row, *others]) is expected


def test_what_cannot_be_trusted_is_named():
    rows = [
        HOPPER,
        _row("racecheck", "portable", "kernel", "errors"),
        _row("racecheck", "hand-over", "control", "false alarm"),
        _row("memcheck", "TMA load", "planted", "not seen"),
        _row("synccheck", "hopper", "kernel", "errors"),
    ]
    racecheck, memcheck = reports.untrusted(rows)
    assert "false alarm: hand-over" in racecheck and racecheck.endswith("not counted as findings: hopper")
    assert memcheck == "memcheck: clean says nothing of what it does not see: TMA load"
