"""The sentences on the first call of a fresh process and on later ones, from `first_call_<gpu>_<date>.json`."""

import json
import statistics
from pathlib import Path


def first_call_sentence(directory: str | Path, gpu: str) -> str:
    """What the newest file of a GPU says, or an empty string where there is none."""
    # the dates sort by name
    files = sorted(Path(directory).glob(f"first_call_{gpu}_????-??-??.json"))
    if not files:
        return ""
    record = json.loads(files[-1].read_text(encoding="utf-8"))
    if missing := [key for key in ("gpu", "case", "seconds", "host_us") if key not in record]:
        raise ValueError(
            f"expected the keys gpu, case, seconds, host_us in {files[-1].name}, got no {', '.join(missing)}; "
            f"measure again"
        )
    case = record["case"]
    times = [
        f"`{name}` {statistics.median(states['empty_cache']):.1f} s "
        f"({statistics.median(states['filled_cache']):.2f} s where Triton's cache is filled)"
        for name, states in record["seconds"].items()
    ]
    host = ", ".join(f"`{name}` {us:.1f} us" for name, us in record["host_us"].items())
    citable = "" if record.get("dirty") is False else ", not citable, made from uncommitted code"
    return (
        f"The first call of a fresh process, with an empty Triton cache, takes {', '.join(times)}: "
        f"{case['batch_size']} x {case['context_len'] // 1024}K, {case['num_heads']} heads, compilation and work plan "
        f"included ({record['gpu']}, {files[-1].stem[-10:]}{citable}). "
        f"Later eager calls cost the host, without waiting for the GPU, {host}; `hopper` makes its work plan at each "
        f"call, the others that have one are given it."
    )
