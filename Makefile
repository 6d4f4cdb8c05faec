# make demo | demo-live | demo-web | test | test-docs | test-all | test-newest | lint | docs | wheels | notebooks | web |
# web-test | lock | clean.
# make native | native-test | native-fuzz | native-arm64 | native-swift: the client in C (docs/native.md), and in Swift;
# native-arm64-test: C and Kotlin for aarch64 under qemu, with a JVM for it that it fetches from Debian (46 MB);
# native-live: the one for live rounds, which also needs libcurl and OpenSSL 3.
# The environment is .venv, made once from requirements.lock on Python 3.11; test-newest makes .venv-newest on Python 3.12
# or 3.13, without TFF and from the newest releases. `make test` leaves out what is marked slow and what is marked docs;
# test-docs runs the latter, test-all and test-newest everything. The page in web/ needs Node.js 20.19 or newer and npm
# 11, its tests Chromium.
# PYTHON=/path/to/python3.11 chooses the interpreter, NEWEST_PYTHON the other one; else what PATH, uv or pyenv have.
# TEST_PROCESSES=4 runs the tests in four processes.
PYTHON ?=
NEWEST_PYTHON ?=
PYTEST_ARGS ?=
WEB_TEST_ARGS ?=
TEST_PROCESSES ?= 2
VENV_PYTHON := .venv/bin/python
INSTALLED := .venv/installed-from-lock
NEWEST := .venv-newest/installed
PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions
export TF_CPP_MIN_LOG_LEVEL ?= 3

.PHONY: demo demo-live demo-voice demo-web test test-docs test-all test-newest lint docs wheels notebooks web web-test lock clean
.PHONY: native native-live native-test native-fuzz native-arm64 native-arm64-test native-swift

demo: $(INSTALLED)
	@$(VENV_PYTHON) -m tfpfl demo
	@rm -rf runs/demo/bundle
	@$(VENV_PYTHON) -m tflite_export demo runs/demo/many/pflego --client 3 --out runs/demo/bundle --steps 20

demo-live: $(INSTALLED)
	@$(VENV_PYTHON) -m tfpfl demo-live

demo-voice: $(INSTALLED)
	@rm -rf runs/demo-voice/bundle
	@$(VENV_PYTHON) -m tflite_export demo-voice

demo-web: $(INSTALLED) web
	@$(VENV_PYTHON) -m tflite_export demo-web

# A file's tests share what was made for them, so that a file stays in one process; those that take longest start first
# (tests/durations.json, which PYTEST_ARGS=--store-durations writes anew).
PYTEST := -m pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)
	@$(VENV_PYTHON) $(PYTEST) -m "not slow and not docs" $(PYTEST_ARGS)

test-docs: $(INSTALLED)
	@$(VENV_PYTHON) $(PYTEST) -m docs $(PYTEST_ARGS)

test-all: $(INSTALLED)
	@$(VENV_PYTHON) $(PYTEST) $(PYTEST_ARGS)

test-newest: $(NEWEST)
	@.venv-newest/bin/python $(PYTEST) $(PYTEST_ARGS)

lint: $(INSTALLED)
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m mypy --no-error-summary

# The variable silences news of the theme about itself.
docs: $(INSTALLED)
	@NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --quiet --strict

# tfpfl and tfpfl-device, into dist/. URL=https://... is the repository's address on the web: links in the metadata lead
# there. What an earlier build left is deleted first, since it would get into the wheels.
URL ?=
wheels:
	@set -eu; \
	$(call find_python,3.11 3.12 3.13,$(PYTHON)); \
	if [ -z "$$python" ]; then echo "make wheels needs Python 3.11, 3.12 or 3.13" >&2; exit 1; fi; \
	rm -rf dist build/lib build/bdist.* packaging/device/build build/wheels; \
	"$$python" -m venv build/wheels; \
	TFPFL_URL="$(URL)" build/wheels/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
	  --wheel-dir dist . ./packaging/device; \
	ls dist

notebooks: $(INSTALLED)
	@$(VENV_PYTHON) notebooks/execute.py

web: web/node_modules/installed-from-lock
	@cd web && npm run --silent build

web-test: $(INSTALLED) web
	@rm -rf build/web-fixtures && mkdir -p build
	@$(VENV_PYTHON) web/tests/fixtures.py build/web-fixtures 2> build/web-fixtures.log || { cat build/web-fixtures.log >&2; exit 1; }
	@cd web && TFPFL_WEB_FIXTURES="$(CURDIR)/build/web-fixtures" TFPFL_WEB_PYTHON="$(abspath $(VENV_PYTHON))" npm run --silent test -- $(WEB_TEST_ARGS)

web/node_modules/installed-from-lock: web/package-lock.json
	@command -v npm >/dev/null || { echo "the page is built with Node.js 20.19 or newer and npm 11: install them" >&2; exit 1; }
	@cd web && npm ci --silent
	@touch $@

native:
	@$(MAKE) -s -C device_core OUT="$(CURDIR)/build/native" lib
	@ls -l build/native/libtfpfl_device.*

native-live:
	@$(MAKE) -s -C device_core OUT="$(CURDIR)/build/native" live
	@ls -l build/native/libtfpfl_live.*

native-test: $(INSTALLED)
	@TFPFL_LITERT="$(or $(TFPFL_LITERT),2.1.5 2.3.0)" $(VENV_PYTHON) -m pytest -q tests/native $(PYTEST_ARGS)

SECONDS ?= 60
native-fuzz: $(INSTALLED)
	@command -v clang >/dev/null || { echo "the fuzzer is libFuzzer: install clang and libclang-rt-dev" >&2; exit 1; }
	@$(MAKE) -s -C device_core OUT="$(CURDIR)/build/native-fuzz" CC=clang fuzzer
	@PYTHONPATH=. $(VENV_PYTHON) device_core/tests/seeds.py build/native-fuzz
	@cd build/native-fuzz && ./fuzz -dict=words -max_len=16384 -max_total_time=$(SECONDS) corpus

# The aarch64 library by PyPI's ziglang, for glibc 2.36 (Debian 12) or newer; and Kotlin's, where there is a JDK.
ARM64_MAKE = $(MAKE) -s -C device_core OUT="$(CURDIR)/build/native-arm64" AR="$(CURDIR)/build/zig/bin/python -m ziglang ar" \
  CC="$(CURDIR)/build/zig/bin/python -m ziglang cc -target aarch64-linux-gnu.2.36"
native-arm64: $(INSTALLED)
	@[ -x build/zig/bin/python ] || $(VENV_PYTHON) -m venv build/zig
	@build/zig/bin/python -m pip install --quiet --disable-pip-version-check ziglang
	@$(ARM64_MAKE) lib
	@home=$${JAVA_HOME:-$$(dirname $$(dirname $$(readlink -f "$$(command -v javac)")))}; [ ! -f "$$home/include/jni.h" ] || \
	  $(ARM64_MAKE) JAVA_HOME="$$home" jni
	@ls -l build/native-arm64/libtfpfl_*

native-arm64-test: $(INSTALLED)
	@PYTHONPATH=tests $(VENV_PYTHON) -c "from helpers import arm64_system; arm64_system.install()"
	@TFPFL_LITERT="$(or $(TFPFL_LITERT),2.3.0)" $(VENV_PYTHON) -m pytest -q tests/native -k on_aarch64 $(PYTEST_ARGS)

# The Swift package, with the compiler in PATH or else Debian's, which is unpacked into the cache (~/.cache/tfpfl/swift).
native-swift: $(INSTALLED)
	@PYTHONPATH=tests $(VENV_PYTHON) -c "from helpers import swift; swift.install()"
	@TFPFL_LITERT="$(or $(TFPFL_LITERT),2.3.0)" $(VENV_PYTHON) -m pytest -q tests/native/test_swift.py $(PYTEST_ARGS)

lock:
	@command -v uv >/dev/null || { echo "make lock needs uv (pip install uv)" >&2; exit 1; }
	@uv pip compile --quiet --python-version 3.11 --override requirements.override --no-header --no-annotate \
	  --no-emit-index-url --no-emit-find-links --output-file requirements.lock requirements.in >/dev/null

clean:
	rm -rf .venv .venv-newest .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info web/node_modules web/dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call find_python,VERSIONS,GIVEN) sets $$python to the interpreter that was given, or to one that there is; to nothing
# where neither is of these versions.
define find_python
uv_python() { ! command -v uv >/dev/null || uv python find --no-project --no-python-downloads $$1 2>/dev/null || :; }; \
is_one='import sys; "%d.%d" % sys.version_info[:2] in "$(1)".split() or sys.exit(1); print(sys.executable)'; \
python=; \
for candidate in $(if $(2),"$(2)",$(1:%=python%) python3 python $(foreach v,$(1),"$$(uv_python $(v))" $(wildcard $(PYENV)/$(v).*/bin/python))); do \
  python=$$("$$candidate" -c "$$is_one" 2>/dev/null) && break || python=; \
done
endef

# setuptools and wheel go in first and build what comes as source, so that the build is locked too. The stamp is written
# last: an installation that broke off is made again.
$(INSTALLED): requirements.lock setup.py
	@set -eu; \
	$(call find_python,3.11,$(PYTHON)); \
	rm -rf .venv; \
	if [ -z "$$python" ]; then \
	  echo "tfpfl needs Python 3.11 (TensorFlow Federated has no newer one): install python3.11 with its venv module, or say make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	build=$$(grep -E '^(setuptools|wheel)==' requirements.lock); \
	if command -v uv >/dev/null; then \
	  echo "Making .venv from requirements.lock with uv, once"; \
	  uv venv --quiet --no-project --no-python-downloads --python "$$python" .venv; \
	  uv pip install --quiet --python $(VENV_PYTHON) $$build; \
	  uv pip sync --quiet --python $(VENV_PYTHON) --no-build-isolation requirements.lock; \
	  uv pip install --quiet --python $(VENV_PYTHON) --no-deps --no-build-isolation --editable .; \
	else \
	  echo "Making .venv from requirements.lock with pip, once (a few minutes)"; \
	  "$$python" -m venv .venv; \
	  $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps $$build; \
	  $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -r requirements.lock; \
	  $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .; \
	fi; \
	touch $@

# Not locked: what a plain installation gives today.
$(NEWEST): setup.py
	@set -eu; \
	$(call find_python,3.12 3.13,$(NEWEST_PYTHON)); \
	rm -rf .venv-newest; \
	if [ -z "$$python" ]; then \
	  echo "make test-newest needs Python 3.12 or 3.13: install one with its venv module, or say make NEWEST_PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	echo "Making .venv-newest from the newest releases, once (a few minutes)"; \
	"$$python" -m venv .venv-newest; \
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,dp,notebooks,live]'; \
	touch $@
