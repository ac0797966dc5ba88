"""Which cases and implementations a command line asks for."""

import argparse
import dataclasses

import pytest

from mla.measure import implementations, selection
from mla.measure.cases import CPU_CASES, GROUPS, Case
from mla.measure.implementations import ABLATIONS, IMPLEMENTATIONS, STAIRCASE


def _select(*argv, has_gpu=True):
    parser = argparse.ArgumentParser()
    selection.add_arguments(parser)
    return selection.select(parser.parse_args(argv), has_gpu)


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch):
    """All implementations can run, as on an H200 with the peers."""
    present = {n: dataclasses.replace(i, version=lambda: "1") for n, i in IMPLEMENTATIONS.items()}
    monkeypatch.setattr(implementations, "IMPLEMENTATIONS", present)


def test_a_gpu_measures_the_sixteen_shapes():
    selected = _select()
    assert tuple(selected) == GROUPS["sixteen"]
    assert selected == _select("--cases", "sixteen")
    usual = [name for name in IMPLEMENTATIONS if name not in ABLATIONS]
    assert all(names == usual for names in selected.values())


@pytest.mark.parametrize("group", ["heads", "long", "ragged"])
def test_groups_by_name(group):
    assert tuple(_select("--cases", group)) == GROUPS[group]


def test_the_staircase_has_its_own_implementations():
    selected = _select("--cases", "staircase")
    assert tuple(selected) == GROUPS["staircase"]
    assert {tuple(sorted(names)) for names in selected.values()} == {tuple(sorted(STAIRCASE))}


def test_all_is_every_case_once_with_the_ablations_at_the_staircase():
    selected = _select("--cases", "all")
    assert set(selected) == {case for cases in GROUPS.values() for case in cases}
    assert tuple(selected)[:16] == GROUPS["sixteen"]
    with_ablations = {case for case, names in selected.items() if set(ABLATIONS) & set(names)}
    assert with_ablations == set(GROUPS["staircase"])
    assert all(names == list(IMPLEMENTATIONS) for case, names in selected.items() if case in with_ablations)


def test_named_implementations_are_measured_everywhere():
    selected = _select("--cases", "staircase", "long", "--implementations", "hopper_without_pdl", "flashmla")
    assert set(selected) == {*GROUPS["staircase"], *GROUPS["long"]}
    assert {tuple(names) for names in selected.values()} == {("hopper_without_pdl", "flashmla")}


def test_a_shape_of_its_own():
    selected = _select("--batch-size", "2", "4", "--context-len", "2048", "--lengths", "log-uniform", "even")
    assert set(selected) == {Case(b, 2048, lengths=kind) for b in (2, 4) for kind in ("log-uniform", "even")}
    assert set(_select("--num-heads", "16")) == {dataclasses.replace(c, num_heads=16) for c in GROUPS["sixteen"]}


def test_parts_share_the_cases():
    whole = _select("--cases", "sixteen", "staircase")
    parts = [_select("--cases", "sixteen", "staircase", "--part", f"{i}/3") for i in (1, 2, 3)]
    assert [len(part) for part in parts] == [6, 5, 5]
    assert {case: names for part in parts for case, names in part.items()} == whole


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/2/3"])
def test_a_part_that_is_none_is_an_error(part):
    with pytest.raises(ValueError, match="--part: expected I/N with I from 1 to N"):
        _select("--part", part)


def test_dtype_goes_with_groups():
    assert {c.dtype for c in _select("--cases", "long", "--dtype", "float16")} == {"float16"}


@pytest.mark.parametrize(
    "option",
    [
        ("--batch-size", "8"),
        ("--context-len", "64"),
        ("--num-heads", "8"),
        ("--page-size", "16"),
        ("--lengths", "even"),
    ],
)
def test_groups_and_a_shape_exclude_each_other(option):
    with pytest.raises(ValueError, match=f"--cases: expected groups or a shape, got both, {option[0]} too"):
        _select("--cases", "long", *option)


def test_without_a_gpu_cases_are_small():
    assert tuple(_select(has_gpu=False)) == CPU_CASES
    assert list(_select("--batch-size", "1", has_gpu=False)) == [Case(1, 70, num_heads=16, dtype="float16")]
    with pytest.raises(ValueError, match="--cases: expected a GPU"):
        _select("--cases", "long", has_gpu=False)


def test_an_unknown_group_is_an_error(capsys):
    with pytest.raises(SystemExit):
        _select("--cases", "short")
    assert "choose from" in capsys.readouterr().err
