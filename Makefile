# specrt: `make` lists what there is to do.
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
PAIR    ?=
BACKEND ?=
ARGS    ?=
PROMPTS := $(if $(filter itn,$(PAIR)),itn,code)
# Without PROMPT and PAIR, `generate` shows a text with one right answer.
DEMO := $(or $(PAIR),$(if $(filter undefined,$(origin PROMPT)),itn,codelet))
ifeq ($(DEMO),itn)
PROMPT ?= The crate weighs four point five kilograms and costs thirty two pounds and ten pence. It left at a quarter past eleven in the morning on the twenty sixth of May twenty twenty seven.
else
PROMPT ?= def fibonacci(n):
endif
# The value as it was given: a dollar sign in a prompt is a dollar sign.
override PROMPT := $(value PROMPT)
export PROMPT
# What building for a backend needs besides.
EXTRA := $(if $(filter tensorrt-rtx,$(BACKEND)),$(VENV)/.tensorrt-rtx)
RECIPE := $(if $(filter tensorrt%,$(BACKEND)),tensorrt,recipe).toml
BACKENDS := auto ort-cpu ort-cuda tensorrt tensorrt-rtx
PAIRS = $(patsubst engines/%/$(RECIPE),%,$(wildcard engines/*/$(RECIPE)))
$(if $(filter-out $(BACKENDS),$(BACKEND)),$(error BACKEND is $(BACKEND); expected one of: $(BACKENDS)))
$(if $(filter-out $(PAIRS),$(PAIR)),$(error PAIR is $(PAIR), and there is no engines/$(PAIR)/$(RECIPE); there are: $(PAIRS)))
# Without a PAIR nothing is downloaded: the pairs whose weights are here are built, the others named.
RECIPES = $(if $(PAIR),echo engines/$(PAIR)/$(RECIPE),$(BIN)/python -m specrt_export.estimate.estimate engines/*/$(RECIPE))
# A checkpoint without a graph beside it is exported, which takes torch.
EXPORTER = $(if $(wildcard $(PAIR:%=engines/%/$(RECIPE))),$(shell grep -qs '^graph' engines/$(PAIR)/$(RECIPE) || echo $(VENV)/.export))
BUNDLE = engines/build/$(PAIR)$(if $(EXTRA),$(if $(filter codelet,$(PAIR)),-fp16,-gpu))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-export setup-align setup-serve engines generate chat serve wheel test test-install lint \
  check bench gpu-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  PAIR=name BACKEND=tensorrt-rtx narrow `engines`; PROMPT="..." ARGS="--gamma 2" go to `generate`'
	@echo '  $(BIN)/specrt has more: pull, list, inspect, verify, tune, doctor; $(BIN)/specrt --help lists all'

# As `python -m venv`, without its traceback where Ctrl-C ends it.
MAKE_VENV = $(PYTHON) -c 'import runpy, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); \
  runpy.run_module("venv", run_name="__main__", alter_sys=True)'

PIP := $(BIN)/python -m pip install -q --disable-pip-version-check

# Installing compiles the CPU kernels; without a compiler the package has none.
$(VENV)/.runtime: pyproject.toml setup.py requirements/runtime.txt $(wildcard runtime/cpp/src/kernels/* runtime/cpp/src/speculation/*)
	@$(PYTHON) -c 'import sys; v = "%d.%d" % sys.version_info[:2]; sys.exit(sys.version_info < (3, 10) \
	  and "specrt needs Python 3.10 or later, and $(PYTHON) is " + v + "; name another: make PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(MAKE_VENV) --clear $(VENV)
	@$(PIP) --no-deps --no-compile -r requirements/runtime.txt -e .
	@touch $@

$(VENV)/.tensorrt-rtx: $(VENV)/.runtime requirements/tensorrt.txt
	@$(PIP) -r requirements/tensorrt.txt
	@touch $@

$(VENV)/.serve: $(VENV)/.runtime requirements/serve.txt
	@$(PIP) -r requirements/serve.txt
	@touch $@

$(VENV)/.align: $(VENV)/.export requirements/align.txt
	@$(PIP) -r requirements/align.txt
	@touch $@

$(VENV)/.test: $(VENV)/.runtime requirements/test.txt requirements/serve.txt requirements/align.txt
	@$(PIP) -r requirements/test.txt
	@touch $@

$(VENV)/.export: $(VENV)/.runtime requirements/export.txt
	@$(PIP) -r requirements/export.txt
	@touch $@

$(VENV)/.wheel: $(VENV)/.runtime requirements/wheel.txt
	@$(PIP) -r requirements/wheel.txt
	@touch $@

setup: $(VENV)/.runtime ## make .venv with what building and running need (no torch)

setup-export: $(VENV)/.export ## add torch and transformers, to export checkpoints

setup-align: $(VENV)/.align ## add what training drafts needs

setup-serve: $(VENV)/.serve ## add what `specrt serve` needs

engines: $(VENV)/.runtime $(EXTRA) $(EXPORTER) ## build the pairs whose weights are here; PAIR=name downloads and builds one
	@recipes=$$($(RECIPES)) || exit $$?; failed=0; for recipe in $$recipes; do \
	  $(BIN)/specrt build $$recipe --if-stale $(if $(BACKEND),--backend $(BACKEND)) || failed=$$?; \
	  test $$failed -ne 130 || break; done; exit $$failed  # 130: Ctrl-C

generate: PAIR := $(DEMO)
chat serve bench: PAIR := $(or $(PAIR),codelet)
generate: engines ## write numbers of a text in digits; complete PROMPT with codelet, or PAIR
	@$(if $(filter codelet,$(PAIR)),echo 'codelet is a stand-in for a real pair: its text looks like Python and means nothing' >&2)
	@$(BIN)/specrt generate $(BUNDLE) --prompt "$$PROMPT" $(or $(ARGS),$(if $(filter itn codelet,$(PAIR)),--compare))

chat: engines ## talk with codelet, or PAIR; ARGS="--show-draft"
	@$(BIN)/specrt chat $(BUNDLE) $(ARGS)

serve: engines $(VENV)/.serve ## serve codelet, or PAIR, at http://127.0.0.1:8080; ARGS="--port 9000"
	@$(BIN)/specrt serve $(BUNDLE) $(ARGS)

wheel: $(VENV)/.wheel ## build the wheels of x86-64 and aarch64 into dist; MACHINES=x86_64 builds one
	@$(BIN)/python tools/wheels.py $(MACHINES)

test: $(VENV)/.export $(VENV)/.test ## run the tests; ARGS="-k words" narrows them, ARGS="-m nightly" runs the long ones
	@$(BIN)/python -m pytest -n 2 --dist worksteal -rs $(ARGS)

test-install: wheel ## install the wheels in bare chroots of Debian (root, debootstrap); PYTHONS="/path/python3.10 ..." adds some
	@$(BIN)/python tools/bare_machines.py $(PYTHONS)

lint: $(VENV)/.export $(VENV)/.test ## check formatting, style and types
	@$(BIN)/ruff format -q --check . && $(BIN)/ruff check -q . && $(BIN)/mypy
	@find runtime/cpp tests/cpp examples/cpp -name '*.[ch]' -o -name '*.[ch]pp' | xargs $(BIN)/clang-format --dry-run -Werror

check: lint test ## lint and test

bench: engines ## measure codelet, or PAIR: plain, gamma 2, 4 and auto
	@$(BIN)/specrt bench $(BUNDLE) --prompts benchmarks/prompts/$(PROMPTS).jsonl $(ARGS)

gpu-check: $(VENV)/.runtime ## verify on a GPU all that needs one; ARGS="--minutes 10"
	@$(BIN)/python benchmarks/gpu $(ARGS)

clean: ## remove .venv, bundles and caches
	rm -rf $(VENV) engines/build .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
