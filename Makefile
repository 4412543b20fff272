# Two entry points; each creates .venv on first use and is quick afterwards.
#   make run    tune this machine's CPU and write tuned_configs/cpu.generic.yaml
#   make test   lint, types, import contracts and the whole test suite; FLASHINFER="0.6.18.post1 0.7.2" names
#               the releases whose own Python layer some tests drive without a GPU (none: FLASHINFER=)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests wait for children and servers more than they compute: two at a time suit two cores and more.
JOBS ?= 2
FLASHINFER ?= 0.6.18.post1
SITES := $(FLASHINFER:%=.flashinfer/%)
# What importing it needs beside torch and numpy.
FLASHINFER_NEEDS := apache-tvm-ffi==0.1.11 nvidia-ml-py requests urllib3 idna certifi
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test lint clean

run: $(READY)
	$(BIN)/autotune run --gpu cpu

test: lint $(SITES)
	@sites="$$(for site in $(SITES); do [ ! -d "$$site" ] || printf '%s/%s:' "$$PWD" "$$site"; done)"; \
	  AUTOTUNE_FLASHINFER_SITE="$${AUTOTUNE_FLASHINFER_SITE-$$sites}" $(BIN)/pytest -n $(JOBS) --dist loadfile

# A release without its dependencies (they are gigabytes). Where it cannot be had its tests are skipped.
.flashinfer/%: $(READY)
	@rm -rf $@ $@.partial
	@if $(BIN)/pip install --quiet --no-deps --target $@.partial flashinfer-python==$* $(FLASHINFER_NEEDS); \
	  then mv $@.partial $@; else rm -rf $@.partial; echo "no FlashInfer $*: its tests are skipped" >&2; fi

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# constraints.txt pins torch: an open range may pull several GB of another build.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "autotune needs Python 3.10 or newer; '$(PYTHON)' is older: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,postgres]'
	@touch $@

clean:
	rm -rf $(VENV) .flashinfer build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
