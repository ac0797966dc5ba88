"""The drawings of notebook 02: the widths and head counts that they state."""

from mla.config import PRESETS
from mla.report.diagrams_absorbed import absorption, intensity


def _texts(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_absorption_writes_the_widths_of_the_config():
    assert {"512 + 64", "128 + 64", "512 × 128"} <= set(_texts(absorption(PRESETS["deepseek-v3"])))
    assert "32 + 16" in _texts(absorption(PRESETS["tiny"]))


def test_intensity_marks_the_head_counts_at_both_ridges(folder, published):
    texts = _texts(intensity(folder.load(), published, PRESETS["deepseek-v3"]))
    # 800 TFLOPS over 4.5 TB/s in the synthetic data, 989 over 3.35 on the data sheet; 1088 / 576 FLOP/byte a head
    assert "ridge of the H200, measured: 178 FLOP/byte" in texts
    assert "ridge of the H100, data sheet: 295 FLOP/byte" in texts
    assert {"95", "157"} <= set(texts)
