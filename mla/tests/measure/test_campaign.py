"""The random campaign: cases follow from their seeds, failures are counted and can be repeated, the summary is kept."""

import csv
import json

import pytest
import torch

from mla.measure import campaign, provenance, records
from mla.schema import CAMPAIGN_COLUMNS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_few_cases_pass(capsys):
    assert campaign.main(["--cases", "6", "--first-seed", "11", "--kernels", "portable"]) == 0
    assert "cases 6, results 6, failures 0" in capsys.readouterr().out


def test_a_case_follows_from_its_seed():
    first, again = campaign.draw_case(5, DEVICE), campaign.draw_case(5, DEVICE)
    assert first.text == again.text
    assert torch.equal(first.problem.q_absorbed, again.problem.q_absorbed)
    assert torch.equal(first.problem.block_table, again.problem.block_table)
    assert first.problem.kv_cache.nan_to_num(7.0).equal(again.problem.kv_cache.nan_to_num(7.0))


def test_cases_differ_and_have_every_kind():
    drawn = [campaign.draw_case(seed, DEVICE) for seed in range(40)]
    assert len({d.text for d in drawn}) == len(drawn)
    assert {d.problem.kv_cache.shape[1] for d in drawn} == {c.page_size for c in campaign.CONFIGURATIONS}
    assert {d.num_splits for d in drawn} == set(campaign._SPLITS)
    assert any((d.problem.seq_lens == 0).any() for d in drawn)
    assert any(not d.problem.kv_cache.is_contiguous() for d in drawn)


def _faults():
    def dropped_token(q, kv_cache, block_table, seq_lens, **options):
        return _decode(q, kv_cache, block_table, (seq_lens - 1).clamp(min=0), **options)

    def past_its_output(q, *tensors, out, **options):
        result = _decode(q, *tensors, out=out, **options)
        out.as_strided((1,), (1,), out.storage_offset() + out.stride(0) - 1).zero_()
        return result

    return {"failed: relative error of out": dropped_token, "failed: wrote past its output": past_its_output}


_decode = campaign.mla_decode


@pytest.mark.parametrize("message", _faults())
def test_a_fault_is_counted_and_named_by_its_seed(message, monkeypatch, capsys):
    monkeypatch.setattr(campaign, "mla_decode", _faults()[message])
    summary = campaign.run(3, 4, ["portable"], DEVICE)
    printed = capsys.readouterr().out
    assert summary["failures"] == printed.count(message) > 0
    assert float(summary["worst_over_bound"]) > 1
    repeat = f"--first-seed {summary['worst_seed']} --cases 1 --kernels portable"
    assert repeat in printed
    assert campaign.main(repeat.split()) == 1


def test_the_summary_is_kept_with_its_provenance(monkeypatch, tmp_path):
    monkeypatch.setattr(campaign.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(campaign.torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(records.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(provenance, "machine", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(provenance, "clocks", lambda: {})
    summary = dict.fromkeys(set(CAMPAIGN_COLUMNS) - {"run_id"}, 0)
    monkeypatch.setattr(campaign, "run", lambda *arguments: {**summary, "cases": arguments[1]})
    assert campaign.main(["--output", str(tmp_path), "--cases", "9"]) == 0
    stem = f"campaign_h200_{provenance.utc_now()[:10]}"
    with (tmp_path / f"{stem}.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert list(row) == CAMPAIGN_COLUMNS
    assert (row["cases"], row["run_id"]) == ("9", f"{stem}-1")
    sidecar = json.loads((tmp_path / f"{stem}.json").read_text())
    assert sidecar["runs"][0]["command"].startswith("triton-mla-bench campaign --output")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("options", [["--output", "data"], ["--kernels", "hopper"]], ids=" ".join)
def test_what_needs_a_gpu_is_refused_without_one(options, capsys):
    with pytest.raises(SystemExit):
        campaign.main(options)
    assert "expected a" in capsys.readouterr().err
