# make demo       compile, check, time and plot the four models on what this machine has: ours and eager, then torch.compile beside them
# make demo QUICK=1  the same without torch.compile
# make test       the tests, three at a time, because some wait; TEST_PROCESSES=8 runs more
#                 CUDA kernels that it compiled for the emulation are kept in build/emulated for the next run
# make fuzz       500 random programs: their graphs and adjoints against autograd (tests/fuzz_engine.py --fused: their kernels)
# make browser    notebooks in JupyterLab in a headless Chromium, which playwright brings where there is none on PATH or in $CHROMIUM
# make sanitize   every kernel under the sanitizers: CPU kernels always, CUDA kernels where there is a GPU
# make gpu        on a machine with a GPU: its tests, its sanitizers, and `bench` without the loader; make -k gpu goes on after a failure.
#                 Ends with both verdicts and the newest record's factors; the checks' whole output is in build/gpu/ (make gpu-summary shows it again)
# make lint       ruff: its checks, and its format; clang-format: that of the kernels
# make bench      every phase of every problem and the loader, recorded in benchmarks/results/, and README's table from it
# make host       what a call costs the host, beside eager's
# make notebooks  run the notebooks, all at once; with a GPU they keep their outputs, without one build/notebooks/ gets them
# make notebooks-alone  copies of the notebooks that run without the repository, in build/notebooks-alone/
# make wheel      the package inline_kernels, its kernels and inline_loader as a wheel in build/wheel/
# make clean      remove .venv and build; compiled kernels stay in the user's cache
#
# PYTHON=python3.12 chooses the Python that .venv is made of. PYTHON=python VENV= uses an environment of your own as it is.

# So that a check that tee shows keeps its status.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

PYTHON ?= python3
VENV ?= .venv
TEST_PROCESSES ?= 3

ifeq ($(VENV),)
RUN := $(PYTHON)
READY :=
else
RUN := $(VENV)/bin/python
READY := $(VENV)/installed

$(READY): requirements.txt constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt -c constraints.txt
	touch $@
endif

.PHONY: demo test fuzz browser lint sanitize gpu gpu-checks gpu-tests gpu-sanitize gpu-bench gpu-summary bench host notebooks notebooks-alone wheel clean

demo: $(READY)
	$(RUN) compare.py $(if $(QUICK),--quick) --json build/demo/report.json --plots build/demo

test: $(READY)
	$(RUN) -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

fuzz: $(READY)
	$(RUN) tests/fuzz_engine.py --count 500

browser: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check playwright
	test -n "$$CHROMIUM" || command -v chromium google-chrome >/dev/null || $(RUN) -m playwright install chromium
	$(RUN) -m pytest -m browser -rs tests/test_browser.py

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -c "import clang_format; clang_format.clang_format()" --dry-run -Werror $$(find kernels -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp')

sanitize: $(READY)
	$(RUN) tests/sanitize.py

gpu: gpu-checks gpu-bench gpu-summary

gpu-checks: $(READY)
	$(MAKE) --jobs 2 --output-sync gpu-tests gpu-sanitize

gpu-tests: $(READY)
	@mkdir -p build/gpu
	$(RUN) -m pytest -m gpu -n auto --maxprocesses 14 --dist loadgroup 2>&1 | tee build/gpu/tests.log

gpu-sanitize: $(READY)
	@mkdir -p build/gpu
	$(RUN) tests/sanitize.py cuda 2>&1 | tee build/gpu/sanitizers.log

gpu-bench: $(READY)
	$(RUN) compare.py --device cuda --phase forward,forward_grad,train,train_dx --json benchmarks/results/$(shell date +%Y-%m-%d-%H%M).json
	$(RUN) benchmarks/report.py --readme

gpu-summary: $(READY)
	@$(RUN) benchmarks/report.py --summary build/gpu/tests.log build/gpu/sanitizers.log

bench: $(READY)
	$(RUN) compare.py --phase forward,forward_grad,train,train_dx --json benchmarks/results/$(shell date +%Y-%m-%d-%H%M).json
	$(RUN) benchmarks/report.py --readme
	$(RUN) benchmarks/loader.py --json benchmarks/results/loader/$(shell date +%Y-%m-%d-%H%M).json

host: $(READY)
	$(RUN) benchmarks/host.py

notebooks: $(READY)
	$(RUN) notebooks/execute.py

notebooks-alone: $(READY)
	$(RUN) notebooks/alone.py build/notebooks-alone

wheel: $(READY)
	rm -rf build/lib build/wheel  # or what was there before gets into the wheel
	$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir build/wheel .

clean:
	rm -rf build $(VENV)
