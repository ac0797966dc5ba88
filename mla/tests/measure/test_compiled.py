"""What the compiler makes of the kernels for sm_90, in a process of its own since there is no interpreter in it."""

import json
import os
import subprocess
import sys

import pytest

MAX_SHARED_BYTES = 232_448


@pytest.fixture(scope="module")
def report():
    done = subprocess.run(
        [sys.executable, "-m", "mla.measure.compiled"],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_kernel_fits_a_hopper_sm(report):
    kernels = {entry["kernel"] for entry in report}
    assert kernels >= {"_mla_decode_online_softmax_kernel", "_mla_decode_split_kv_kernel", "portable", "merge"}
    for entry in report:
        assert entry["shared_bytes"] <= MAX_SHARED_BYTES, entry


@pytest.mark.slow
def test_blocks_of_64_heads_use_wgmma_and_spill_next_to_nothing(report):
    wide = [entry for entry in report if "block_h=64" in entry["config"] or entry["kernel"].startswith("_mla_decode")]
    assert len(wide) >= 5
    for entry in wide:
        assert entry["HGMMA"] > 0, entry
        # The online-softmax rung spills 8 bytes a thread. 64 x 64 tiles through pointers spill more, addresses mostly,
        # and win at small pages all the same.
        is_large_by_pointer = "block_n=64" in entry["config"] and "use_descriptors=False" in entry["config"]
        if not is_large_by_pointer:
            assert entry["spilled_bytes"] <= (8 if "online_softmax" in entry["kernel"] else 0), entry


@pytest.mark.slow
def test_descriptors_become_tma_loads(report):
    for entry in report:
        if entry["kernel"] == "portable":
            assert (entry["UTMALDG"] > 0) == ("use_descriptors=True" in entry["config"]), entry


@pytest.mark.slow
def test_the_prefill_kernel_uses_wgmma_and_does_not_spill(report):
    variants = [entry for entry in report if entry["kernel"] == "prefill"]
    assert len(variants) >= 2
    for entry in variants:
        # 128 + 64 channels of scores and a tile of values, each for whole tiles and for the diagonal
        assert entry["HGMMA"] > 0, entry
        assert entry["spilled_bytes"] == 0, entry


@pytest.mark.slow
def test_the_hopper_kernel_spills_nothing(report):
    variants = [entry for entry in report if entry["kernel"] == "hopper"]
    assert len(variants) >= 4
    for entry in variants:
        assert entry["spilled_bytes"] == entry["spill"] == 0, entry
        assert entry["registers"] <= 168, entry
        assert entry["HGMMA"] == 128, entry
        assert entry["UTMALDG"] >= 27, entry
        # Uniform registers hold the shared-memory descriptors of wgmma. Where ptxas takes the control flow for
        # divergent it moves them through vector registers at every use: 731 times in a version that was 15% slower.
        assert entry["R2UR"] <= 300, entry
        # what tests/kernels/barrier_model.py takes for granted: a consumer arrives when all of its warps have
        assert entry["arrivals"] == 11, entry
        assert entry["lone_arrivals"] == 0, entry


# CTA barriers that the prototypes of the Gluon rungs had: one more is a wait that the compiler had to add.
MAX_BARRIERS = {"gluon_simple": 22, "gluon_warp_specialised": 36}


@pytest.mark.slow
@pytest.mark.parametrize("rung", MAX_BARRIERS)
def test_gluon_rungs_fit(rung, report):
    (entry,) = [entry for entry in report if entry["kernel"] == rung]
    assert entry["spilled_bytes"] == entry["spill"] == 0, entry
    assert entry["HGMMA"] > 0, entry
    assert entry["UTMALDG"] > 0, entry
    assert 0 < entry["BAR"] <= MAX_BARRIERS[rung], entry
    # registers move from the producer to the consumers
    assert (entry["USETMAXREG"] > 0) == (rung == "gluon_warp_specialised"), entry
