"""One set of versions: pyproject.toml, environment.yml, the Makefile and the sidecars in data/ agree.

conda itself is not run here; its file installs the extras of pyproject.toml through pip.
"""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FIXED_PACKAGES = ("jupyterlab", "torch", "triton", "matplotlib", "seaborn", "pandas")


def _pins(*extras):
    requirements = [r.split(";")[0] for extra in extras for r in EXTRAS[extra] if not r.startswith("triton-mla[")]
    return dict(r.split("==") for r in requirements if "==" in r)


def test_the_reproduction_is_pinned_exactly():
    for extra in ("figures", "models", "reproduction"):
        for requirement in EXTRAS[extra]:
            assert re.fullmatch(r"triton-mla\[figures,models\]|[a-z-]+==[\d.]+(; .*)?", requirement), requirement
    assert set(FIXED_PACKAGES) <= set(_pins("figures", "reproduction", "notebooks"))


def test_conda_installs_the_same_extras_as_make():
    (pip,) = (
        d["pip"] for d in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"] if isinstance(d, dict)
    )
    conda = set(re.fullmatch(r"-e \.\[(.*)\]", pip[0])[1].split(","))
    make = set(re.findall(r"-e '\.\[([a-z,]+)\]'", (ROOT / "Makefile").read_text())[-1].split(","))
    assert conda == make == {"reproduction", "notebooks", "tests"}


def test_data_was_measured_with_the_pinned_versions():
    sidecars = sorted((ROOT / "data").glob("*_h200_*.json"))
    assert sidecars
    for path in sidecars:
        sidecar = json.loads(path.read_text())
        assert {n: sidecar[n] for n in ("torch", "triton")} == {
            n: _pins("reproduction")[n] for n in ("torch", "triton")
        }


def test_data_was_measured_on_a_clean_commit():
    for path in sorted((ROOT / "data").glob("*.json")):
        record = json.loads(path.read_text())
        for run in record.get("runs", [record]):
            assert run["dirty"] is False, path.name
            assert re.fullmatch(r"[0-9a-f]{40}", run["commit"]), path.name


@pytest.mark.parametrize("name", ["torch", "triton", "numpy", "pandas", "matplotlib", "seaborn"])
def test_this_environment_has_the_pins(name):
    from importlib.metadata import version

    import torch

    if torch.cuda.is_available():
        pytest.skip("a machine with a GPU may bring its own versions, which the sidecars record")
    assert version(name).split("+")[0] == _pins("figures", "reproduction")[name]
