"""Shapes, lengths, costs and the groups of cases."""

import dataclasses

import pytest

from mla.measure.cases import CPU_CASES, GROUPS, SIXTEEN_SHAPES, Case, draw_problems, even_beside, num_problems

LOG_UNIFORM, ONE_LONG = (c for c in GROUPS["ragged"] if c.lengths != "even")


def test_sixteen_shapes():
    assert len(SIXTEEN_SHAPES) == len({(c.batch_size, c.context_len) for c in SIXTEEN_SHAPES}) == 16
    assert {c.num_heads for c in SIXTEEN_SHAPES} == {128}
    corners = {(8, 1024), (128, 32768)}
    assert corners <= {(c.batch_size, c.context_len) for c in SIXTEEN_SHAPES}


def test_log_uniform_lengths():
    lengths = LOG_UNIFORM.seq_lens
    assert (min(lengths), max(lengths), len(lengths)) == (256, 32768, 128)
    # an equal number of requests in each of seven octaves
    octaves = [sum(256 * 2**i <= n < 256 * 2 ** (i + 1) for n in lengths) for i in range(7)]
    assert all(17 <= count <= 19 for count in octaves)
    assert lengths not in (sorted(lengths), sorted(lengths)[::-1])
    assert lengths == dataclasses.replace(LOG_UNIFORM).seq_lens
    assert Case(1, 4096, lengths="log-uniform").seq_lens == [4096]


def test_one_long_and_even_lengths():
    assert sorted(ONE_LONG.seq_lens) == [1024] * 127 + [131072]
    assert Case(3, 70).seq_lens == [70] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_len": 1024, "lengths": "odd"}, "lengths: expected one of even, log-uniform, one-long, got 'odd'"),
        ({"context_len": 255, "lengths": "log-uniform"}, "context_len: expected at least 256"),
        ({"context_len": 1000, "lengths": "one-long"}, "context_len: expected at least 1024"),
    ],
)
def test_wrong_lengths_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Case(8, **options)


@pytest.mark.parametrize("ragged", [LOG_UNIFORM, ONE_LONG], ids=lambda c: c.lengths)
def test_an_even_batch_of_the_same_total_stands_beside_each_ragged_one(ragged):
    even = even_beside(ragged)
    assert even in GROUPS["ragged"]
    assert (even.lengths, even.batch_size, even.num_heads) == ("even", ragged.batch_size, ragged.num_heads)
    assert even.context_len % even.page_size == 0
    assert abs(even.total_tokens - ragged.total_tokens) <= even.batch_size * even.page_size / 2


def test_cost_of_a_case():
    case = Case(2, 1000, num_heads=16)
    assert case.flops == 2 * 1000 * 16 * 2 * (576 + 512)
    assert case.bytes_moved == 2 * (2 * 1000 * 576 + 2 * 16 * (576 + 512))


def test_cost_of_a_ragged_case_counts_its_tokens():
    tokens = 131072 + 127 * 1024
    assert ONE_LONG.total_tokens == tokens
    assert ONE_LONG.flops == 2 * tokens * 128 * (576 + 512)
    assert ONE_LONG.bytes_moved == 2 * (tokens * 576 + 128 * 128 * (576 + 512))
    assert ONE_LONG.input_bytes == 2 * 576 * (tokens + 128 * 131072)
    assert num_problems(ONE_LONG) == 1
    assert num_problems(Case(2, 1024, lengths="one-long")) == -(-240_000_000 // (2 * 1024 * 576 * 2))


def test_names_and_columns_tell_ragged_cases_apart():
    assert ONE_LONG.name == "b128-n131072-h128-one-long"
    assert Case(128, 131072).name == "b128-n131072-h128"
    assert ONE_LONG.to_columns()["lengths"] == "one-long"
    everything = [case for cases in GROUPS.values() for case in cases]
    assert len({case.name for case in everything}) == len(set(everything))


def test_groups_hold_what_is_asked_for():
    heads = {(c.batch_size, c.context_len, c.num_heads) for c in GROUPS["heads"]}
    assert heads == {(b, 8192, h) for b in (32, 128) for h in (8, 12, 16, 24, 32, 64, 128)}
    assert {(c.batch_size, c.context_len) for c in GROUPS["long"]} == {
        (b, n) for b in (1, 2, 4) for n in (32768, 131072)
    }
    # timed in the same rounds as the rest
    assert set(GROUPS["staircase"]) <= set(GROUPS["sixteen"])


def test_data_sets_are_larger_than_l2():
    small = dataclasses.replace(CPU_CASES[0], batch_size=64, context_len=2000)
    assert num_problems(small) == -(-240_000_000 // (64 * 2000 * 48 * 2))
    assert num_problems(Case(128, 32768)) == 1
    assert len(draw_problems(small, "cpu", seed=0, at_most=2)) == 2


def test_problems_have_the_cases_lengths():
    case = CPU_CASES[-1]
    first, second = draw_problems(case, "cpu", seed=0, at_most=2)
    assert first.seq_lens.tolist() == second.seq_lens.tolist() == case.seq_lens
    assert first.has_unused_rows
    assert first.kv.shape[:2] == (case.batch_size, case.context_len)
