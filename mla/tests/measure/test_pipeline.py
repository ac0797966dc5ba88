"""The pipeline benchmark: what its worker measures, on the CPU with a tiny model, and what the command writes."""

import json

import pytest
import torch

from mla.measure import bench, pipeline, provenance, records
from mla.measure.pipeline_worker import MODELS, WARM_UP, PipelineCase, answer
from mla.schema import PIPELINE_COLUMNS

TINY = dict(
    new_tokens=2, num_layers=1, hidden_size=64, num_heads=2, intermediate_size=64, device="cpu", batch_size=2
)  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("is_prefilled", [True, False], ids=["prompt", "random rows"])
def test_the_worker_measures_each_model(model, is_prefilled):
    case = PipelineCase(model, context_len=20, is_prefilled=is_prefilled, **TINY)
    found = answer(case, {})
    assert found["status"] == "ok"
    assert 0 < found["latency_us_p20"] <= found["latency_us_p50"] <= found["latency_us_p80"]
    assert found["tokens_per_s"] == pytest.approx(2e6 / found["latency_us_p50"], rel=0.01)
    assert found["repeats"] == 2
    assert (found["prefill_ms"] is not None) == is_prefilled
    columns = 20 + WARM_UP + 2 + 1
    # latent rows in whole pages; latents in the library's own layers; keys and values of 2 heads of 32
    expected = {"mla_patched": 64 * 576, "mla_unpatched": columns * 576, "mha": columns * 2 * 2 * 32}[model]
    assert found["cache_bytes"] == 2 * 4 * expected
    assert found["weight_bytes"] == 4 * found["parameters"]


def test_what_does_not_fit_or_fails_is_said(monkeypatch):
    from mla.measure import pipeline_worker

    case = PipelineCase("mha", context_len=20, is_prefilled=True, **TINY)

    def raises(error):
        def make(case):
            raise error

        return make

    monkeypatch.setattr(pipeline_worker, "make_model", raises(torch.OutOfMemoryError("no")))
    assert answer(case, {}) == {"status": "out_of_memory"}
    monkeypatch.setattr(pipeline_worker, "make_model", raises(ValueError("odd\nwidth")))
    assert answer(case, {}) == {"status": "failed: ValueError: odd width"}


def _on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(provenance, "machine", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(provenance, "clocks", lambda: {})


def test_the_command_writes_a_row_a_case_and_goes_on(monkeypatch, tmp_path, capsys):
    _on_a_gpu(monkeypatch)
    asked = []

    def answers(command, requests, *, begins, timeout_s):
        asked.append([(case.model, case.context_len, case.is_prefilled) for case in requests])
        for case in requests:
            if case.model == "mha":
                yield case, None, "failed: no answer within 120 s"
            else:
                yield case, {"status": "ok", "latency_us_p50": 1000.0, "tokens_per_s": 8e3, "cache_bytes": 2**30}, ""

    monkeypatch.setattr(pipeline, "answers_in_process", answers)
    path = tmp_path / "pipeline.csv"
    arguments = ["generate", "--output", str(path), "--contexts", "1024", "16384"]
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    assert ended.value.code == 1
    rows = records.read_rows(path)
    assert list(rows[0]) == PIPELINE_COLUMNS
    assert [row["model"] for row in rows] == [model for model in MODELS for _ in range(2)]
    assert [row["fill"] for row in rows[:2]] == ["prefill", "random_rows"]
    assert rows[-1]["status"] == "failed: no answer within 120 s"
    assert json.loads(path.with_suffix(".json").read_text())["runs"][0]["command"].startswith(
        "triton-mla-bench generate --output"
    )
    assert "8000.0 tokens/s, cache   1.00 GiB" in capsys.readouterr().out
    # held until the process ends
    records._LOCKS.clear()
    with pytest.raises(SystemExit):
        bench.main([*arguments, "--models", "mla_patched", "--contexts", "1024", "2048"])
    records._LOCKS.clear()
    assert asked[-1] == [("mla_patched", 2048, True)]


def test_the_command_needs_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit):
        pipeline.main(["--output", "somewhere"])
    assert "expected a CUDA GPU" in capsys.readouterr().err


def test_contexts_are_the_powers_of_two_up_to_128k():
    assert pipeline.CONTEXTS == (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
