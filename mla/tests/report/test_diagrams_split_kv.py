"""The pictures of notebook 04: what they say is what they were given."""

import matplotlib as mpl
import pandas as pd
import pytest

from mla.report import diagrams_split_kv as diagrams


def texts(figure) -> str:
    """All texts of a figure, a line each."""
    return "\n".join(text.get_text() for text in figure.findobj(mpl.text.Text))


def sweep() -> pd.DataFrame:
    """Batch 8 at 4, 8 (the kernel's own) and 16 parts, and rows that must be left out."""
    row = {
        "gpu": "NVIDIA H200", "date": "2026-01-01", "usable": True, "batch_size": 8, "context_len": 1024,
        "num_heads": 128, "dtype": "bf16", "page_size": 64, "block_h": 64, "block_n": 64, "num_warps": 8,
        "num_stages": 2, "loads": "descriptor",
    }  # fmt: skip
    measured = ((4.0, 40.0), (float("nan"), 20.0), (16.0, 30.0))
    rows = [row | {"num_splits": count, "latency_us_p50": latency} for count, latency in measured]
    others = ({"usable": False}, {"num_heads": 16}, {"page_size": 16}, {"block_n": 32}, {"loads": "pointer"})
    return pd.DataFrame(rows + [rows[0] | other for other in others])


def test_schedule_gives_the_next_part_to_the_first_free_sm():
    assert diagrams.schedule(2, 20, 1, 8) == [(0, 0, 0, 20), (1, 1, 0, 20)]
    parts = diagrams.schedule(2, 20, 5, 8)
    assert sum(length for *_, length in parts) == 40
    assert [(sm, start) for sm, _, start, _ in parts if start] == [(0, 4), (1, 4)]


def test_schedule_leaves_out_empty_parts():
    assert [length for *_, length in diagrams.schedule(1, 7, 5, 8)] == [2, 2, 2, 1]


def test_timeline_names_length_and_share():
    words = texts(diagrams.timeline(2, 20, (1, 4), 8))
    assert "1 program a request\n20 tiles long, SMs busy 25%" in words
    assert "4 parts a request\n5 tiles long, SMs busy 100%" in words
    assert words.count("merge") == 1


def test_split_sweep_counts_waves_and_compares_with_the_own_count():
    rows = diagrams.split_sweep(sweep(), 64, 64, 132)
    assert rows["num_splits"].tolist() == [4, 8, 16]
    assert rows["programs"].tolist() == [64, 128, 256]
    assert rows["waves"].tolist() == [1, 1, 2]
    assert rows["wave_tiles"].tolist() == [4, 2, 2]
    assert rows["times_default"].tolist() == pytest.approx([2, 1, 1.5])


def test_split_sweep_refuses_a_tile_shape_with_two_configurations():
    rows = sweep()
    rows.loc[0, "num_warps"] = 4
    with pytest.raises(ValueError, match="got several"):
        diagrams.split_sweep(rows, 64, 64, 132)


def test_latency_over_splits_marks_the_own_count():
    words = texts(diagrams.latency_over_splits(sweep(), 64, 64, 132))
    assert "8 (own)\n128\n1" in words
    assert "16\n256\n2" in words
