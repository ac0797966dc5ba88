"""`mla_decode`, the public entry: checks, then the kernel that suits the device."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from mla.checks import check_call, check_contents, check_step
from mla.kernels import ON_INTERPRETER
from mla.kernels.launch import device_guard
from mla.kernels.portable import mla_decode_portable
from mla.kernels.work_plan import WHOLE

# Gluon changes from version to version.
_GLUON_VERSIONS = ("3.6.",)


@dataclass(frozen=True)
class DecodePlan:
    """What the calls of one decode step share: the division of the work, made by `plan_decode`.

    Args:
        hopper: of the Hopper kernel; None where another kernel runs, which needs no plan.
        batch_invariant: whether no request is divided.
    """

    hopper: Any
    batch_invariant: bool = False


def plan_decode(seq_lens: torch.Tensor, num_heads: int, *, batch_invariant: bool = False) -> DecodePlan:
    """Plan a decode step, once for all its layers: a call of `mla_decode` that is given no plan makes its own.

    The plan is made on the device from the lengths as they are when its kernel runs, without synchronisation: captured
    in a CUDA graph, it follows lengths that changed in place. It holds scratch and counters, so that calls that share
    a plan must not overlap: use a plan on one stream.

    Args:
        seq_lens: (batch_size,) int32, contiguous; cached tokens a request. The calls must be given the same lengths.
        num_heads: query heads of the calls.
        batch_invariant: divide no request, as `mla_decode` says.

    Returns:
        A DecodePlan for `mla_decode`; on an H200 it holds 17 MB for 128 heads.

    Raises:
        ValueError: seq_lens is not one-dimensional and contiguous, or num_heads is not positive.
        TypeError: seq_lens is not int32.
    """
    check_step(seq_lens, num_heads)
    launcher = _hopper_launcher()
    if launcher is None or not launcher.can_plan(seq_lens):
        return DecodePlan(None, batch_invariant)
    with device_guard(seq_lens.device):
        mode = WHOLE.value if batch_invariant else None
        return DecodePlan(launcher.plan_hopper(seq_lens, num_heads, mode=mode), batch_invariant)


def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
    batch_invariant: bool = False,
    validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multi-head latent attention for one query token a request, in absorbed form, on a paged latent cache.

    `out = softmax(softmax_scale * q kvᵀ) kv[:, :kv_lora_rank]` over the request's cached rows `kv`.

    On a Hopper GPU (sm_90) the Hopper kernel runs where it takes the call: 16 bits, kv_lora_rank 512 and
    qk_rope_head_dim 64, pages of 16, 32 or a multiple of 64 tokens, addresses and strides that are multiples of 16
    bytes (8 elements), a softmax_scale of 1e-6 or more, at most 4096 requests, a block_table for at most 2^23 tokens a
    request, no num_splits. Elsewhere the portable kernel.

    Nothing is synchronised with the host, so a call can be captured in a CUDA graph and replayed after q, kv_cache,
    block_table or seq_lens changed in place. What is kept between calls (checks passed, compiled kernels, tensor maps)
    depends on shapes, strides, dtypes, devices and addresses only. Calls on two streams do not meet, unless they share
    a plan. Inside torch.compile the call is the operator `mla::decode`, which makes its own plan.

    Lengths and page ids are read on the device and not checked, unless `validate` is given. Without it nothing outside
    the cache and the table is read, whatever they hold: a negative length counts as 0, one that is more than the table
    has room for as all of its pages, a page that the pool does not have as tokens of zeros. Such a request's result
    means nothing; the results of other requests are not touched.

    Scratch of the Hopper kernel is about 2 * num_sms * 64 * (512 * 2 + 4) bytes (17 MB on an H200), in the plan; of the
    portable kernel batch_size * num_splits * num_heads * (kv_lora_rank + 1) * 4 bytes, at about one wave of SMs at most
    132 * 64 * 513 * 4 bytes (17 MB) on an H200.

    Args:
        q: (batch_size, num_heads, kv_lora_rank + qk_rope_head_dim), bf16, fp16 or fp32; the query after absorption
            (`mla.reference.absorb_query`), latent part first. Last dimension contiguous, other strides free.
        kv_cache: (num_pages, page_size, kv_lora_rank + qk_rope_head_dim), q's dtype; latent part first. Any page_size
            from 1 up, fastest for multiples of 64. Last dimension contiguous, other strides free. Slots that hold no
            token may hold anything, NaN included.
        block_table: (batch_size, max_pages) int32; the page of each run of page_size tokens. Entries past a request's
            last page are not read. Last dimension contiguous.
        seq_lens: (batch_size,) int32, contiguous; cached tokens a request, 0 to max_pages * page_size.
        softmax_scale: factor on the scores: `MLAConfig.softmax_scale`, which is 192 ** -0.5 for DeepSeek (times
            mscale squared with YaRN), not the 576 ** -0.5 of the absorbed width.
        kv_lora_rank: width of the latent part, which is also the value; default 512. It and qk_rope_head_dim are
            powers of two from 16 up.
        num_splits: parts that each request is cut into by the portable kernel, which a number asks for; default:
            chosen for the GPU. The result does not depend on it beyond rounding.
        out: (batch_size, num_heads, kv_lora_rank), q's dtype, last dimension contiguous; where to write. Default: a
            new tensor.
        plan: of this step, from `plan_decode` on the same seq_lens. Default: the call makes its own.
        batch_invariant: divide no request, so that the bits of its result do not depend on the other requests, among
            calls that run on the same kernel (all else being alike, on a Hopper GPU those of at most 4096 requests).
            The cost: the longest request decides how long the call takes, on one SM a block of 64 heads, so that small
            batches leave most of the GPU idle. A plan must have been made with it, too. The portable kernel keeps
            num_splits where it is given, which is as good: then its calls must be given the same number.
        validate: check lengths and page ids before the launch. This waits for the GPU, takes some small launches and
            cannot be captured in a CUDA graph. Default: False.

    Returns:
        out (batch_size, num_heads, kv_lora_rank) in q's dtype, and lse (batch_size, num_heads) fp32, the natural
        logarithm of the sum of exponentials. A request of length 0 gives 0 and -inf.

    Raises:
        ValueError: a shape, stride or value is not supported; with `validate`, also a length that is negative or more
            than the table has room for, or a page id that is not in the pool (the message names the request).
        TypeError: a dtype is not supported, or plan is not a DecodePlan.
        RuntimeError: devices differ or are not supported, an input requires a gradient, or `validate` is asked for in a
            CUDA graph's capture or in torch.compile.

    Reference: DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
    """
    if torch.compiler.is_compiling():
        if validate:
            raise RuntimeError(
                "validate: expected a call outside torch.compile, since reading the lengths back synchronises, got one "
                "that is being compiled; validate before it"
            )
        new_out, lse = torch.ops.mla.decode(
            q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank, num_splits, batch_invariant
        )
        return (new_out if out is None else out.copy_(new_out)), lse
    return _decode(
        q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank, num_splits, out, plan, batch_invariant,
        validate,
    )  # fmt: skip


class _Route(NamedTuple):
    """What calls that are alike share.

    Args:
        launch: the Hopper kernel's; None where the portable one runs.
        new_out, new_lse: make the results, in less time than new_empty takes on the host.
    """

    launch: Any
    new_out: Callable[[], torch.Tensor]
    new_lse: Callable[[], torch.Tensor]


# A call's key says all that the checks look at.
_routes: dict[tuple, _Route] = {}
_MAX_ROUTES = 1024


def _decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    kv_lora_rank: int,
    num_splits: int | None,
    out: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
    batch_invariant: bool = False,
    validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    key = (
        q.shape, q.stride(), q.dtype, q.device, kv_cache.shape, kv_cache.stride(), kv_cache.dtype, kv_cache.device,
        block_table.shape, block_table.stride(), block_table.dtype, block_table.device,
        seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.device, kv_lora_rank, num_splits,
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        q.requires_grad or kv_cache.requires_grad or (out is not None and out.requires_grad),
        torch.is_grad_enabled(), type(plan),
    )  # fmt: skip
    route = _routes.get(key)
    if route is None:
        check_call(q, kv_cache, block_table, seq_lens, kv_lora_rank, num_splits, out)
        if plan is not None and not isinstance(plan, DecodePlan):
            raise TypeError(f"plan: expected a DecodePlan from mla.plan_decode, got {type(plan).__name__}")
    if validate:
        check_contents(kv_cache, block_table, seq_lens)
    if plan is not None and plan.batch_invariant != batch_invariant:
        _refuse_other_division(plan)
    if route is None:
        if len(_routes) >= _MAX_ROUTES:
            _routes.clear()
        route = _routes[key] = _find_route(q, kv_cache, block_table, kv_lora_rank, num_splits, out)
    launch, new_out, new_lse = route
    if out is None:
        out = new_out()
    lse = new_lse()
    with device_guard(q.device):
        if launch is not None and launch.takes(q, kv_cache, out, softmax_scale):
            hopper_plan = (plan or plan_decode(seq_lens, q.shape[1], batch_invariant=batch_invariant)).hopper
            launch(q, kv_cache, block_table, seq_lens, out, lse, softmax_scale, hopper_plan)
        elif len(q) > 0:
            if batch_invariant and num_splits is None:
                num_splits = 1
            mla_decode_portable(
                q, kv_cache, block_table, seq_lens, out, lse, softmax_scale=softmax_scale, num_splits=num_splits
            )
    return out, lse


def _refuse_other_division(plan: DecodePlan) -> None:
    raise ValueError(
        f"batch_invariant: expected the same in mla_decode and in plan_decode, got a plan with {plan.batch_invariant}; "
        f"make the plan anew or pass batch_invariant={plan.batch_invariant}"
    )


@lru_cache
def _hopper_launcher():
    """The module `mla.kernels.hopper_launch`, or None where it cannot be used."""
    if ON_INTERPRETER or not torch.cuda.is_available():
        return None
    # after mla.kernels, which decides on the interpreter before Triton is imported
    import triton

    if not triton.__version__.startswith(_GLUON_VERSIONS):
        if any(torch.cuda.get_device_capability(i) == (9, 0) for i in range(torch.cuda.device_count())):
            warnings.warn(
                f"mla_decode: the Hopper kernel was tested with Triton {', '.join(_GLUON_VERSIONS)}x, found "
                f"{triton.__version__}; the slower portable kernel runs instead",
                stacklevel=2,
            )
        return None
    from mla.kernels import hopper_launch

    return hopper_launch


def _find_route(q, kv_cache, block_table, kv_lora_rank, num_splits, out) -> _Route:
    batch_size, num_heads, _ = q.shape
    shape, strides = (batch_size, num_heads, kv_lora_rank), (num_heads * kv_lora_rank, kv_lora_rank, 1)
    new_out = partial(torch.empty_strided, shape, strides, dtype=q.dtype, device=q.device)
    new_lse = partial(torch.empty_strided, shape[:2], (num_heads, 1), dtype=torch.float32, device=q.device)
    launch, launcher = None, _hopper_launcher() if num_splits is None else None
    if launcher is not None:
        out = new_out() if out is None else out
        if launcher.hopper_fits(q, kv_cache, block_table, out):
            launch = launcher.HopperLaunch(q, kv_cache, block_table, out)
    return _Route(launch, new_out, new_lse)


@torch.library.custom_op("mla::decode", mutates_args=())
def _decode_op(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    kv_lora_rank: int,
    num_splits: int | None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _decode(
        q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank, num_splits, batch_invariant=batch_invariant
    )


@_decode_op.register_fake
def _(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank, num_splits, batch_invariant=False):
    check_call(q, kv_cache, block_table, seq_lens, kv_lora_rank, num_splits, None)
    return q.new_empty(*q.shape[:2], kv_lora_rank), q.new_empty(q.shape[:2], dtype=torch.float32)
