"""Everything that is compared, under the id it has in data/: each makes calls from problems.

An implementation prepares whatever a decode step would find ready (compiled code, the work plan that the layers of a
step share) and returns one call a problem. A call gives (out, lse), lse None where it computes none.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from mla.decode import mla_decode, plan_decode
from mla.kernels import portable_config
from mla.measure import peers
from mla.problem import Problem
from mla.stages import absorbed, naive, online_softmax, split_kv

LN_2 = math.log(2.0)

Call = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]


class Refused(ValueError):
    """An implementation does not take such a case: no failure, but no result."""


@dataclass(frozen=True)
class Prepared:
    """What an implementation made of a list of problems.

    Args:
        calls: one a problem.
        plan: makes the work plan of one problem, where that is a step of its own; timed by itself.
        plan_decodes: whether `plan` runs a decode as well, whose time then has to be taken off.
        num_splits: parts a request, where the implementation has that notion.
    """

    calls: list[Call]
    plan: Callable[[], object] | None = None
    plan_decodes: bool = False
    num_splits: int | None = None


@dataclass(frozen=True)
class Implementation:
    """One contestant.

    Args:
        prepare: problems of one case -> Prepared.
        rounds_scores: its scores leave a matrix product in 16 bits, which the error bound then allows for.
        is_per_head: out is (batch_size, num_heads, v_head_dim), not the attended latent.
        is_exclusive: its gate must have the GPU to itself (autotuning, or memory near the limit).
        needs_gpu: cannot run on the interpreter.
        lse_factor: what turns its lse into the natural logarithm.
        version: of the peer's package; "" for our own; None where the package or the kind of GPU is not there.
    """

    prepare: Callable[[list[Problem]], Prepared]
    rounds_scores: bool = False
    is_per_head: bool = False
    is_exclusive: bool = False
    needs_gpu: bool = False
    lse_factor: float = 1.0
    version: Callable[[], str | None] = field(default=lambda: "")


def _each(decode: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[[list[Problem]], Prepared]:
    return lambda problems: Prepared([lambda p=p: decode(p) for p in problems])


def _split_kv(problems: list[Problem]) -> Prepared:
    prepared = _each(split_kv.decode)(problems)
    return replace(prepared, num_splits=split_kv.default_num_splits(problems[0]))


def _call(problem: Problem, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The public entry, its checks included."""
    return mla_decode(
        problem.q_absorbed,
        problem.kv_cache,
        problem.block_table,
        problem.seq_lens,
        softmax_scale=problem.softmax_scale,
        kv_lora_rank=problem.config.kv_lora_rank,
        **options,
    )


def _portable(problems: list[Problem]) -> Prepared:
    p = problems[0]
    config = portable_config.choose_config(p.q_absorbed, p.kv_cache)
    num_splits = portable_config.default_num_splits(p.q_absorbed, p.kv_cache, p.block_table, config)
    # a number of splits asks for this kernel
    return replace(_each(lambda p: _call(p, num_splits=num_splits))(problems), num_splits=num_splits)


def _hopper(problems: list[Problem]) -> Prepared:
    # all problems of a case have the same lengths, so one plan serves them, as it serves the layers of a step
    first = problems[0]
    plan = plan_decode(first.seq_lens, first.config.num_heads)
    prepared = _each(lambda p: _call(p, plan=plan))(problems)
    return replace(prepared, plan=lambda: plan_decode(first.seq_lens, first.config.num_heads))


def prepare_hopper(problems: list[Problem], *, mode: int | None = None, **options) -> Prepared:
    """The Hopper kernel by itself, with its work divided and its launch changed as asked for.

    Args:
        problems: of one case.
        mode: of `plan_hopper`.
        options: `prefetch` and `pdl` of `HopperLaunch`.
    """
    # imported where it is needed: Gluon has no interpreter
    hopper = importlib.import_module("mla.kernels.hopper_launch")
    first, rank = problems[0], problems[0].config.kv_lora_rank

    def empty_out(p: Problem) -> torch.Tensor:
        return p.q_absorbed.new_empty(*p.q_absorbed.shape[:2], rank)

    out = empty_out(first)
    if not hopper.hopper_fits(first.q_absorbed, first.kv_cache, first.block_table, out):
        raise Refused("expected a call for which hopper_fits holds")
    plan = hopper.plan_hopper(first.seq_lens, first.config.num_heads, mode=mode)
    launch = hopper.HopperLaunch(first.q_absorbed, first.kv_cache, first.block_table, out, **options)

    def decode(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = empty_out(p), p.q_absorbed.new_empty(p.q_absorbed.shape[:2], dtype=torch.float32)
        launch(p.q_absorbed, p.kv_cache, p.block_table, p.seq_lens, out, lse, p.softmax_scale, plan)
        return out, lse

    prepared = _each(decode)(problems)
    return replace(prepared, plan=lambda: hopper.plan_hopper(first.seq_lens, first.config.num_heads, mode=mode))


def _require_equal_lengths(problems: list[Problem]) -> None:
    if any(p.has_unused_rows for p in problems):
        raise Refused("expected requests of equal length, got ragged ones")


def _torch_compile(problems: list[Problem]) -> Prepared:
    """The stronger opponent: two matrix products on a contiguous cache, which needs no copy."""
    _require_equal_lengths(problems)
    config, scale = problems[0].config, problems[0].softmax_scale

    # CUDA graphs are left to the harness: torch.compile's own would copy inputs of several GB into place
    @torch.compile(mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False)
    def attend(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return absorbed.attend(q, kv, scale, config.kv_lora_rank)[0]

    return Prepared([lambda p=p: (attend(p.q_absorbed, p.kv), None) for p in problems])


def _torch_compile_paged(problems: list[Problem]) -> Prepared:
    """The like-for-like opponent: the paged cache that the kernels read, gathered, then the same."""
    _require_equal_lengths(problems)
    config, scale = problems[0].config, problems[0].softmax_scale
    context_len = problems[0].kv.shape[1]

    @torch.compile(mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False)
    def attend(q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
        # torch 2.11 multiplies an int32 page id by the page's size in 32 bits: wrong rows past 2^31 elements
        kv = kv_cache[block_table.long()].flatten(1, 2)[:, :context_len]
        return absorbed.attend(q, kv, scale, config.kv_lora_rank)[0]

    return Prepared([lambda p=p: (attend(p.q_absorbed, p.kv_cache, p.block_table), None) for p in problems])


def _flashmla(problems: list[Problem]) -> Prepared:
    # all problems of a case have the same lengths, so one plan serves them
    plan = peers.flashmla_plan_and_decode(problems[0])
    return Prepared(
        [lambda p=p: peers.flashmla_decode(p, plan) for p in problems],
        plan=lambda: peers.flashmla_plan_and_decode(problems[0]),
        plan_decodes=True,
    )


def _flashinfer(backend: str) -> Callable[[list[Problem]], Prepared]:
    def prepare(problems: list[Problem]) -> Prepared:
        wrappers = [peers.flashinfer_wrapper(p, backend) for p in problems]
        metadata = [peers.flashinfer_metadata(p) for p in problems]
        for planned in zip(problems, wrappers, metadata, strict=True):
            peers.flashinfer_plan(*planned)
        # timed on a wrapper of its own: planning again would move the buffers that a captured graph reads
        spare = peers.flashinfer_wrapper(problems[0], backend)
        return Prepared(
            [lambda p=p, w=w: peers.flashinfer_decode(p, w) for p, w in zip(problems, wrappers, strict=True)],
            plan=lambda: peers.flashinfer_plan(problems[0], spare, metadata[0]),
        )

    return prepare


def _gluon_rung(name: str) -> Callable[[list[Problem]], Prepared]:
    def prepare(problems: list[Problem]) -> Prepared:
        # imported where it is needed: Gluon has no interpreter
        rung = importlib.import_module(f"mla.stages.{name}")
        shared = importlib.import_module("mla.stages.gluon_simple")
        return replace(_each(rung.decode)(problems), num_splits=shared.default_num_splits(problems[0]))

    return prepare


def _hopper_version() -> str | None:
    """An empty string on a Hopper GPU, None elsewhere."""
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return "" if is_hopper else None


IMPLEMENTATIONS: dict[str, Implementation] = {
    "naive": Implementation(_each(naive.decode), rounds_scores=True, is_per_head=True, is_exclusive=True),
    "absorbed": Implementation(_each(absorbed.decode), rounds_scores=True),
    "torch_compile": Implementation(_torch_compile, rounds_scores=True, is_exclusive=True, needs_gpu=True),
    "torch_compile_paged": Implementation(_torch_compile_paged, rounds_scores=True, is_exclusive=True, needs_gpu=True),
    "online_softmax": Implementation(_each(online_softmax.decode)),
    "split_kv": Implementation(_split_kv),
    "portable": Implementation(_portable),
    "gluon_simple": Implementation(_gluon_rung("gluon_simple"), needs_gpu=True, version=_hopper_version),
    "gluon_warp_specialised": Implementation(
        _gluon_rung("gluon_warp_specialised"), needs_gpu=True, version=_hopper_version
    ),
    "hopper_without_prefetch": Implementation(
        partial(prepare_hopper, prefetch=False), needs_gpu=True, version=_hopper_version
    ),
    "hopper_without_pdl": Implementation(partial(prepare_hopper, pdl=False), needs_gpu=True, version=_hopper_version),
    "hopper": Implementation(_hopper, needs_gpu=True, version=_hopper_version),
    "flashmla": Implementation(_flashmla, needs_gpu=True, version=peers.flashmla_version),
    "flashinfer_fa3": Implementation(
        _flashinfer("fa3"), needs_gpu=True, lse_factor=LN_2, version=peers.flashinfer_version
    ),
    "flashinfer_fa2": Implementation(
        _flashinfer("fa2"), needs_gpu=True, lse_factor=LN_2, version=peers.flashinfer_version
    ),
}

# The steps to the finished kernel: its predecessors, then itself with one later idea switched off.
STAIRCASE = (
    "portable", "gluon_simple", "gluon_warp_specialised", "hopper_without_prefetch", "hopper_without_pdl", "hopper",
)  # fmt: skip
# Of interest beside the finished kernel only, so measured only where they are asked for.
ABLATIONS = ("hopper_without_prefetch", "hopper_without_pdl")


def available(names: list[str] | None, has_gpu: bool) -> dict[str, Implementation]:
    """The implementations that can run here.

    Args:
        names: those asked for; all if None.
        has_gpu: whether a CUDA GPU is there.

    Raises:
        ValueError: a name is unknown, or was asked for by name and cannot run here.
    """
    chosen = {}
    for name in names or IMPLEMENTATIONS:
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
        implementation = IMPLEMENTATIONS[name]
        lacks = "a CUDA GPU" if implementation.needs_gpu and not has_gpu else ""
        if not lacks and implementation.version() is None:
            lacks = "its package ('triton-mla[peers]') or its kind of GPU"
        if not lacks:
            chosen[name] = implementation
        elif names:
            raise ValueError(f"{name}: expected to be runnable here, but it lacks {lacks}")
    return chosen
