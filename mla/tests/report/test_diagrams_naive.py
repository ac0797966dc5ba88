"""The pictures of notebook 01 write the numbers that they are given."""

import matplotlib as mpl
import pytest

from mla.report.diagrams_naive import cache_over_context, naive_step


def texts(figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(mpl.text.Text))


def test_the_cache_figure_marks_where_a_model_fills_the_smallest_gpu():
    # 2**19 bytes a token fill 24 GiB at 48K tokens; 2**13 only past the axis.
    figure = cache_over_context({"large (MHA)": 2**19, "small (MQA)": 2**13}, {"a card": 24, "another": 80})
    assert "48K" in texts(figure) and "3072K" not in texts(figure)
    assert "524,288 B a token" in texts(figure) and "another, 80 GB" in texts(figure)


def test_the_cache_figure_wants_the_kind_of_attention():
    with pytest.raises(KeyError, match="SSM"):
        cache_over_context({"a model (SSM)": 1}, {"a card": 24})


def test_the_naive_step_names_the_shapes_and_the_bytes():
    before = dict(mpl.rcParams)
    written = texts(naive_step(128, 512, 128, 64, 128))
    assert "kv_cache: 576 wide" in written and "128 × 192" in written
    assert "1,152 bytes" in written and "65,536 bytes" in written
    assert dict(mpl.rcParams) == before
