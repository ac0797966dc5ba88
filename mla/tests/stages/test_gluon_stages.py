"""The Gluon rungs where there is no GPU: what they refuse, and what the compiler makes of them for sm_90.

As a process (`python -m mla.tests.stages.test_gluon_stages`, TRITON_INTERPRET=0) it prints the latter as JSON.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from mla import PRESETS
from mla.problem import Problem, make_problem
from mla.stages import gluon_simple, gluon_warp_specialised

RUNGS = {"gluon_simple": gluon_simple, "gluon_warp_specialised": gluon_warp_specialised}
MAX_SHARED_BYTES = 232_448
# BAR instructions of the kernels that these rungs were made from; one more in a loop stops all warps once a tile.
MAX_BARRIERS = {"gluon_simple": 22, "gluon_warp_specialised": 36}
INSTRUCTIONS = {
    "HGMMA": r"\bHGMMA", "UTMALDG": r"\bUTMALDG", "spill": r"\b(?:LDL|STL)\b", "BAR": r"\bBAR\.",
    "USETMAXREG": r"\bUSETMAXREG",
}  # fmt: skip


def _problem(page_size: int = 64, dtype: torch.dtype = torch.float16, **dimensions: int) -> Problem:
    config = dataclasses.replace(PRESETS["deepseek-v3"], num_heads=4, **dimensions)
    return make_problem(config, [70, 0, 5], page_size=page_size, dtype=dtype)


def _with_gaps(name: str) -> Problem:
    p = _problem()
    tensor = getattr(p, name)
    return dataclasses.replace(p, **{name: torch.stack((tensor, tensor), dim=-1)[..., 0]})


REFUSED = {
    "page_size 16": (lambda: _problem(page_size=16), "kv_cache: expected pages of 64 tokens, got 16"),
    "page_size 128": (lambda: _problem(page_size=128), "kv_cache: expected pages of 64 tokens, got 128"),
    "latent 256": (lambda: _problem(kv_lora_rank=256), r"config: expected widths 512 \+ 64, got 256 \+ 64"),
    "rotated 32": (lambda: _problem(qk_rope_head_dim=32), r"config: expected widths 512 \+ 64, got 512 \+ 32"),
    "fp32": (lambda: _problem(dtype=torch.float32), "expected both bfloat16 or float16, got torch.float32"),
    "mixed": (
        lambda: dataclasses.replace(_problem(), kv_cache=_problem(dtype=torch.bfloat16).kv_cache),
        "expected both bfloat16 or float16, got torch.float16, torch.bfloat16",
    ),
    "query with gaps": (lambda: _with_gaps("q_absorbed"), "q_absorbed: expected a contiguous tensor"),
    "pool with gaps": (lambda: _with_gaps("kv_cache"), "kv_cache: expected a contiguous tensor"),
    "table with gaps": (lambda: _with_gaps("block_table"), "block_table: expected a contiguous tensor"),
}


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_it_does_not_take(rung, case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        RUNGS[rung].decode(make())


@pytest.mark.parametrize("rung", RUNGS)
def test_refuses_the_cpu(rung):
    with pytest.raises(RuntimeError, match=r"expected a GPU of compute capability 9\.0, got cpu"):
        RUNGS[rung].decode(_problem())


def test_refuses_a_scale_that_is_not_positive():
    """The maximum is taken before scaling there."""
    with pytest.raises(ValueError, match="softmax_scale: expected a positive number"):
        gluon_warp_specialised.decode(dataclasses.replace(_problem(), softmax_scale=-1.0))


@pytest.mark.parametrize(
    ("lengths", "num_heads", "expected"),
    # 132 SMs; two head blocks; never more parts than tiles
    [([4096] * 8, 128, 8), ([4096] * 8, 64, 16), ([4096] * 100, 128, 1), ([128, 0], 16, 2)],
)
def test_parts_fill_one_wave(lengths, num_heads, expected):
    config = dataclasses.replace(PRESETS["deepseek-v3"], num_heads=num_heads)
    shapes = dict(q_absorbed=(len(lengths), num_heads, 576), block_table=(len(lengths), max(lengths) // 64))
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    p = dataclasses.replace(_problem(), config=config, **empty)
    assert gluon_simple.default_num_splits(p) == expected


def _run_tool(tool: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def compile_rung(rung: str, dtype: str, is_whole: bool) -> dict[str, object]:
    """Compile a rung's kernel for sm_90 as `decode` launches it, and read its resources.

    Args:
        rung: a name in RUNGS.
        dtype: "bf16" or "fp16".
        is_whole: write results, not fp32 parts of them.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    module = RUNGS[rung]
    kernel = getattr(module, f"_mla_decode_{rung}_kernel")
    if module is gluon_simple:
        width, options = 512, dict(num_warps=gluon_simple.NUM_WARPS)
    else:
        width, options = 256, dict(num_warps=4, maxnreg=gluon_warp_specialised.MAX_REGISTERS)
    box = f"tensordesc<{dtype}[1, 64, {{}}],{gluon_simple.BOX_LAYOUT!r}>"
    wide, rope = box.format(width), box.format(64)
    types = dict(
        q_desc=wide, q_rope_desc=rope, kv_desc=wide, kv_rope_desc=rope, block_table_ptr="*i32", seq_lens_ptr="*i32",
        out_ptr=f"*{dtype}" if is_whole else "*fp32", lse_ptr="*fp32", num_heads="i32", num_splits="i32",
        scale_log2="fp32", stride_table="i32",
    )  # fmt: skip
    names = kernel.arg_names
    pointers = [i for i, name in enumerate(names) if types[name].startswith("*")]
    source = GluonASTSource(
        fn=kernel,
        signature={name: types[name] for name in names},
        constexprs={},
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run_tool("cuobjdump", "-res-usage", str(cubin))
        sass = _run_tool("nvdisasm", "-c", str(cubin))
    return {
        "rung": rung,
        "dtype": dtype,
        "is_whole": is_whole,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spilled_bytes": int(re.search(r"LOCAL:(\d+)", usage)[1]) + int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared_bytes": compiled.metadata.shared,
        **{name: len(re.findall(pattern, sass)) for name, pattern in INSTRUCTIONS.items()},
    }


@pytest.mark.slow
def test_both_compile_for_sm_90_within_the_limits():
    done = subprocess.run(
        [sys.executable, "-m", "mla.tests.stages.test_gluon_stages"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_ALWAYS_COMPILE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert len(report) == 8
    for entry in report:
        assert entry["spilled_bytes"] == entry["spill"] == 0, entry
        assert entry["shared_bytes"] <= MAX_SHARED_BYTES, entry
        assert entry["HGMMA"] > 0, entry
        assert entry["UTMALDG"] > 0, entry
        assert 0 < entry["BAR"] <= MAX_BARRIERS[entry["rung"]], entry
        # registers move from the producer to the consumers
        assert (entry["USETMAXREG"] > 0) == (entry["rung"] == "gluon_warp_specialised"), entry


if __name__ == "__main__":
    configurations = [(r, d, w) for r in RUNGS for d in ("bf16", "fp16") for w in (True, False)]
    json.dump([compile_rung(*c) for c in configurations], sys.stdout, indent=1)
