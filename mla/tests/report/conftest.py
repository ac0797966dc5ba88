"""Synthetic measurements for the tests of the report: latencies follow a formula, so every ratio is known."""

import json
import shutil
from itertools import product
from pathlib import Path

import matplotlib
import pandas as pd
import pytest

from mla.measure.cases import GROUPS, Case
from mla.measure.implementations import STAIRCASE
from mla.report import data
from mla.schema import (
    DECODE_COLUMNS,
    INTERMEDIATE_COLUMNS,
    OPPONENT_COLUMNS,
    PIPELINE_COLUMNS,
    PREFILL_COLUMNS,
    TUNE_COLUMNS,
)

matplotlib.use("Agg")

# How many times the finished kernel's latency each implementation takes.
FACTORS = {"portable": 1.0, "torch_compile": 1.5, "torch_compile_paged": 2.5, "flashmla": 0.8, "absorbed": 4.0}
SHAPES = list(product((8, 32, 64, 128), (1024, 4096, 16384, 32768)))
README = "before\n" + "".join(
    f"<!-- {name}:begin -->\nold {name}\n<!-- {name}:end -->\nbetween\n" for name in ("headline", "results", "claims")
)


def decode_row(implementation: str, batch_size: int, context_len: int, timer: str = "cuda_graph", **changes) -> dict:
    """One measurement; the finished kernel runs at 500 TFLOPS in a graph, and eager launches add 30 us."""
    tokens = batch_size * context_len
    flops = 2 * (576 + 512) * 128 * tokens
    latency_us = FACTORS.get(implementation, 1.0) * flops / 500e6 + (30 if timer == "eager" else 0)
    row = dict.fromkeys(DECODE_COLUMNS) | {
        "implementation": implementation,
        "batch_size": batch_size,
        "context_len": context_len,
        "num_heads": 128,
        "q_len": 1,
        "dtype": "bf16",
        "page_size": None if implementation in ("torch_compile", "absorbed") else 64,
        "lengths": "even",
        "timer": timer,
        "l2_state": "cold",
        "latency_us_p20": latency_us * 0.99,
        "latency_us_p50": latency_us,
        "latency_us_p80": latency_us * 1.01,
        "repeats": 50,
        "bytes_moved": tokens * 1152 + batch_size * 128 * 1088 * 2,
        "flops": flops,
        "matmul_tflops": 800.0,
        "read_gbps": 4500.0,
        "rel_err": 0.002,
        "passed": True,
        "status": "ok",
        "run_id": "r1",
    }
    row |= changes
    if row["status"] != "ok":
        row |= dict.fromkeys(("latency_us_p20", "latency_us_p50", "latency_us_p80")) | {"passed": False}
    return row


def tune_row(batch_size: int, context_len: int, latency_us: float, **changes) -> dict:
    """One measurement of the sweep: by default the first guess."""
    return (
        dict.fromkeys(TUNE_COLUMNS)
        | {
            "kernel": "portable",
            "lengths": "even",
            "batch_size": batch_size,
            "context_len": context_len,
            "num_heads": 128,
            "dtype": "bf16",
            "page_size": 64,
            "block_h": 16,
            "block_n": 32,
            "num_warps": 4,
            "num_stages": 2,
            "loads": "pointer",
            "latency_us_p50": latency_us,
            "status": "ok",
            "run_id": "t1",
        }
        | changes
    )


# Matmul and read ceilings of the synthetic data, and the share of the lower one that each kernel reaches.
MATMUL_TFLOPS, READ_GBPS = 800.0, 4500.0
SHARES = {
    "hopper": 0.84, "hopper_without_prefetch": 0.76, "hopper_without_pdl": 0.81, "gluon_warp_specialised": 0.7,
    "gluon_simple": 0.45, "portable": 0.38, "flashmla": 0.78,
}  # fmt: skip
# How many times as long a ragged batch takes as the even one beside it.
RAGGED_FACTORS = {"hopper": 1.05, "flashmla": 1.1, "portable": 3.0}


def study_row(implementation: str, case: Case, **changes) -> dict:
    """One measurement of a case of the benchmark: a launch of 6 us, and a share of the lower ceiling."""
    columns = case.to_columns()
    floor_us = max(case.flops / MATMUL_TFLOPS / 1e6, case.bytes_moved / READ_GBPS / 1e3)
    latency_us = 6 + floor_us / SHARES[implementation]
    if case.lengths != "even":
        latency_us *= RAGGED_FACTORS.get(implementation, 1.0)
    return (
        decode_row(
            implementation,
            case.batch_size,
            case.context_len,
            **{f"latency_us_p{q}": latency_us * f for q, f in ((20, 0.99), (50, 1), (80, 1.01))},
            bytes_moved=case.bytes_moved,
            flops=case.flops,
        )
        | columns
        | changes
    )


def hopper_tune_row(case: Case, mode: str, prefetch: str, by_rule: bool, latency_us: float | None, **changes) -> dict:
    """One measurement of the Hopper sweep."""
    columns = case.to_columns()
    columns.pop("q_len")
    made = {"kernel": "hopper", "mode": mode, "prefetch": prefetch, "by_rule": by_rule, "latency_us_p50": latency_us}
    return dict.fromkeys(TUNE_COLUMNS) | columns | made | {"status": "ok", "run_id": "t1"} | changes


def pipeline_row(model: str, context_len: int, **changes) -> dict:
    """One measurement of a whole model: the patched one's step takes 1 ms and 1 us for 128 tokens."""
    slower = {"mla_patched": 1.0, "mha": 1 + context_len / 8192, "mla_unpatched": 1 + context_len / 4096}[model]
    step_us = slower * (1000 + context_len / 128)
    values = {"mha": 8192}.get(model, 576)
    cache_bytes = 8 * 4 * 2 * values * (context_len + 33)
    row = dict.fromkeys(PIPELINE_COLUMNS) | {
        "model": model, "batch_size": 8, "context_len": context_len, "num_layers": 4, "hidden_size": 4096,
        "num_heads": 32, "dtype": "bf16", "parameters": 8e8, "weight_bytes": 1.6e9,
        "fill": "prefill" if context_len <= 8192 else "random_rows", "compiled": False,
        **{f"latency_us_p{q}": step_us * f for q, f in ((20, 0.99), (50, 1), (80, 1.01))},
        "repeats": 24, "tokens_per_s": 8e6 / step_us, "cache_bytes": cache_bytes,
        "fill_peak_bytes": 2e9 + 2 * cache_bytes, "decode_peak_bytes": 2e9 + cache_bytes, "status": "ok",
        "run_id": "p1",
    }  # fmt: skip
    row |= changes
    if row["status"] != "ok":
        row |= {
            name: None for name in row if name.startswith(("latency", "tokens", "cache", "fill_peak", "decode_peak"))
        }
    return row


class DataFolder:
    """A data folder in the making: `decode`, `tune` and `pipeline` are lists of rows to change before `write`."""

    def __init__(self, path: Path, published: Path):
        self.path = path
        self.path.mkdir(parents=True, exist_ok=True)
        shutil.copy(published, path)
        timers = ("cuda_graph", "eager")
        self.decode = [decode_row(name, *shape, timer) for name in FACTORS for shape in SHAPES for timer in timers]
        self.tune, self.pipeline = [], []
        for shape in SHAPES:
            self.tune += [tune_row(*shape, 200.0), tune_row(*shape, 100.0, block_h=64, block_n=64, loads="descriptor")]

    def add_studies(self, *groups: str) -> None:
        """Rows of the groups of cases beside the sixteen shapes, all of them by default; CUDA graph only."""
        for group in groups or ("heads", "long", "ragged", "staircase"):
            names = STAIRCASE if group == "staircase" else ("hopper", "flashmla", "portable")
            self.put(study_row(name, case) for case in GROUPS[group] for name in names)

    def add_pipeline(self, **out_of_memory: int) -> None:
        """Rows of whole models from 1K to 128K; a model that is named runs out of memory from that context on."""
        for model in ("mla_patched", "mla_unpatched", "mha"):
            for context_len in (2**n for n in range(10, 18)):
                failed = context_len >= out_of_memory.get(model, 2**30)
                changes = {"status": "out_of_memory"} if failed else {}
                self.pipeline.append(pipeline_row(model, context_len, **changes))

    def put(self, rows) -> None:
        """Add decode rows in the place of those of the same implementation, case and timer."""
        keys = ("implementation", "batch_size", "context_len", "lengths", "num_heads", "timer")
        known = {tuple(row[k] for k in keys): row for row in [*self.decode, *rows]}
        self.decode = list(known.values())

    def add_hopper_sweep(self) -> None:
        """The Hopper sweep at an even and a ragged shape; the rule is right at the first only."""
        even, uneven = Case(8, 1024), GROUPS["ragged"][0]
        for case, times in ((even, (40.0, 20.0, 25.0)), (uneven, (60.0, None, 50.0))):
            for mode, latency_us in zip(("whole", "equal_runs", "even_shares"), times, strict=True):
                if latency_us is None:
                    continue
                is_rule = mode == {"even": "equal_runs"}.get(case.lengths, "whole")
                self.tune += [
                    hopper_tune_row(case, mode, "on", is_rule, latency_us),
                    hopper_tune_row(case, mode, "off", False, latency_us * 1.1),
                ]

    def change(self, implementation: str, shape: tuple[int, int], **changes) -> None:
        """Change both measurements (graph, eager) of one implementation at one shape; `drop=True` removes them."""
        for index, row in enumerate(self.decode):
            if (row["implementation"], row["batch_size"], row["context_len"]) == (implementation, *shape):
                if changes.get("drop"):
                    self.decode[index] = None
                else:
                    self.decode[index] = decode_row(implementation, *shape, row["timer"], **changes)
        self.decode = [row for row in self.decode if row]

    def write(
        self, gpu="h200", date="2026-01-02", gpu_name="NVIDIA H200", dirty=False, columns=DECODE_COLUMNS, notes=None
    ) -> Path:
        """Write the CSV files and their provenance; returns the folder."""
        written = {"decode": (self.decode, "r1", columns), "tune": (self.tune, "t1", TUNE_COLUMNS)}
        if self.pipeline:
            written["pipeline"] = (self.pipeline, "p1", PIPELINE_COLUMNS)
        for kind, (rows, run, names) in written.items():
            stem = self.path / f"{kind}_{gpu}_{date}"
            pd.DataFrame(rows, columns=names).to_csv(f"{stem}.csv", index=False)
            sidecar = {"gpu": gpu_name, "runs": [{"run_id": run, "dirty": dirty}]}
            if notes and kind == "decode":
                sidecar["notes"] = notes
            Path(f"{stem}.json").write_text(json.dumps(sidecar), encoding="utf-8")
        return self.path

    def write_first_call(self, gpu="h200", date="2026-01-02", dirty=False) -> None:
        """Write what the first call takes, three repeats a kernel."""
        seconds = {
            "portable": {"empty_cache": [4.0, 4.24, 9.0], "filled_cache": [0.5, 0.52, 0.6]},
            "hopper": {"empty_cache": [9.0, 9.31, 9.4], "filled_cache": [0.7, 0.72, 0.8]},
        }
        case = {"batch_size": 8, "context_len": 1024, "num_heads": 128}
        host = {"portable": 101.0, "hopper": 50.25, "hopper_planned": 20.0}
        record = {"gpu": f"NVIDIA {gpu.upper()}", "dirty": dirty, "case": case, "seconds": seconds, "host_us": host}
        (self.path / f"first_call_{gpu}_{date}.json").write_text(json.dumps(record), encoding="utf-8")

    def load(self, **options) -> pd.DataFrame:
        """Write and load the decode measurements."""
        return data.load(self.write(**options), options.get("gpu", "h200"))

    def load_pipeline(self, **options) -> pd.DataFrame | None:
        """Write and load the whole models."""
        return data.load_study(self.write(**options), "pipeline")

    def load_tune(self) -> pd.DataFrame:
        """Write and load the sweep."""
        return data.load_tune(self.write())


@pytest.fixture
def published_file(request) -> Path:
    return request.config.rootpath / "data" / "published.csv"


@pytest.fixture
def published(published_file) -> pd.DataFrame:
    return data.load_published(published_file.parent)


@pytest.fixture
def folder(tmp_path, published_file) -> DataFolder:
    return DataFolder(tmp_path / "data", published_file)


@pytest.fixture
def readme_text() -> str:
    return README


@pytest.fixture
def make_row():
    return decode_row


def opponent_row(compile_mode: str, latency_us: float | None, timer: str = "cuda_graph", **changes) -> dict:
    """One measurement of the study of opponents, beside kernels that take 4000 and 2000 us."""
    row = dict.fromkeys(OPPONENT_COLUMNS) | {
        "form": "matmul", "cache": "contiguous", "precision": "bf16", "compile_mode": compile_mode, "lengths": "even",
        "batch_size": 128, "context_len": 32768, "num_heads": 128, "dtype": "bfloat16", "page_size": 64,
        "timer": timer, "l2_state": "cold", "latency_us_p50": latency_us, "portable_us_p50": 4000.0,
        "hopper_us_p50": 2000.0, "flops": 2 * 1088 * 128 * 128 * 32768, "status": "ok", "run_id": "o1",
    }  # fmt: skip
    return row | changes


def kernel_row(implementation: str, kernels: dict[str, float], **changes) -> list[dict]:
    """The kernels of one call of an implementation at 128 x 32K and their times in us, by name."""
    tokens = 128 * 32768
    call = dict.fromkeys(INTERMEDIATE_COLUMNS) | {
        "implementation": implementation, "batch_size": 128, "context_len": 32768, "lengths": "even", "num_heads": 128,
        "dtype": "bfloat16", "page_size": 64, "step": "call", "repeats": 5, "allocated_bytes": 150, "output_bytes": 100,
        "scratch_bytes": 0, "bytes_moved": tokens * 1152, "flops": 2 * 1088 * 128 * tokens, "status": "ok",
        "run_id": "i1",
    }  # fmt: skip
    return [
        call
        | {"position": i, "kernel_name": name, "grid": "132 1 1", "block": "128 1 1", "latency_us_p50": us}
        | changes
        for i, (name, us) in enumerate(kernels.items())
    ]


def prefill_row(implementation: str, latency_us: float | None, **changes) -> dict:
    """One measurement of prefill: 4K tokens of 128 heads."""
    row = dict.fromkeys(PREFILL_COLUMNS) | {
        "implementation": implementation, "batch_size": 1, "q_len": 4096, "context_len": 4096, "num_heads": 128,
        "qk_head_dim": 192, "v_head_dim": 128, "dtype": "bfloat16",
        "assembly": "none" if implementation == "fused" else "timed", "timer": "cuda_graph", "l2_state": "cold",
        "latency_us_p50": latency_us, "flops": 6e11, "matmul_tflops": 750.0, "passed": latency_us is not None,
        "status": "ok", "run_id": "p1",
    }  # fmt: skip
    return row | changes


def write_study(path: Path, kind: str, rows: list[dict], dirty: bool = False) -> None:
    """Write the file of a study and its provenance into a data folder."""
    columns = data.STUDIES[kind]
    stem = path / f"{kind}_h200_2026-01-02"
    pd.DataFrame(rows, columns=columns).to_csv(f"{stem}.csv", index=False)
    runs = [{"run_id": run_id, "dirty": dirty} for run_id in sorted({row["run_id"] for row in rows})]
    Path(f"{stem}.json").write_text(json.dumps({"gpu": "NVIDIA H200", "runs": runs}), encoding="utf-8")
