"""Measuring: cases, gate, timing, baselines and peers, the benchmark's command, and what the compiler made."""
