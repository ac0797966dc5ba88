"""A plain-Python model of the Hopper kernel's barriers, because Gluon has no interpreter and a race hides on a GPU.

The three roles below mirror `_produce`, `_consume_even` and `_consume_odd` of `mla.kernels.hopper` line by line (a test
compares the two sources). Each is a generator of operations; `run` executes them in a random order and with the
freedom that the hardware has:

    TMA load     writes its chunks one by one, any time from its issue until its full barrier completes
    wgmma        reads shared memory any time from its issue until the wait for it, in order
    TMA store    reads shared memory any time from its issue until store_wait; is in memory after write_wait
    store        is seen by others only after the storing role's next fence or arrival

Besides the result, every access is checked: what it conflicts with must have ended, and the role must know so through
barriers. `known` holds what a role knows as a set of bits, one an access; it travels with arrivals and waits. So a
missing order is found even where this schedule happened to be harmless.

Sizes are shrunk to N = 4 for the kernel's 64; chunk numbers and widths are written as in the kernel. Not modelled: the
four warps of a role (the compiler puts a barrier among them before each arrival), pages, slots and heads past the end,
and what happens after the roles have joined, which is the merge of partial results (`test_hopper_merge.py`).
"""

import random
from typing import NamedTuple

import numpy as np

from mla.tests.kernels.barrier_machine import (
    LOWEST,
    HazardError,
    Machine,
    N,
    Role,
    arrive,
    expect,
    fence,
    load,
    load_columns,
    mma_wait,
    output,
    read,
    scores,
    store,
    store_wait,
    tma_store,
    wait,
    write_wait,
)


class Item(NamedTuple):
    """A run of tiles: q (9, N, N) in chunks, keys (tokens, 9 N), and whether it is one of several of a request."""

    q: np.ndarray
    keys: np.ndarray
    is_partial: bool

    @property
    def num_tiles(self) -> int:
        return -(-len(self.keys) // N)

    @property
    def num_pairs(self) -> int:
        return max(-(-len(self.keys) // (2 * N)), 1)

    def tile(self, number: int) -> np.ndarray:
        """(9, N, N) as TMA brings it: its tokens in the last rows, zeros before them (or throughout)."""
        rows = np.zeros((N, 9 * N))
        held = self.keys[number * N : (number + 1) * N]
        rows[N - len(held) :] = held
        return rows.reshape(N, 9, N).swapaxes(0, 1)


def produce(items, prefetch, head_block):
    """The producer warp: every load, in the kernel's order. Of the L2 prefetch only the wait before it is here."""
    pair = 0
    for w, item in enumerate(items):
        yield wait("Q_FREE", (w & 1) ^ 1)
        yield expect("Q_FIRST_FULL", 256 + 64)
        yield load("Q_FIRST_FULL", item.q[8:], "q", 8, 64)
        yield load("Q_FIRST_FULL", item.q, "q", 0, 256)
        for i in range(item.num_pairs):
            parity = (pair & 1) ^ 1
            even, odd = item.tile(2 * i), item.tile(2 * i + 1)
            yield wait("EVEN_LEFT_FREE", parity)
            yield load_columns("EVEN_FULL_0", even, 0, 0, 128)
            yield load_columns("EVEN_FULL_1", even, 2, 128, 128)
            yield load_columns("EVEN_ROPE_FULL", even, 8, 512, 64)
            if i == 0:
                yield expect("Q_SECOND_FULL", 256)
                yield load("Q_SECOND_FULL", item.q[4:], "q", 4, 256)
            yield wait("EVEN_RIGHT_FREE", parity)
            yield load_columns("EVEN_FULL_2", even, 4, 256, 128)
            yield load_columns("EVEN_FULL_3", even, 6, 384, 128)
            yield wait("ODD_LEFT_FREE", parity)
            yield load_columns("ODD_FULL_0", odd, 9, 0, 128)
            yield load_columns("ODD_FULL_1", odd, 11, 128, 128)
            yield wait("ODD_RIGHT_FREE", parity)
            yield load_columns("ODD_FULL_2", odd, 13, 256, 128)
            yield load_columns("ODD_FULL_3", odd, 15, 384, 128)
            yield load_columns("ODD_ROPE_FULL", odd, 17, 512, 64)
            if prefetch and i == 0 and 2 + head_block < item.num_tiles:
                yield wait("EVEN_FULL_3", pair & 1)
            pair += 1


def mask(s, tokens):
    return np.where(np.arange(N) >= N - min(tokens, N), s, -3e38)


def move_maximum(s, row_max, threshold):
    """The rows' new maximum, and which of them moved."""
    grows = s.max(axis=1) > row_max + threshold
    return np.where(grows, s.max(axis=1), row_max), grows


def rescale(acc, row_sum, old_max, new_max):
    correction = np.exp2(old_max - new_max)
    row_sum *= correction
    acc *= correction[:, None]


def finish(acc, row_sum, row_max, is_partial, results, w, chunk, half):
    """One consumer's columns of an item, staged in its half of the odd tile; no tokens give 0 and -inf."""
    safe_sum = np.where(row_sum > 0, row_sum, 1)
    results["lse", w, half] = np.where(row_sum > 0, row_max + np.log2(safe_sum), -np.inf)
    yield store("kv", chunk, acc / safe_sum[:, None], 256)
    yield fence()
    if is_partial:
        yield tma_store("kv", chunk, 256, ("part", w, half))
        yield write_wait()
    else:
        yield tma_store("kv", chunk, 256, ("out", w, half))
        yield store_wait()


def start_item():
    """s, acc, m1 and row_sum at the start of an item."""
    return np.zeros((N, N)), np.zeros((N, 4 * N)), np.full(N, LOWEST), np.zeros(N)


def consume_even(items, results, threshold):
    """Scores of the even tiles, output columns of chunks 0..3."""
    pair = 0
    for w, item in enumerate(items):
        tokens, end, item_parity = len(item.keys), pair + item.num_pairs, w & 1
        s, acc, m1, row_sum = start_item()
        yield wait("Q_FIRST_FULL", item_parity)
        yield wait("EVEN_FULL_0", pair & 1)
        yield scores(s, q=0, kv=0, width=128, use_acc=False)
        yield wait("EVEN_FULL_1", pair & 1)
        yield scores(s, q=2, kv=2, width=128)
        yield wait("Q_SECOND_FULL", item_parity)
        yield wait("EVEN_FULL_2", pair & 1)
        yield scores(s, q=4, kv=4, width=128)
        yield wait("EVEN_FULL_3", pair & 1)
        yield scores(s, q=6, kv=6, width=128)
        q_rope = yield read("q", 8)
        yield wait("EVEN_ROPE_FULL", pair & 1)
        yield scores(s, q=q_rope, kv=8, width=64)
        yield mma_wait(0)
        for j in range(pair, end):
            parity = j & 1
            masked = mask(s, tokens)
            m0, rows_moved = move_maximum(masked, m1, threshold)
            yield store("shared_max", 0, m0)
            yield store("moved", 0, rows_moved)
            p = np.exp2(masked - m0[:, None])
            yield store("p_even", 0, p)
            yield fence()
            yield arrive("P_EVEN_READY")
            if (yield read("moved", 0)).any():
                rescale(acc, row_sum, m1, m0)
            row_sum += p.sum(axis=1)
            yield output(acc, p, kv=0, width=256)
            yield mma_wait(0)
            yield arrive("EVEN_LEFT_FREE")

            yield wait("P_ODD_READY", parity)
            odd_moved = yield read("moved", 1)
            m1 = yield read("shared_max", 1)
            if odd_moved.any():
                rescale(acc, row_sum, m0, m1)
            if j + 1 < end:
                yield output(acc, ("q", 8), kv=9, width=256)
                yield wait("EVEN_FULL_0", parity ^ 1)
                yield scores(s, q=0, kv=0, width=128, use_acc=False)
                yield wait("EVEN_FULL_1", parity ^ 1)
                yield scores(s, q=2, kv=2, width=128)
                yield mma_wait(2)
                yield arrive("ODD_LEFT_FREE")
                yield wait("EVEN_FULL_2", parity ^ 1)
                yield scores(s, q=4, kv=4, width=128)
                yield wait("EVEN_FULL_3", parity ^ 1)
                yield scores(s, q=6, kv=6, width=128)
                yield wait("EVEN_ROPE_FULL", parity ^ 1)
                yield scores(s, q=q_rope, kv=8, width=64)
                yield mma_wait(0)
            else:
                yield output(acc, ("q", 8), kv=9, width=256)
                yield mma_wait(0)
            tokens -= 2 * N
        pair = end

        yield arrive("Q_FREE")
        yield store("sums", 0, row_sum.copy())
        yield arrive("SUM_EVEN_READY")
        yield wait("SUM_ODD_READY", item_parity)
        row_sum = row_sum + (yield read("sums", 1))
        yield from finish(acc, row_sum, m1, item.is_partial, results, w, 9, 0)
        yield arrive("ODD_LEFT_FREE")


def consume_odd(items, results, threshold):
    """Scores of the odd tiles, output columns of chunks 4..7."""
    pair = 0
    for w, item in enumerate(items):
        tokens, end, item_parity = len(item.keys), pair + item.num_pairs, w & 1
        s, acc, m1, row_sum = start_item()
        yield wait("Q_FIRST_FULL", item_parity)
        q_rope = yield read("q", 8)
        yield wait("Q_SECOND_FULL", item_parity)
        for j in range(pair, end):
            parity = j & 1
            yield wait("ODD_FULL_0", parity)
            yield scores(s, q=0, kv=9, width=128, use_acc=False)
            yield wait("ODD_FULL_1", parity)
            yield scores(s, q=2, kv=11, width=128)
            yield wait("ODD_FULL_2", parity)
            yield scores(s, q=4, kv=13, width=128)
            yield wait("ODD_FULL_3", parity)
            yield scores(s, q=6, kv=15, width=128)
            yield wait("ODD_ROPE_FULL", parity)
            yield scores(s, q=q_rope, kv=17, width=64)
            yield mma_wait(0)

            yield wait("P_EVEN_READY", parity)
            even_moved = yield read("moved", 0)
            m0 = yield read("shared_max", 0)
            masked = mask(s, tokens - N)
            if even_moved.any():
                rescale(acc, row_sum, m1, m0)
            yield output(acc, ("p_even", 0), kv=4, width=256)
            m1, rows_moved = move_maximum(masked, m0, threshold)
            yield store("shared_max", 1, m1)
            yield store("moved", 1, rows_moved)
            p = np.exp2(masked - m1[:, None])
            yield store("q", 8, p)
            yield fence()
            yield arrive("P_ODD_READY")
            yield mma_wait(0)
            yield arrive("EVEN_RIGHT_FREE")
            if (yield read("moved", 1)).any():
                rescale(acc, row_sum, m0, m1)
            row_sum += p.sum(axis=1)
            yield output(acc, p, kv=13, width=256)
            yield mma_wait(0)
            yield arrive("ODD_RIGHT_FREE", pred=j + 1 < end)
            tokens -= 2 * N
        pair = end

        yield store("sums", 1, row_sum.copy())
        yield arrive("SUM_ODD_READY")
        yield wait("SUM_EVEN_READY", item_parity)
        row_sum = row_sum + (yield read("sums", 0))
        yield from finish(acc, row_sum, m1, item.is_partial, results, w, 13, 1)
        yield arrive("ODD_RIGHT_FREE")


def make_items(rng, lengths) -> list[Item]:
    """Items of these lengths whose scores rise and fall by enough to move the maximum now and then.

    The first and the last may be partial.
    """
    items = []
    for i, n in enumerate(lengths):
        size = rng.choice([0.3, 3.0], size=(n, 1)) * (1 + np.arange(n)[:, None] / 8)
        is_partial = i in (0, len(lengths) - 1) and rng.random() < 0.5
        items.append(Item(rng.normal(size=(9, N, N)), rng.normal(size=(n, 9 * N)) * size, is_partial))
    return items


def check(item, w, results):
    """Output and lse of an item against plain softmax attention (base 2, as the kernel's scores are scaled)."""
    s = np.concatenate(list(item.q), axis=1) @ item.keys.T
    top = s.max(axis=1, initial=LOWEST)
    p = np.exp2(s - top[:, None])
    with np.errstate(divide="ignore"):
        lse = np.where(p.sum(axis=1) > 0, top + np.log2(p.sum(axis=1)), -np.inf)
    expected = p @ item.keys[:, : 8 * N] / np.maximum(p.sum(axis=1), 1e-300)[:, None]
    for half in range(2):
        out = results["part" if item.is_partial else "out", w, half]
        is_right = np.allclose(out, expected[:, half * 4 * N :][:, : 4 * N], rtol=1e-8, atol=1e-8)
        if not is_right or not np.allclose(results["lse", w, half], lse, rtol=1e-9):
            raise HazardError(f"wrong result: item {w}, half {half}")


def run(seed, lengths, threshold=8.0, fault=None, is_watching=True):
    """Play one random schedule of a CTA that walks items of these lengths; raise HazardError if one shows.

    Args:
        fault: a function (role, op, op before it) -> the operations to execute instead.
        is_watching: whether races are looked for; without, only their effect on the result is.
    """
    items, results, rng = make_items(np.random.default_rng(seed), lengths), {}, random.Random(seed)
    prefetch, head_block = rng.choice([(False, 0), (True, 0), (True, 1)])
    roles = [
        Role("produce", produce(items, prefetch, head_block)),
        Role("even", consume_even(items, results, threshold)),
        Role("odd", consume_odd(items, results, threshold)),
    ]
    # what a fault made of the numbers is judged by `check`
    with np.errstate(all="ignore"):
        Machine(roles, rng, is_watching, results).play(fault)
    if any(place[0] == "part" for role in roles for place in role.unwritten):
        raise HazardError("race: a role ends before its partial result is in memory")
    for w, item in enumerate(items):
        check(item, w, results)
