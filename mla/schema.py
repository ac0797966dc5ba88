"""Columns of the measured files in data/, which the benchmark writes and the report reads (see data/README.md)."""

DECODE_COLUMNS = [
    "implementation", "batch_size", "context_len", "lengths", "num_heads", "q_len", "dtype", "page_size", "num_splits",
    "timer", "l2_state", "latency_us_p20", "latency_us_p50", "latency_us_p80", "repeats", "plan_us", "bytes_moved",
    "flops", "matmul_tflops", "read_gbps", "rel_err", "passed", "status", "run_id",
]  # fmt: skip

CAMPAIGN_COLUMNS = [
    "kernels", "cases", "results", "failures", "worst_over_bound", "worst_seed", "first_seed", "seconds", "run_id",
]  # fmt: skip

SANITIZER_COLUMNS = [
    "tool", "tool_version", "target", "kind", "errors", "verdict", "where", "seconds", "run_id",
]  # fmt: skip

TUNE_COLUMNS = [
    "kernel", "batch_size", "context_len", "lengths", "num_heads", "dtype", "page_size", "block_h", "block_n",
    "num_warps", "num_stages", "loads", "num_splits", "mode", "prefetch", "by_rule", "latency_us_p20",
    "latency_us_p50", "latency_us_p80", "repeats", "matmul_tflops", "rel_err", "status", "run_id",
]  # fmt: skip

PIPELINE_COLUMNS = [
    "model", "batch_size", "context_len", "num_layers", "hidden_size", "num_heads", "dtype", "parameters", "fill",
    "compiled", "latency_us_p20", "latency_us_p50", "latency_us_p80", "repeats", "tokens_per_s", "prefill_ms",
    "cache_bytes", "weight_bytes", "fill_peak_bytes", "decode_peak_bytes", "status", "run_id",
]  # fmt: skip

OPPONENT_COLUMNS = [
    "form", "cache", "precision", "compile_mode", "batch_size", "context_len", "lengths", "num_heads", "dtype",
    "page_size", "timer", "l2_state", "latency_us_p20", "latency_us_p50", "latency_us_p80", "repeats",
    "portable_us_p50", "hopper_us_p50", "flops", "matmul_tflops", "read_gbps", "rel_err", "status", "run_id",
]  # fmt: skip

INTERMEDIATE_COLUMNS = [
    "implementation", "batch_size", "context_len", "lengths", "num_heads", "dtype", "page_size", "step", "position",
    "kernel_name", "grid", "block", "latency_us_p50", "repeats", "allocated_bytes", "output_bytes", "scratch_bytes",
    "inductor_read_bytes", "inductor_written_bytes", "bytes_moved", "flops", "rel_err", "status", "run_id",
]  # fmt: skip

RUN_COLUMNS = [
    "run", "implementation", "batch_size", "context_len", "lengths", "num_heads", "dtype", "page_size", "timer",
    "l2_state", "latency_us_p20", "latency_us_p50", "latency_us_p80", "repeats", "flops", "matmul_tflops", "read_gbps",
    "status", "run_id",
]  # fmt: skip

PREFILL_COLUMNS = [
    "implementation", "config", "batch_size", "q_len", "context_len", "num_heads", "qk_head_dim", "v_head_dim", "dtype",
    "assembly", "timer", "l2_state", "latency_us_p20", "latency_us_p50", "latency_us_p80", "repeats", "flops",
    "matmul_tflops", "rel_err", "passed", "status", "run_id",
]  # fmt: skip
