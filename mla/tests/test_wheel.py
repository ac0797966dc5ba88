"""The wheel by itself, in a fresh environment outside the clone; its dependencies are borrowed from this one."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

USE = """
import torch, mla
from mla.problem import make_problem
p = make_problem(mla.PRESETS["tiny"], [5, 40], page_size=16, dtype=torch.float16)
out, lse = mla.mla_decode(p.q_absorbed, p.kv_cache, p.block_table, p.seq_lens, softmax_scale=p.softmax_scale,
                          kv_lora_rank=32)
assert torch.isfinite(out).all() and torch.isfinite(lse).all()
print(mla.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(folder.glob("*.whl"))


def test_wheel_holds_the_package_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.startswith("triton_mla-")
    assert {"mla/decode.py", "mla/kernels/portable.py", "mla/report/mla.mplstyle"} <= set(names)
    assert not [n for n in names if "tests" in n]
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_command_and_decode_work_outside_the_clone(wheel, tmp_path):
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    def run(*command):
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    done = run(python, "-c", USE)
    assert done.returncode == 0, done.stderr[-2000:]
    assert Path(done.stdout.strip()).is_relative_to(environment)
    done = run(environment / "bin" / "triton-mla-bench", "--check", "--implementations", "portable", "absorbed")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(" ok ") == 10
