"""The study of opponents: what each computes, how a run is written and gone on with, and on a GPU the real thing."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from mla.measure import opponent as opponent_module
from mla.measure import opponents, provenance, records, subprocesses, timing
from mla.measure.cases import Case, draw_problems
from mla.measure.opponent import CHOICES, GRAPH_MODES, Opponent, check, time_opponent
from mla.schema import OPPONENT_COLUMNS

SMALL = Case(2, 96, num_heads=4, page_size=16, dtype="float16", preset="tiny")


@pytest.mark.parametrize("cache", CHOICES["cache"])
@pytest.mark.parametrize(
    ("form", "precision"), [("matmul", "bf16"), ("matmul", "tf32"), ("matmul", "fp32"), ("sdpa", "bf16")]
)
def test_every_form_passes_the_gate(form, precision, cache, device):
    """Uncompiled; scores in fp32 from 16-bit operands are cuBLAS's alone (see the test on a GPU)."""
    problems = draw_problems(SMALL, device, seed=0, at_most=2)
    opponent = Opponent(form, cache, precision, "eager")
    prepared = opponent.prepare(problems)
    assert check(opponent.implementation, prepared, problems)[0] == "ok"
    assert torch.get_float32_matmul_precision() == "highest"
    # the result of one problem is not that of the other
    wrong = type(prepared)(prepared.calls[::-1])
    assert check(opponent.implementation, wrong, problems)[0].startswith("failed: relative error")


def test_precision_is_that_of_the_products():
    """fp32 products are nearer to the reference than 16-bit ones; TF32 is asked for during the call alone."""
    problems = draw_problems(SMALL, "cpu", seed=0, at_most=1)
    errors = {}
    for precision in ("bf16", "fp32"):
        opponent = Opponent(precision=precision, compile_mode="eager")
        errors[precision] = check(opponent.implementation, opponent.prepare(problems), problems)[1]
    assert errors["fp32"] < errors["bf16"]
    seen = []
    opponent = Opponent(precision="tf32", compile_mode="eager")
    original = Opponent.attend
    try:
        Opponent.attend = lambda self, *a: seen.append(torch.get_float32_matmul_precision()) or original(self, *a)
        opponent.prepare(problems)
    finally:
        Opponent.attend = original
    assert set(seen) == {"high"}


def test_unknown_choices_are_refused():
    with pytest.raises(ValueError, match=r"compile_mode: expected one of eager, .*, got 'fast'"):
        Opponent(compile_mode="fast")


def test_modes_with_graphs_of_their_own_are_launched_from_python():
    assert {mode: Opponent(compile_mode=mode).timers for mode in CHOICES["compile_mode"] if mode in GRAPH_MODES} == {
        mode: ("eager",) for mode in GRAPH_MODES
    }
    assert Opponent().timers == ("cuda_graph", "eager")


def test_the_study_names_each_opponent_once_and_tunes_first():
    keys = [opponents._key(opponents._columns(*pair)) for pair in opponents.STUDY]
    assert len(set(keys)) == len(keys)
    # max-autotune reads what the mode without graphs left in the cache
    for place, (opponent, case) in enumerate(opponents.STUDY):
        if opponent.compile_mode == "max-autotune":
            tuned = replace(opponent, compile_mode="max-autotune-no-cudagraphs")
            assert (tuned, case) in opponents.STUDY[:place]


def test_one_opponent_is_timed_in_the_rounds_of_ours(monkeypatch, device):
    monkeypatch.setattr(
        opponent_module, "draw_problems", lambda case, _, seed: draw_problems(case, device, seed, at_most=2)
    )
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def capture(calls, pool=None):
        out, lse = calls[-1]()
        value = out.clone()
        return timing.Stretch(lambda: out.copy_(value), 1, calls, (out, lse))

    monkeypatch.setattr(timing, "graph_stretch", capture)
    monkeypatch.setattr(timing, "eager_stretch", capture)
    monkeypatch.setattr(timing, "ceiling_stretches", lambda seed: {"matmul": None, "read": None})
    ms = {"opponent": 3.0, "portable": 2.0, "matmul": 1.0, "read": 1.0}
    monkeypatch.setattr(timing, "time_in_rounds", lambda stretches, rng, rounds: {n: [ms[n]] * 4 for n in stretches})
    rows = time_opponent(Opponent(compile_mode="eager"), SMALL, ["portable"], seed=0)
    assert [(r["timer"], r["status"], r["latency_us_p50"], r["portable_us_p50"], r["repeats"]) for r in rows] == [
        (timer, "ok", 3000.0, 2000.0, 4) for timer in ("cuda_graph", "eager")
    ]
    # a wrong one is not timed
    monkeypatch.setattr(Opponent, "attend", lambda self, q, cache, table, tokens, rank, scale: q[..., :rank] * 1.0)
    rows = time_opponent(Opponent(compile_mode="eager"), SMALL, ["portable"], seed=0)
    assert all(r["status"].startswith("failed: relative error") and "latency_us_p50" not in r for r in rows)


CHILD = """
import json, sys, time
request = json.load(sys.stdin)
if request["n"] == 1: sys.exit("no memory")
if request["n"] == 2: time.sleep(60)
print("noise")
print(json.dumps([request["n"]]))
"""


def test_each_request_has_a_process_and_failures_say_why(monkeypatch, tmp_path):
    (tmp_path / "answering.py").write_text(CHILD)
    answers = subprocesses.answers_in_fresh_processes(
        "answering", [{"n": n} for n in range(4)], timeout_s=2, environment={"PYTHONPATH": str(tmp_path)}
    )
    assert [(request["n"], answer, reason) for request, answer, reason in answers] == [
        (0, [0], ""),
        (1, None, "failed: the process ended with code 1: no memory"),
        (2, None, "failed: no answer within 2 s"),
        (3, [3], ""),
    ]


def test_a_run_is_written_and_gone_on_with(monkeypatch, tmp_path, capsys):
    asked = []

    def answer(module, requests, *, timeout_s, environment):
        for request in requests:
            asked.append(request)
            if request["opponent"]["cache"] == "gathered":
                yield request, None, "failed: no answer within 120 s"
            else:
                yield request, [{"timer": "eager", "status": "ok", "latency_us_p50": 20.0, "portable_us_p50": 5.0,
                                 "hopper_us_p50": None}], ""  # fmt: skip

    monkeypatch.setattr(opponents, "answers_in_fresh_processes", answer)
    monkeypatch.setattr(opponents, "STUDY", ((Opponent(), SMALL), (Opponent(cache="gathered"), SMALL)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(records.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(provenance, "machine", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(provenance, "clocks", lambda: {})

    def run(*argv):
        records._LOCKS.clear()
        assert opponents.main(["--output", str(tmp_path), *argv]) == 0
        (path,) = tmp_path.glob("opponents_h200_*.csv")
        return records.read_rows(path)

    rows = run("--time-budget", "0")
    assert [(row["cache"], row["timer"], row["status"]) for row in rows] == [("contiguous", "eager", "ok")]
    assert list(rows[0]) == OPPONENT_COLUMNS
    rows = run()
    assert [row["timer"] for row in rows[1:]] == ["cuda_graph", "eager"]
    assert {row["status"] for row in rows[1:]} == {"failed: no answer within 120 s"}
    assert run() == rows
    assert [request["opponent"]["cache"] for request in asked] == ["contiguous", "gathered"]
    assert asked[0]["case"] == asdict(SMALL)
    records._LOCKS.clear()
    output = capsys.readouterr()
    assert "4.00 x portable" in output.out
    assert "time budget spent" in output.err
    sidecar = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert [r["command"].split()[1] for r in sidecar["runs"]] == ["opponents"] * 3


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        opponents.main(["--output", "data"])
    assert "expected a CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu():
    """A compiled opponent and one with CUDA graphs of its own, each in a process, as the study has them."""
    chosen = [Opponent(precision="fp32_scores"), Opponent(compile_mode="reduce-overhead")]
    requests = [{"opponent": asdict(o), "case": asdict(Case(8, 1024)), "own": ["portable"], "seed": 0} for o in chosen]
    for (_, answer, reason), o in zip(
        subprocesses.answers_in_fresh_processes("mla.measure.opponent", requests, timeout_s=60), chosen, strict=True
    ):
        assert reason == ""
        assert [row["timer"] for row in answer] == list(o.timers)
        for row in answer:
            assert row["status"] == "ok"
            assert row["latency_us_p50"] > 0 and row["portable_us_p50"] > 0
