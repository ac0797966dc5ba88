"""A plain-Python model of the Hopper kernel's barriers, because Gluon has no interpreter and a race hides on a GPU.

The three roles below mirror `_produce`, `_consume_even` and `_consume_odd` of `mla.kernels.hopper` line by line (a test
compares the two sources). Each is a generator of operations; `run` executes them in a random order and with the
freedom that the hardware has:

    TMA load     writes its chunks one by one, any time from its issue until its full barrier completes
    wgmma        reads shared memory any time from its issue until the wait for it, in order
    TMA store    reads shared memory any time from its issue until store_wait
    store        is seen by others only after the storing role's next fence or arrival

Besides the result, every access is checked: what it conflicts with must have ended, and the role must know so through
barriers. `known` holds what a role knows as a set of bits, one an access; it travels with arrivals and waits. So a
missing order is found even where this schedule happened to be harmless.

Sizes are shrunk to N = 4 for the kernel's 64; chunk numbers and widths are written as in the kernel. Not modelled: the
four warps of a role (the compiler puts a barrier among them before each arrival), pages, slots and heads past the end.
"""

import random
from collections import defaultdict
from functools import partial
from typing import NamedTuple

import numpy as np

N = 4
LOWEST = -1e30
CHUNK = 64


class HazardError(Exception):
    """What a schedule showed: a race, an overrun, a deadlock or a wrong result."""


class Item(NamedTuple):
    """A run of tiles: q (9, N, N) in chunks, keys (tokens, 9 N)."""

    q: np.ndarray
    keys: np.ndarray

    @property
    def num_pairs(self) -> int:
        return max(-(-len(self.keys) // (2 * N)), 1)

    def tile(self, number: int) -> np.ndarray:
        """(9, N, N) as TMA brings it: its tokens in the last rows, zeros before them (or throughout)."""
        rows = np.zeros((N, 9 * N))
        held = self.keys[number * N : (number + 1) * N]
        rows[N - len(held) :] = held
        return rows.reshape(N, 9, N).swapaxes(0, 1)


class Op(NamedTuple):
    """One operation of a role: on a barrier, on `width` columns of a buffer from a chunk on, or on both."""

    kind: str
    barrier: str = ""
    buffer: str = ""
    chunk: int = 0
    width: int = CHUNK
    value: object = None

    @property
    def regions(self) -> list[tuple[str, int]]:
        return [(self.buffer, self.chunk + i) for i in range(self.width // CHUNK)]


def wait(barrier, parity):
    return Op("wait", barrier, value=parity)


def arrive(barrier, pred=True):
    return Op("arrive" if pred else "nothing", barrier)


def expect(barrier, width):
    return Op("expect", barrier, width=width)


def load(barrier, data, buffer, chunk, width):
    return Op("load", barrier, buffer, chunk, width, data)


def load_columns(barrier, tile, chunk, column, width):
    """A tile's columns and their expectation, in one as in the kernel."""
    return Op("load_columns", barrier, "kv", chunk, width, tile[column // CHUNK :])


def scores(s, q, kv, width, use_acc=True):
    """s += q kᵀ by wgmma; q is a chunk number, or the chunk itself if it is in registers."""
    return Op("mma", "", "kv", kv, width, (s, q if isinstance(q, np.ndarray) else ("q", q), use_acc, True))


def output(acc, p, kv, width):
    """acc += P V by wgmma; P is in registers, or in shared memory and named by its region."""
    return Op("mma", "", "kv", kv, width, (acc, p, True, False))


def mma_wait(left):
    return Op("mma_wait", value=left)


def store(buffer, chunk, value, width=CHUNK):
    return Op("store", "", buffer, chunk, width, value)


def read(buffer, chunk):
    return Op("read", "", buffer, chunk)


def fence():
    return Op("fence")


def tma_store(buffer, chunk, width, place):
    return Op("tma_store", "", buffer, chunk, width, place)


def store_wait():
    return Op("store_wait")


def produce(items, results, threshold):
    """The producer warp: every load, in the kernel's order."""
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
            yield load_columns("EVEN_ROPE_FULL", even, 8, 512, 64)
            yield load_columns("EVEN_FULL_1", even, 2, 128, 128)
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
            yield load_columns("ODD_ROPE_FULL", odd, 17, 512, 64)
            yield load_columns("ODD_FULL_3", odd, 15, 384, 128)
            pair += 1


def mask(s, tokens):
    return np.where(np.arange(N) >= N - min(tokens, N), s, -3e38)


def move_maximum(s, row_max, threshold, half):
    """The new maximum and whether any row's moved; both also go to the other consumer."""
    grows = s.max(axis=1) > row_max + threshold
    new_max = np.where(grows, s.max(axis=1), row_max)
    yield store("shared_max", half, new_max)
    yield store("flags", half, grows.any())
    return new_max, grows.any()


def rescale(acc, row_sum, old_max, new_max):
    correction = np.exp2(old_max - new_max)
    row_sum *= correction
    acc *= correction[:, None]


def finish(acc, row_sum, row_max, results, w, chunk, half):
    """One consumer's columns of an item, staged in its half of the odd tile; no tokens give 0 and -inf."""
    safe_sum = np.where(row_sum > 0, row_sum, 1)
    yield store("kv", chunk, acc / safe_sum[:, None], 256)
    yield fence()
    yield tma_store("kv", chunk, 256, (w, half))
    results[w, "lse", half] = np.where(row_sum > 0, row_max + np.log2(safe_sum), -np.inf)
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
        q_rope = yield read("q", 8)
        yield wait("EVEN_FULL_0", pair & 1)
        yield scores(s, q=0, kv=0, width=128, use_acc=False)
        yield wait("EVEN_ROPE_FULL", pair & 1)
        yield scores(s, q=q_rope, kv=8, width=64)
        yield wait("EVEN_FULL_1", pair & 1)
        yield scores(s, q=2, kv=2, width=128)
        yield wait("Q_SECOND_FULL", item_parity)
        yield wait("EVEN_FULL_2", pair & 1)
        yield scores(s, q=4, kv=4, width=128)
        yield wait("EVEN_FULL_3", pair & 1)
        yield scores(s, q=6, kv=6, width=128)
        yield mma_wait(0)
        for j in range(pair, end):
            parity = j & 1
            masked = mask(s, tokens)
            m0, moved = yield from move_maximum(masked, m1, threshold, half=0)
            p = np.exp2(masked - m0[:, None])
            yield store("p_even", 0, p)
            yield fence()
            yield arrive("P_EVEN_READY")
            if moved:
                rescale(acc, row_sum, m1, m0)
            row_sum += p.sum(axis=1)
            yield output(acc, p, kv=0, width=256)
            yield mma_wait(0)
            yield arrive("EVEN_LEFT_FREE")

            yield wait("P_ODD_READY", parity)
            odd_moved = yield read("flags", 1)
            m1 = yield read("shared_max", 1)
            if odd_moved:
                rescale(acc, row_sum, m0, m1)
            if j + 1 < end:
                yield output(acc, ("q", 8), kv=9, width=256)
                yield wait("EVEN_FULL_0", parity ^ 1)
                yield scores(s, q=0, kv=0, width=128, use_acc=False)
                yield wait("EVEN_ROPE_FULL", parity ^ 1)
                yield scores(s, q=q_rope, kv=8, width=64)
                yield wait("EVEN_FULL_1", parity ^ 1)
                yield scores(s, q=2, kv=2, width=128)
                yield mma_wait(3)
                yield arrive("ODD_LEFT_FREE")
                yield wait("EVEN_FULL_2", parity ^ 1)
                yield scores(s, q=4, kv=4, width=128)
                yield wait("EVEN_FULL_3", parity ^ 1)
                yield scores(s, q=6, kv=6, width=128)
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
        yield from finish(acc, row_sum, m1, results, w, 9, 0)
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
            yield wait("ODD_ROPE_FULL", parity)
            yield scores(s, q=q_rope, kv=17, width=64)
            yield wait("ODD_FULL_3", parity)
            yield scores(s, q=6, kv=15, width=128)
            yield mma_wait(0)

            yield wait("P_EVEN_READY", parity)
            even_moved = yield read("flags", 0)
            m0 = yield read("shared_max", 0)
            masked = mask(s, tokens - N)
            if even_moved:
                rescale(acc, row_sum, m1, m0)
            yield output(acc, ("p_even", 0), kv=4, width=256)
            m1, moved = yield from move_maximum(masked, m0, threshold, half=1)
            p = np.exp2(masked - m1[:, None])
            yield store("q", 8, p)
            yield fence()
            yield arrive("P_ODD_READY")
            yield mma_wait(0)
            yield arrive("EVEN_RIGHT_FREE")
            if moved:
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
        yield from finish(acc, row_sum, m1, results, w, 13, 1)
        yield arrive("ODD_RIGHT_FREE")


class Barrier:
    """An mbarrier for one arrival: a phase ends when that came and all columns expected with it have landed."""

    def __init__(self):
        self.phase, self.has_arrived, self.columns, self.known, self.waits = 0, False, 0, 0, {}

    def arrive(self, name, known, columns=0):
        if self.has_arrived:
            raise HazardError(f"overrun: {name} is arrived at twice in a phase")
        self.has_arrived, self.columns = True, columns
        self.note(name, known)

    def note(self, name, known, landed=0):
        """Columns that landed, and what is known with them."""
        self.known |= known
        self.columns -= landed
        if self.columns < 0:
            raise HazardError(f"overrun: {name} gets more columns than it expects")
        if self.has_arrived and self.columns == 0:
            if min(self.waits.values(), default=self.phase) < self.phase:
                raise HazardError(f"overrun: {name} ends a phase before its last one was waited for")
            self.phase, self.has_arrived = self.phase + 1, False


class Role:
    """A role's program, the accesses it knows to have ended (bits), and what it has under way."""

    def __init__(self, name, steps):
        self.name, self.steps, self.is_done = name, steps, False
        self.known, self.unfenced, self.reply = 0, 0, None
        # the next operations: more than one only where a fault put some, and the last one from the program
        self.ahead, self.previous = [], None
        # [access, effect or None once it took place], in order; an access ends for the role when it is settled
        self.queues = {"mma": [], "tma_store": [], "store": []}

    def settle(self, kind, left=0):
        while len(self.queues[kind]) > left:
            self.take_effect(kind)
            self.known |= self.queues[kind].pop(0)[0]

    def take_effect(self, kind):
        """The oldest of these operations whose effect is to come."""
        entry = next((e for e in self.queues[kind] if e[1]), None)
        if entry:
            entry[1]()
            entry[1] = None


class Machine:
    """Memory, barriers and roles of a CTA; a method `do_<kind>` for each kind of operation."""

    def __init__(self, roles, rng, is_watching, results):
        self.roles, self.rng, self.is_watching, self.results = roles, rng, is_watching, results
        self.memory, self.landing = defaultdict(lambda: np.full((N, N), np.nan)), []
        self.barriers = defaultdict(Barrier)
        self.writers, self.readers, self.names = defaultdict(int), defaultdict(int), []

    def begin(self, role, op, is_write=False, is_async=True) -> int:
        """Note an access (a new bit); what it conflicts with must have ended as far as the role knows."""
        access = 1 << len(self.names)
        self.names.append(f"{role.name}'s {op.kind} {op.buffer}[{op.chunk}]")
        for region in op.regions:
            if not is_write and not self.writers[region]:
                raise HazardError(f"race: {self.names[-1]} before anything was written there")
            conflicts = (self.writers[region] | (self.readers[region] if is_write else 0)) & ~role.known
            if is_async and not is_write:
                conflicts |= self.writers[region] & sum(r.unfenced for r in self.roles)
            if self.is_watching and conflicts:
                raise HazardError(f"race: {self.names[-1]} with {self.names[conflicts.bit_length() - 1]}")
            if is_write:
                self.writers[region], self.readers[region] = access, 0
            else:
                self.readers[region] |= access
        return access

    def columns(self, buffer, chunk, width=CHUNK) -> np.ndarray:
        return np.concatenate([self.memory[buffer, chunk + i] for i in range(width // CHUNK)], axis=-1)

    def write(self, op):
        parts = np.split(op.value, op.width // CHUNK, axis=-1) if op.width > CHUNK else [op.value]
        self.memory.update(zip(op.regions, parts, strict=True))

    def multiply(self, kv, width, acc, a, use_acc, is_transposed):
        b = self.columns("kv", kv, width)
        if not isinstance(a, np.ndarray):
            a = self.columns(*a, width if is_transposed else CHUNK)
        acc[:] = (acc if use_acc else 0) + a @ (b.T if is_transposed else b)

    def do_nothing(self, role, op):
        pass

    def do_wait(self, role, op):
        barrier = self.barriers[op.barrier]
        role.known |= barrier.known
        barrier.waits[role] = barrier.waits.get(role, 0) + 1

    def do_arrive(self, role, op):
        role.settle("store")
        self.barriers[op.barrier].arrive(op.barrier, role.known)

    def do_expect(self, role, op):
        self.barriers[op.barrier].arrive(op.barrier, role.known, op.width)

    def do_load(self, role, op):
        for i in range(op.width // CHUNK):
            one = op._replace(chunk=op.chunk + i, width=CHUNK, value=op.value[i])
            self.landing.append((one, self.begin(role, one, is_write=True)))

    def do_load_columns(self, role, op):
        self.do_expect(role, op)
        self.do_load(role, op)

    def do_mma(self, role, op):
        access, a, is_transposed = self.begin(role, op), op.value[1], op.value[3]
        if not isinstance(a, np.ndarray):
            access |= self.begin(role, Op("mma", "", *a, op.width if is_transposed else CHUNK))
        role.queues["mma"].append([access, partial(self.multiply, op.chunk, op.width, *op.value)])

    def do_mma_wait(self, role, op):
        role.settle("mma", left=op.value)

    def do_store(self, role, op):
        access = self.begin(role, op, is_write=True, is_async=False)
        role.known |= access
        role.unfenced |= access
        role.queues["store"].append([access, partial(self.write, op)])

    def do_read(self, role, op):
        role.settle("store")
        role.known |= self.begin(role, op, is_async=False)
        role.reply = self.memory[op.buffer, op.chunk]

    def do_fence(self, role, op):
        role.settle("store")
        role.unfenced = 0

    def do_tma_store(self, role, op):
        def send():
            self.results[op.value] = self.columns(op.buffer, op.chunk, op.width)

        role.queues["tma_store"].append([self.begin(role, op), send])

    def do_store_wait(self, role, op):
        role.settle("tma_store")

    def land(self):
        """One chunk of any TMA load under way."""
        op, access = self.landing.pop(self.rng.randrange(len(self.landing)))
        self.memory[op.buffer, op.chunk] = op.value
        self.barriers[op.barrier].note(op.barrier, access, landed=CHUNK)

    def step(self, role, fault):
        """Execute what the role stands before and fetch its next operation, which a fault may change."""
        if role.ahead:
            op = role.ahead.pop(0)
            getattr(self, "do_" + op.kind)(role, op)
        while not role.ahead and not role.is_done:
            try:
                op = role.steps.send(role.reply)
            except StopIteration:
                role.is_done = True
            else:
                role.reply = None
                role.ahead = list(fault(role.name, op, role.previous)) if fault else [op]
                role.previous = op

    def is_ready(self, role) -> bool:
        if role.ahead and role.ahead[0].kind == "wait":
            return self.barriers[role.ahead[0].barrier].phase & 1 != role.ahead[0].value
        return not role.is_done

    def play(self, fault):
        """Until nothing can go on, in an order that favours now one, now another."""
        weights = {key: self.rng.choice([1, 1, 5, 30]) for key in [*self.roles, "land", "effect"]}
        while True:
            under_way = [(r, kind) for r in self.roles for kind, q in r.queues.items() if any(e[1] for e in q)]
            choices = [r for r in self.roles if self.is_ready(r)] + ["land"] * bool(self.landing)
            if not choices:
                break
            choices += ["effect"] * bool(under_way)
            (choice,) = self.rng.choices(choices, [weights[c] for c in choices])
            if choice == "land":
                self.land()
            elif choice == "effect":
                role, kind = self.rng.choice(under_way)
                role.take_effect(kind)
            else:
                self.step(choice, fault)
        waiting = [f"{r.name} for {r.ahead[0].barrier}" for r in self.roles if not r.is_done]
        if waiting:
            raise HazardError("deadlock: " + ", ".join(waiting))
        for role in self.roles:
            role.settle("tma_store")


def make_items(rng, lengths) -> list[Item]:
    """Items of these lengths whose scores rise and fall by enough to move the maximum now and then."""
    items = []
    for n in lengths:
        size = rng.choice([0.3, 3.0], size=(n, 1)) * (1 + np.arange(n)[:, None] / 8)
        items.append(Item(rng.normal(size=(9, N, N)), rng.normal(size=(n, 9 * N)) * size))
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
        is_right = np.allclose(results[w, half], expected[:, half * 4 * N :][:, : 4 * N], rtol=1e-8, atol=1e-8)
        if not is_right or not np.allclose(results[w, "lse", half], lse, rtol=1e-9):
            raise HazardError(f"wrong result: item {w}, half {half}")


def run(seed, lengths, threshold=8.0, fault=None, is_watching=True):
    """Play one random schedule of a CTA that walks items of these lengths; raise HazardError if one shows.

    Args:
        fault: a function (role, op, op before it) -> the operations to execute instead.
        is_watching: whether races are looked for; without, only their effect on the result is.
    """
    items, results = make_items(np.random.default_rng(seed), lengths), {}
    programs = {"produce": produce, "even": consume_even, "odd": consume_odd}
    roles = [Role(name, program(items, results, threshold)) for name, program in programs.items()]
    # what a fault made of the numbers is judged by `check`
    with np.errstate(all="ignore"):
        Machine(roles, random.Random(seed), is_watching, results).play(fault)
    for w, item in enumerate(items):
        check(item, w, results)
