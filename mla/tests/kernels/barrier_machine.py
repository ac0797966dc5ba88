"""A machine that plays the roles of `barrier_model`: mbarriers, loads that land late, products that read late.

See there for what it models and how it finds a missing order.
"""

from collections import defaultdict
from functools import partial
from typing import NamedTuple

import numpy as np

N = 4
LOWEST = -1e30
CHUNK = 64


class HazardError(Exception):
    """What a schedule showed: a race, an overrun, a deadlock or a wrong result."""


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


def write_wait():
    return Op("write_wait")


class Barrier:
    """An mbarrier for one arrival: a phase ends when that came and all columns expected with it have landed."""

    def __init__(self):
        self.phase, self.has_arrived, self.columns, self.known, self.waits = 0, False, 0, 0, {}
        self.arriver = None

    def arrive(self, name, role, columns=0):
        if self.has_arrived:
            raise HazardError(f"overrun: {name} is arrived at twice in a phase")
        self.has_arrived, self.columns, self.arriver = True, columns, role
        self.note(name, role.known)

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
        # where TMA stores go that are not known to have arrived in memory
        self.unwritten = []

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
        # A role is not overrun by its own arrivals, so it may leave phases out; a wait that passes before any phase
        # ended is for none.
        if role is not barrier.arriver:
            barrier.waits[role] = barrier.waits.get(role, 0) + (barrier.phase > 0)

    def do_arrive(self, role, op):
        role.settle("store")
        self.barriers[op.barrier].arrive(op.barrier, role)

    def do_expect(self, role, op):
        self.barriers[op.barrier].arrive(op.barrier, role, op.width)

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
        role.unwritten.append(op.value)

    def do_store_wait(self, role, op):
        role.settle("tma_store")

    def do_write_wait(self, role, op):
        role.settle("tma_store")
        role.unwritten = []

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
