"""What the compiler makes of each kernel for sm_90, read without a GPU: `python -m mla.measure.compiled`.

Prints a JSON list, one entry a kernel and configuration: registers a thread, spilled bytes, shared memory and counts of
the instructions that matter (HGMMA: tensor cores of Hopper; UTMALDG and UTMASTG: TMA loads and stores).
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# The interpreter replaces kernels by Python functions, of which nothing could be compiled.
os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_ALWAYS_COMPILE"] = "1"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from mla.kernels import hopper_launch, merge, portable, portable_config, prefill, work_plan
from mla.kernels.hopper import mla_decode_hopper_kernel
from mla.stages import gluon_simple, gluon_warp_specialised, online_softmax, split_kv

_TARGET = GPUTarget("cuda", 90, 32)
_INSTRUCTIONS = {
    "HGMMA": r"\bHGMMA",
    "UTMALDG": r"\bUTMALDG",
    "UTMASTG": r"\bUTMASTG",
    "LDGSTS": r"\bLDGSTS",
    "BAR": r"\bBAR\.",
    "USETMAXREG": r"USETMAXREG",
    "R2UR": r"\bR2UR\b",
    "spill": r"\b(?:LDL|STL)\b",
}


def inspect_kernel(kernel, signature: dict[str, str], constants: dict[str, object], **options) -> dict[str, object]:
    """Compile one kernel for sm_90 and read its resources.

    Args:
        kernel: a @triton.jit or @gluon.jit function.
        signature: Triton type of each run-time argument, such as "*bf16", "i32" or "fp32".
        constants: values of the remaining arguments.
        options: num_warps, num_stages, maxnreg.

    Returns:
        registers, spilled_bytes, shared_bytes, a count for each name in `_INSTRUCTIONS`, arrivals, lone_arrivals.
    """
    names = kernel.arg_names
    types = {name: signature.get(name, "constexpr") for name in names}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    # pointers and strides are multiples of 16, as torch's allocator and the 576-wide rows make them
    divisible = [n for n in names if types[n].startswith("*") or n.startswith("stride_")]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in divisible if types[n] != "constexpr"}
    make_source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = make_source(fn=kernel, signature=types, constexprs=constexprs, attrs=attributes)
    compiled = triton.compile(source, target=_TARGET, options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run_tool("cuobjdump", "-res-usage", str(cubin))
        sass = _run_tool("nvdisasm", "-c", str(cubin))
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spilled_bytes": int(re.search(r"LOCAL:(\d+)", usage)[1]) + int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared_bytes": compiled.metadata.shared,
        **{name: len(re.findall(pattern, sass)) for name, pattern in _INSTRUCTIONS.items()},
        **_arrivals(compiled.asm["ptx"]),
    }


def _arrivals(ptx: str) -> dict[str, int]:
    """Arrivals of a group of warps at an mbarrier, and those that a barrier among its threads does not stand before.

    One thread arrives for its group, so the others must have come that far; the source does not ask for it, the
    compiler has to.
    """
    steps = re.findall(r"bar\.sync|mbarrier\.arrive\.shared|mbarrier\.try_wait|mbarrier\.arrive\.expect", ptx)
    before = [earlier for earlier, step in zip(["", *steps], steps, strict=False) if step == "mbarrier.arrive.shared"]
    return {"arrivals": len(before), "lone_arrivals": sum(step != "bar.sync" for step in before)}


def _run_tool(tool: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def _types(kernel, dtype: str, partial: bool) -> dict[str, str]:
    """Triton types of a decode kernel's run-time arguments, by the names that our kernels share."""
    floats = {"q_ptr": dtype, "kv_ptr": dtype, "out_ptr": "fp32" if partial else dtype, "lse_ptr": "fp32"}
    floats |= {"partial_out_ptr": "fp32", "partial_lse_ptr": "fp32", "part_out_ptr": dtype, "part_lse_ptr": "fp32"}
    types = {}
    for name in kernel.arg_names:
        if name in floats:
            types[name] = f"*{floats[name]}"
        elif name in ("block_table_ptr", "seq_lens_ptr", "parts_ptr", "requests_ptr"):
            types[name] = "*i32"
        elif name == "scale_log2":
            types[name] = "fp32"
        elif name.startswith(("stride_", "num_", "head_")) or name in ("batch_size", "max_seq_len"):
            types[name] = "i32"
    return types


def inspect_portable(
    config: portable_config.PortableConfig, dtype: str = "bf16", page_size: int = 64
) -> dict[str, object]:
    """`inspect_kernel` of the portable kernel in one configuration, at 512 + 64."""
    kernel = portable._mla_decode_portable_kernel
    types = _types(kernel, dtype, partial=True)
    constants = dict(
        BLOCK_H=config.block_h, BLOCK_N=config.block_n, RANK=512, ROPE=64, PAGE_SIZE=page_size,
        USE_DESCRIPTORS=config.use_descriptors,
    )  # fmt: skip
    if config.use_descriptors:
        types |= {
            f"{n}_desc": f"tensordesc<{dtype}[{config.block_n}, {w}]>" for n, w in (("latent", 512), ("rope", 64))
        }
    else:
        constants |= {"latent_desc": None, "rope_desc": None}
    return inspect_kernel(kernel, types, constants, num_warps=config.num_warps, num_stages=config.num_stages)


def inspect_hopper(rows: int, prefetch: bool, dtype: str = "bf16") -> dict[str, object]:
    """`inspect_kernel` of the Hopper kernel for boxes of `rows` tokens."""
    kernel = mla_decode_hopper_kernel
    boxes = {
        "q_desc": (64, 256),
        "q_rope_desc": (64, 64),
        "kv_desc": (rows, 128 if rows == 64 else 64),
        "kv_rope_desc": (rows, 64),
        "part_desc": (64, 256),
        "out_desc": (64, 256),
    }
    types = _types(kernel, dtype, partial=False)
    types |= {name: f"tensordesc<{dtype}[1, {h}, {w}],{hopper_launch.BOX_LAYOUT!r}>" for name, (h, w) in boxes.items()}
    registers = hopper_launch.CONSUMER_REGISTERS[rows]
    constants = dict(
        ROWS=rows, TILES_PER_PAGE=1, THRESHOLD=8.0, CONSUMER_REGISTERS=registers, PREFETCH=prefetch
    )  # fmt: skip
    return inspect_kernel(kernel, types, constants, num_warps=4, maxnreg=168)


def inspect_prefill(config: prefill.PrefillConfig, dtype: str = "bf16", is_causal: bool = True) -> dict[str, object]:
    """`inspect_kernel` of the prefill kernel in one configuration, for heads of 128 + 64 and 128."""
    kernel = prefill._mla_prefill_kernel
    floats = dict.fromkeys(("q_ptr", "k_nope_ptr", "k_rope_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    types = {name: "i32" for name in kernel.arg_names if name.startswith("stride_")} | floats
    types |= {"lse_ptr": "*fp32", "q_len": "i32", "max_kv_len": "i32", "num_heads": "i32", "scale_log2": "fp32"}
    constants = dict(
        cached_lens_ptr=None, kv_lens_ptr=None, BLOCK_M=config.block_m, BLOCK_N=config.block_n, NOPE=128, ROPE=64,
        V=128, NOPE_BLOCK=128, ROPE_BLOCK=64, V_BLOCK=128, IS_CAUSAL=is_causal,
    )  # fmt: skip
    return inspect_kernel(kernel, types, constants, num_warps=config.num_warps, num_stages=config.num_stages)


def inspect_gluon_rung(module, dtype: str = "bf16") -> dict[str, object]:
    """`inspect_kernel` of a Gluon rung, writing fp32 parts."""
    name = module.__name__.rsplit(".")[-1]
    kernel = getattr(module, f"_mla_decode_{name}_kernel")
    is_simple = module is gluon_simple
    widths = {"q_desc": 512 if is_simple else 256, "q_rope_desc": 64}
    widths |= {"kv_desc": widths["q_desc"], "kv_rope_desc": 64}
    types = _types(kernel, dtype, partial=True)
    types |= {n: f"tensordesc<{dtype}[1, 64, {w}],{gluon_simple.BOX_LAYOUT!r}>" for n, w in widths.items()}
    options = (
        dict(num_warps=gluon_simple.NUM_WARPS)
        if is_simple
        else dict(num_warps=4, maxnreg=gluon_warp_specialised.MAX_REGISTERS)
    )
    return {"kernel": name, "config": "", **inspect_kernel(kernel, types, {}, **options)}


def inspect_all(dtype: str = "bf16") -> list[dict[str, object]]:
    """Every kernel in every configuration that the package launches at 512 + 64 with 16-bit inputs."""
    rung = dict(BLOCK_H=64, BLOCK_N=online_softmax.BLOCK_N, RANK=512, ROPE=64)
    report = []
    for kernel in (online_softmax._mla_decode_online_softmax_kernel, split_kv._mla_decode_split_kv_kernel):
        facts = inspect_kernel(
            kernel,
            _types(kernel, dtype, partial=False),
            rung,
            num_warps=online_softmax.NUM_WARPS,
            num_stages=online_softmax.NUM_STAGES,
        )
        report.append({"kernel": kernel.__name__, "config": "", **facts})
    for config in itertools.chain(*portable_config.CONFIGS.values()):
        report.append({"kernel": "portable", "config": repr(config), **inspect_portable(config, dtype)})
    for config in prefill.CONFIGS:
        report.append({"kernel": "prefill", "config": repr(config), **inspect_prefill(config, dtype)})
    for rows, prefetch in ((64, True), (64, False), (32, True), (16, False)):
        config = f"rows={rows}, prefetch={prefetch}"
        report.append({"kernel": "hopper", "config": config, **inspect_hopper(rows, prefetch, dtype)})
    report += [inspect_gluon_rung(module, dtype) for module in (gluon_simple, gluon_warp_specialised)]
    for kernel, constants in ((work_plan._work_plan_kernel, dict(BATCH=128, MODE=None)),):
        facts = inspect_kernel(kernel, _types(kernel, dtype, partial=False), constants, num_warps=4)
        report.append({"kernel": kernel.__name__, "config": str(constants), **facts})
    kernel = merge._merge_kernel
    facts = inspect_kernel(
        kernel, {**_types(kernel, dtype, partial=False)}, dict(RANK=512, SPLITS=8, CHUNK=8), num_warps=4
    )
    report.append({"kernel": "merge", "config": "", **facts})
    return report


if __name__ == "__main__":
    json.dump(inspect_all(*sys.argv[1:]), sys.stdout, indent=1)
