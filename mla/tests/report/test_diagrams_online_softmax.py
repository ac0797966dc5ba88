"""The pictures of notebook 03: what they say is what they were given."""

import matplotlib as mpl

from mla.report import diagrams_online_softmax as diagrams


def texts(figure) -> str:
    """All texts of a figure, a line each."""
    return "\n".join(text.get_text() for text in figure.findobj(mpl.text.Text))


def test_one_pass_names_the_sizes_that_it_is_given():
    words = texts(diagrams.one_pass(block_h=16, block_n=8, rank=32, rope=4))
    for size in ("tile 0: 8 × 36", "16 × 8, then p", "p × (8 × 32)", "acc: 16 × 32, fp32", "out: 16 × 32"):
        assert size in words


def test_loads_give_every_program_an_sm():
    assert diagrams.loads(5, 4) == [2, 1, 1, 1]
    assert diagrams.loads(3, 4) == [1, 1, 1, 0]
    assert sum(diagrams.loads(256, 132)) == 256


def test_busy_sms_counts_programs_and_draws_a_square_an_sm(folder):
    folder.change("portable", (8, 1024), latency_us_p50=123.4)
    folder.change("portable", (32, 1024), status="out_of_memory")
    frame = folder.load()
    frame["implementation"] = frame["implementation"].replace("portable", "online_softmax")
    figure = diagrams.busy_sms(frame, context_len=1024, block_h=64, num_sms=132)
    words = texts(figure)
    assert "batch 8: 16 programs\n16 of 132 SMs busy" in words
    assert "batch 128: 256 programs\n132 of 132 SMs busy" in words
    assert "123 us" in words
    assert words.count("no result") == 1
    assert "three or more" not in words
    assert [len(axes.patches) for axes in figure.axes] == [132] * 4
    idle = [patch for patch in figure.axes[0].patches if mpl.colors.to_hex(patch.get_facecolor()) == diagrams.IDLE]
    assert len(idle) == 132 - 16
