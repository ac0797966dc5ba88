"""The Hopper kernel's barriers hold in every schedule tried, planted faults are found, and the model is the kernel."""

import ast
import random
import re
from pathlib import Path

import numpy as np
import pytest

from mla.tests.kernels import barrier_model as model
from mla.tests.kernels.barrier_machine import N, Op

HERE = Path(__file__).parent
KERNEL = HERE.parents[1] / "kernels" / "hopper.py"
MODEL = HERE / "barrier_model.py"
ROLES = {"_produce": "produce", "_consume_even": "consume_even", "_consume_odd": "consume_odd", "_finish": "finish"}
# none, one token, a tile, one more, two tiles, three, four and a bit, seven
LENGTHS = [0, 1, N, N + 1, 2 * N, 3 * N, 4 * N + 1, 7 * N - 1]


def _random_lengths(rng):
    return [rng.choice(LENGTHS) for _ in range(rng.randint(1, 5))]


@pytest.mark.parametrize("threshold", [0.0, 2.0, 8.0], ids=lambda t: f"t{t:g}")
def test_random_schedules(threshold):
    for seed in range(300):
        model.run(seed, _random_lengths(random.Random(seed)), threshold)


@pytest.mark.parametrize("length", LENGTHS, ids=lambda n: f"n{n}")
def test_one_length_twice(length):
    """Each length as first and as second item, so that every parity is met from both sides."""
    for seed in range(20):
        model.run(seed, [length, length, 5, length])


def _is(op, kind, barrier=None, buffer=None, chunk=None):
    return (
        op is not None
        and op.kind == kind
        and (barrier is None or op.barrier == barrier)
        and (buffer is None or op.buffer == buffer)
        and (chunk is None or op.chunk == chunk)
    )


def _moved(owner, barrier, is_place):
    """A role's arrivals at a barrier are made already before operations for which is_place(op, previous) holds."""

    def fault(role, op, previous):
        if role != owner:
            return [op]
        if _is(op, "arrive", barrier):
            return [Op("nothing")]
        return [model.arrive(barrier), op] if is_place(op, previous) else [op]

    return fault


def _released_under_mma(owner, barrier, chunk):
    """Released once the product that reads the group from `chunk` on is issued, not when it is done."""
    return _moved(owner, barrier, lambda op, previous: _is(previous, "mma", chunk=chunk) and previous.width == 256)


def _flipped(barrier, role=None):
    """Every wait for a barrier (by one role, or all) has the wrong parity."""

    def fault(name, op, previous):
        is_hit = _is(op, "wait", barrier) and role in (None, name)
        return [op._replace(value=op.value ^ 1) if is_hit else op]

    return fault


def _dropped(kind, barrier="", role=None, is_place=lambda previous: True):
    """Operations of a kind are left out: on a barrier, by a role, behind operations for which is_place holds."""

    def fault(name, op, previous):
        is_hit = _is(op, kind, barrier) and role in (None, name) and is_place(previous)
        return [Op("nothing") if is_hit else op]

    return fault


def _inserted(owner, new, kind, barrier=None, buffer=None):
    """Operations put before each one of a kind."""
    return lambda role, op, previous: [*new, op] if role == owner and _is(op, kind, barrier, buffer) else [op]


def _garbage(buffer, chunk):
    return [Op("store", "", buffer, chunk, value=np.full((N, N), 7.0))]


def _unsent(half):
    """The other consumer, and the sender itself, are told that no row's maximum moved."""

    def fault(role, op, previous):
        is_hit = _is(op, "store", buffer="moved", chunk=half)
        return [op._replace(value=np.zeros_like(op.value)) if is_hit else op]

    return fault


def _waits_for_less(role, op, previous):
    """`even` frees the left half of the odd tile with all three of the products behind its reader under way."""
    is_hit = role == "even" and _is(op, "mma_wait") and op.value == 2
    return [model.mma_wait(3) if is_hit else op]


def _partial_waits_for_reads(role, op, previous):
    """A partial result is waited for as a whole one is: until shared memory was read."""
    return [model.store_wait() if _is(op, "write_wait") else op]


def _rope_from_memory(owner):
    """Q's rope chunk is read anew by each product, not kept in registers."""

    def fault(role, op, previous):
        if role == owner and op.kind == "mma" and op.chunk in (8, 17):
            s, _, use_acc, is_transposed = op.value
            return [op._replace(value=(s, ("q", 8), use_acc, is_transposed))]
        return [op]

    return fault


def _ends_epilogue(previous):
    return _is(previous, "store_wait") or _is(previous, "write_wait")


def _before_product_of_odd_left(op, previous):
    return _is(op, "mma_wait") and op.value == 2


_STAGED = [Op("store", "", "kv", 9, 256, np.full((N, 4 * N), 7.0)), model.fence()]
# a name, what it must be reported as, the fault
FAULTS = {
    "even-left-released-early": ("race", _released_under_mma("even", "EVEN_LEFT_FREE", 0)),
    "even-right-released-early": ("race", _released_under_mma("odd", "EVEN_RIGHT_FREE", 4)),
    "odd-left-released-early": ("race", _released_under_mma("even", "ODD_LEFT_FREE", 9)),
    "odd-left-released-before-the-wait": ("race", _moved("even", "ODD_LEFT_FREE", _before_product_of_odd_left)),
    "odd-left-released-a-product-early": ("race", _waits_for_less),
    "odd-right-released-early": ("race", _released_under_mma("odd", "ODD_RIGHT_FREE", 13)),
    "p-even-sent-before-stored": (
        "race",
        _moved("even", "P_EVEN_READY", lambda op, _: _is(op, "store", buffer="p_even")),
    ),
    "p-odd-sent-before-stored": ("race", _moved("odd", "P_ODD_READY", lambda op, _: _is(op, "store", buffer="q"))),
    "p-even-sent-without-fence": ("race", _dropped("fence", is_place=lambda op: _is(op, "store", buffer="p_even"))),
    "p-odd-sent-without-fence": ("race", _dropped("fence", is_place=lambda op: _is(op, "store", buffer="q"))),
    "p-odd-stored-before-even-read-rope": (
        "race",
        _inserted("odd", _garbage("q", 8), "wait", "ODD_FULL_0"),
    ),
    "rope-read-by-even-after-p-odd": ("wrong", _rope_from_memory("even")),
    "rope-read-by-odd-after-p-odd": ("wrong", _rope_from_memory("odd")),
    "even-stages-under-odds-scores": ("race", _inserted("even", _STAGED, "wait", "P_ODD_READY")),
    "odd-stages-in-evens-half": ("race", _inserted("odd", _STAGED, "wait", "SUM_EVEN_READY")),
    "output-sent-without-fence": ("race", _dropped("fence", is_place=lambda op: _is(op, "store", buffer="kv"))),
    "even-does-not-release-after-epilogue": ("deadlock", _dropped("arrive", "ODD_LEFT_FREE", "even", _ends_epilogue)),
    "odd-does-not-release-after-epilogue": ("deadlock", _dropped("arrive", "ODD_RIGHT_FREE", "odd", _ends_epilogue)),
    "even-releases-before-store-wait": ("race", _dropped("store_wait", role="even")),
    "odd-releases-before-store-wait": ("race", _dropped("store_wait", role="odd")),
    "even-releases-before-write-wait": ("race", _dropped("write_wait", role="even")),
    "odd-releases-before-write-wait": ("race", _dropped("write_wait", role="odd")),
    "partial-result-not-in-memory": ("race: a role ends", _partial_waits_for_reads),
    "odd-releases-twice": ("overrun|race", _inserted("odd", [model.arrive("ODD_RIGHT_FREE")], "store", buffer="sums")),
    "q-released-before-last-p-odd-read": (
        "race",
        _moved("even", "Q_FREE", lambda op, previous: _is(op, "mma_wait") and _is(previous, "mma", chunk=9)),
    ),
    "even-does-not-tell-that-maximum-moved": ("wrong", _unsent(0)),
    "odd-does-not-tell-that-maximum-moved": ("wrong", _unsent(1)),
    "odd-reads-moved-before-p-even": ("race", _inserted("odd", [model.read("moved", 0)], "wait", "P_EVEN_READY")),
    "even-reads-moved-before-p-odd": ("race", _inserted("even", [model.read("moved", 1)], "wait", "P_ODD_READY")),
    "even-overwrites-moved-early": ("race", _inserted("even", _garbage("moved", 0), "wait", "P_ODD_READY")),
    "odd-overwrites-moved-early": ("race", _inserted("odd", _garbage("moved", 1), "wait", "ODD_FULL_0")),
    "even-overwrites-maximum-early": ("race", _inserted("even", _garbage("shared_max", 0), "wait", "P_ODD_READY")),
    "odd-overwrites-maximum-early": ("race", _inserted("odd", _garbage("shared_max", 1), "wait", "ODD_FULL_0")),
    "producer-waits-for-other-phase": ("deadlock", _flipped("EVEN_FULL_3", "produce")),
}


def _find(fault, is_watching=True, num_schedules=60):
    """What the first schedule that shows a fault reports, or None."""
    for seed in range(num_schedules):
        rng = random.Random(seed)
        # several pairs and several items, or some faults have no occasion
        lengths = [rng.choice([5 * N, 7 * N - 1]), *_random_lengths(rng), 3 * N]
        try:
            model.run(seed, lengths, rng.choice([0.0, 2.0, 8.0]), fault, is_watching)
        except model.HazardError as error:
            return str(error)
    return None


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name):
    expected, fault = FAULTS[name]
    report = _find(fault)
    assert report is not None
    assert report.startswith(tuple(expected.split("|"))), report


_SAME = {
    "async_copy_global_to_shared": "load", "async_copy_shared_to_global": "tma_store", "scores": "mma", "output": "mma",
    "warpgroup_mma": "mma", "warpgroup_mma_wait": "mma_wait", "fence_async_shared": "fence", "any_moved": "read",
    "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;": "write_wait",
}  # fmt: skip


class _Protocol(ast.NodeVisitor):
    """What a role does to barriers and memory, in order: tuples (kind, ...), nested for loops and branches."""

    def __init__(self, function):
        self.found, self.parities = [], {}
        for statement in function.body:
            self.visit(statement)

    def _of(self, statements):
        outer, self.found = self.found, []
        for statement in statements:
            self.visit(statement)
        inner, self.found = self.found, outer
        return inner

    def visit_For(self, node):
        inner = self._of(node.body)
        self.found += [("for", *inner)] if inner else []

    def visit_If(self, node):
        self.visit(node.test)
        body, otherwise = self._of(node.body), self._of(node.orelse)
        if body == otherwise:
            self.found += body
            return
        found = ("if", tuple(body), tuple(otherwise))
        if isinstance(node.test, ast.BoolOp):
            # `if a and b:` is `if a: if b:`
            for _ in node.test.values[1:]:
                found = ("if", (found,), ())
        self.found.append(found)

    def visit_Assign(self, node):
        self.generic_visit(node)
        if isinstance(node.targets[0], ast.Name) and "parity" in node.targets[0].id:
            self.parities[node.targets[0].id] = ast.unparse(node.value)

    def visit_Call(self, node):
        self.generic_visit(node)
        names = [n.id for n in ast.walk(node.func) if isinstance(n, ast.Name)]
        name = node.func.attr if isinstance(node.func, ast.Attribute) else names[0].lstrip("_")
        if name == "inline_asm_elementwise":
            name = node.args[0].value
        kind = _SAME.get(name, name)
        place = _place_of(node) if kind in ("store", "load", "read") else None
        if place:
            self.found.append(("store" if kind == "store" else "read", *place))
        elif _barrier_of(node) and kind in ("wait", "arrive", "expect", "load", "load_columns"):
            self.found.append((kind, _barrier_of(node), *self._details(kind, node)))
        elif kind == "mma":
            self.found.append((kind, *_values_of(node)))
        elif kind == "mma_wait":
            self.found.append((kind, node.args[0].value))
        elif kind == "finish":
            self.found.append((kind, *(a.value for a in node.args if _is_int(a))))
        elif kind in ("fence", "tma_store", "store_wait", "write_wait"):
            self.found.append((kind,))

    def _details(self, kind, node):
        """Whether a wait is for the other parity, the condition of an arrival, which columns are loaded."""
        if kind == "wait":
            parity = re.sub(r"\bparity\b", lambda m: self.parities.get(m[0], m[0]), ast.unparse(node.args[1]))
            return (parity.count("^ 1") % 2 == 1,)
        if kind == "arrive":
            return tuple(ast.unparse(k.value) for k in node.keywords if k.arg == "pred")
        return tuple(a.value for a in node.args if _is_int(a))[:3] if kind == "load_columns" else ()


def _is_int(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _barrier_of(call):
    """`bars[NAME]` among the kernel's arguments, "NAME" among the model's."""
    for a in call.args:
        if isinstance(a, ast.Subscript) and getattr(a.value, "id", "") == "bars":
            return a.slice.id
        if isinstance(a, ast.Constant) and isinstance(a.value, str) and a.value.isupper():
            return a.value
    return None


def _place_of(call):
    """Shared memory that is stored to or read: `q.index(8).store(..)`, `_any_moved(moved.index(1))`, `read("q", 8)`.

    Returns its name and the chunk, 0 if that is none or not a number; None if it is not shared memory.
    """
    first = call.args[0]
    if isinstance(first, ast.Constant):
        name, chunk = first.value, call.args[1]
    else:
        chunk = call.func if isinstance(call.func, ast.Attribute) else first
        name = next(n.id for n in ast.walk(chunk) if isinstance(n, ast.Name))
    name = {"staged": "kv"}.get(name, name)
    return (name, _constant(chunk)) if name in ("q", "kv", "p_even", "shared_max", "sums", "moved") else None


def _values_of(call):
    """First chunk and width of the tile's columns that a product reads."""
    keywords = {k.arg: k.value for k in call.keywords}
    if "kv" in keywords:
        return keywords["kv"].value, keywords["width"].value
    for n in (n for a in call.args for n in ast.walk(a) if isinstance(n, ast.Call)):
        if getattr(n.func, "id", "") == "_columns" and n.args[0].id == "kv":
            return _constant(n.args[1]), n.args[2].value
        if getattr(n.func, "attr", "") == "index" and getattr(n.func.value, "id", "") == "kv":
            return _constant(n.args[0]), 64
    raise AssertionError(f"no tile in {ast.unparse(call)}")


def _constant(expression):
    return sum(n.value for n in ast.walk(expression) if _is_int(n))


def _protocols(path):
    functions = {n.name: n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}
    return {name: _Protocol(f).found for name, f in functions.items() if name in {*ROLES, *ROLES.values()}}


@pytest.mark.parametrize("name", ROLES)
def test_model_is_the_kernels_protocol(name):
    """Same loops and branches, and in them the same operations on barriers and shared memory in the same order."""
    kernel, ours = _protocols(KERNEL)[name], _protocols(MODEL)[ROLES[name]]
    assert kernel
    assert kernel == ours


def _flat(found):
    for entry in found:
        if isinstance(entry, tuple | list) and entry and entry[0] in ("for", "if"):
            yield from _flat(entry[1:])
        elif isinstance(entry, tuple) and entry and isinstance(entry[0], str):
            yield entry
        else:
            yield from _flat(entry)


def _sites(kind):
    """(role, barrier) of every wait or arrival in the kernel."""
    roles = {"_produce": "produce", "_consume_even": "even", "_consume_odd": "odd"}
    return sorted({(roles[n], e[1]) for n in roles for e in _flat(_protocols(KERNEL)[n]) if e[0] == kind})


# Only lets the loads of all SMs pass before the L2 prefetch. Its parity matters all the same: the other may never come.
_FOR_SPEED = ("produce", "EVEN_FULL_3")


@pytest.mark.parametrize(("role", "barrier"), _sites("wait"), ids=lambda x: x)
@pytest.mark.parametrize("change", ["wrong-parity", "left-out"])
def test_every_wait_is_needed(change, role, barrier):
    fault = _flipped(barrier, role) if change == "wrong-parity" else _dropped("wait", barrier, role)
    report = _find(fault)
    assert report if change == "wrong-parity" or (role, barrier) != _FOR_SPEED else report is None


@pytest.mark.parametrize(("role", "barrier"), _sites("arrive"), ids=lambda x: x)
def test_every_release_is_needed(role, barrier):
    assert _find(_dropped("arrive", barrier, role)).startswith("deadlock")
