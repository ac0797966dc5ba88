"""Several runs of the sixteen shapes: what is asked, what is written, what is made again."""

import csv

import pytest
import torch

from mla.measure import provenance, records, runs
from mla.measure.cases import SIXTEEN_SHAPES
from mla.schema import RUN_COLUMNS


@pytest.fixture
def asked(monkeypatch):
    """Answers without a GPU: hopper takes 2 us, FlashMLA 3; the second run dies. Holds the requests put."""
    requests = []

    def answers(module, todo, timeout_s):
        assert module == "mla.measure.worker"
        for request in todo:
            requests.append(request)
            if len(requests) == 2:
                yield request, None, "failed: no answer within 400 s"
                continue
            us = dict(zip(request["names"], (2.0, 3.0), strict=True))
            rows = [
                {"implementation": n, "timer": "cuda_graph", "status": "ok", "latency_us_p50": us[n], "plan_us": 1.0}
                for n in request["names"]
            ]
            yield request, [[dict(row) for row in rows] for _ in request["cases"]], ""

    monkeypatch.setattr(runs, "answers_in_fresh_processes", answers)
    monkeypatch.setattr(runs, "available", lambda names, has_gpu: dict.fromkeys(names))
    monkeypatch.setattr(provenance, "machine", lambda: {})
    monkeypatch.setattr(provenance, "clocks", lambda: {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    return requests


def test_runs_are_written_and_only_missing_ones_are_made(asked, tmp_path, capsys):
    path = tmp_path / "runs_h200_2026-01-01.csv"

    def run(*argv):
        records._LOCKS.clear()
        return runs.main(["--output", str(path), *argv])

    assert run("--runs", "1") == 0
    assert run("--runs", "3") == 1
    records._LOCKS.clear()
    assert len(asked) == 3
    assert [case["batch_size"] for case in asked[0]["cases"]] == [case.batch_size for case in SIXTEEN_SHAPES]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == RUN_COLUMNS
    assert [row["run"] for row in rows] == [str(i) for i in (1, 2, 3) for _ in range(32)]
    assert {
        (row["run"], row["status"], row["latency_us_p50"]) for row in rows if row["implementation"] == "hopper"
    } == {
        ("1", "ok", "2.0"),
        ("2", "failed: no answer within 400 s", ""),
        ("3", "ok", "2.0"),
    }
    told = capsys.readouterr().out.splitlines()
    assert told[0] == ("run 1: hopper is 1.500 to 1.500 times as fast as flashmla at 16 shapes, geometric mean 1.500")
    assert told[1] == "run 2: failed: no answer within 400 s"
