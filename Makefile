# One environment, .venv, reused by every target. An interpreter given as PYTHON=... is used as it is instead, and
# nothing is installed: `make measure PYTHON=python3`.
ifeq ($(origin PYTHON),command line)
PY := $(PYTHON)
else
PY := .venv/bin/python
LIGHT := .venv/light.stamp
FULL := .venv/full.stamp
LAB := .venv/lab.stamp
endif

.DEFAULT_GOAL := help
.PHONY: help figures test notebooks lab measure test-gpu campaign sanitize breaks lint clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

figures: $(LIGHT)  ## redraw every figure and table from data/ (main job; no GPU, no torch; GPU=h100 for another card)
	$(PY) -m mla.report $(if $(GPU),--gpu $(GPU))

test: $(FULL)  ## run the tests (no GPU needed)
	$(PY) -m pytest -q

notebooks: $(FULL)  ## execute the notebooks afresh, in place
	$(PY) -m mla.report.notebooks notebooks

lab: $(LAB)  ## open the notebooks in JupyterLab
	$(PY) -m jupyterlab notebooks

# Tests that use a GPU where there is one.
GPU_TESTS := $(addprefix mla/tests/,test_decode.py test_decode_gpu.py test_faults.py test_validate.py \
	test_batch_invariant.py test_determinism_gpu.py test_cache.py test_cache_model.py test_cache_gpu.py \
	test_compat.py test_compat_gpu.py test_layer.py test_layer_gpu.py test_hf_gpu.py stages kernels \
	measure/test_opponents.py measure/test_intermediates.py)

# What may end with an error, since a row failed, comes last or stops nothing.
measure: $(FULL)  ## sweep and benchmark on this machine's GPU, into data/ (run again to go on; CASES="heads long" for less)
	$(PY) -m mla.measure.bench tune --output data
	$(PY) -m mla.measure.bench first-call --output data
	-$(PY) -m mla.measure.bench opponents --output data
	-$(PY) -m mla.measure.bench intermediates --output data
	-$(PY) -m mla.measure.bench prefill --output data
	-$(PY) -m mla.measure.bench generate --output data
	-$(PY) -m mla.measure.bench runs --output data
	$(PY) -m mla.measure.bench --cases $(or $(CASES),all) --output data $(FLAGS)

test-gpu: $(FULL)  ## run the GPU tests on this machine's GPU, summary into data/
	$(PY) -m pytest -q $(GPU_TESTS) --record data $(FLAGS)

campaign: $(FULL)  ## check 2,000 random cases on this machine's GPU, summary into data/
	$(PY) -m mla.measure.bench campaign --output data $(FLAGS)

sanitize: $(FULL)  ## run the kernels under compute-sanitizer (CUDA toolkit), table into data/
	$(PY) -m mla.measure.bench sanitize --output data $(FLAGS)

breaks: $(FULL)  ## break each guard on purpose, in copies, and see that a test fails (minutes; with a GPU also its kernel's)
	$(PY) -m pytest -q mla/tests/test_breaks.py --run-breaks $(FLAGS)

lint: $(FULL)  ## check style and CITATION.cff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m check_jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

clean:  ## delete the environment and caches
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"expected Python 3.11 or newer as python3, got {sys.version}")'
	python3 -m venv .venv

.venv/light.stamp: pyproject.toml | .venv/bin/python
	.venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["figures"], sep="\n")' > .venv/figures.txt
	.venv/bin/python -m pip install -q -r .venv/figures.txt
	touch $@

.venv/full.stamp: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install -q -e '.[reproduction,tests]'
	touch $@

.venv/lab.stamp: .venv/full.stamp
	.venv/bin/python -m pip install -q -e '.[reproduction,tests,notebooks]'
	touch $@
