"""The pictures of notebook 05: every token is drawn where the table says."""

import matplotlib as mpl

from mla.report import diagrams_paged_cache as diagrams


def texts(figure) -> list[str]:
    """All texts of a figure."""
    return [text.get_text() for text in figure.findobj(mpl.text.Text)]


def colours(figure) -> list[str]:
    """The face colour of every rectangle that has one."""
    return [mpl.colors.to_hex(patch.get_facecolor()) for patch in figure.axes[0].patches if patch.get_fill()]


def test_owners_follow_the_table():
    owned = diagrams.owners([[2, 0], [2, 1]], [3, 4], page_size=2)
    assert owned == {
        (2, 0): [(0, 0), (1, 0)],
        (2, 1): [(0, 1), (1, 1)],
        (0, 0): [(0, 2)],
        (1, 0): [(1, 2)],
        (1, 1): [(1, 3)],
    }


def test_pool_draws_each_token_twice_and_names_the_example():
    figure = diagrams.pool([[3, 1], [0]], [6, 2], page_size=4, num_pages=5, example=(0, 5))
    words, faces = texts(figure), colours(figure)
    assert "Outlined: token 5 of request 0. Entry 5 // 4 = 1 of its row is page 1; slot 5 % 4 = 1." in words
    assert sum(word.startswith("page ") for word in words) == 5
    # as a token, as a slot, and its table entries
    assert faces.count(diagrams.REQUEST_COLOURS[0]) == 6 + 6 + 2
    assert faces.count(diagrams.REQUEST_COLOURS[1]) == 2 + 2 + 1
    assert faces.count(diagrams.UNUSED) == 5 * 4 - 8 + 1


def test_shared_prefix_counts_the_requests_of_a_page():
    steps = {"before": ([[0, 1], [0, 1]], [6, 6]), "after": ([[0, 1], [0, 2]], [6, 7])}
    figure = diagrams.shared_prefix(steps, page_size=4, num_pages=4)
    words, faces = texts(figure), colours(figure)
    assert [words.count(f"used by {n}") for n in (1, 2)] == [2, 3]
    assert words.count("free") == 3
    # slots and table entries, before and after
    assert faces.count(diagrams.SHARED_COLOUR) == 6 + 4 + 4 + 2
