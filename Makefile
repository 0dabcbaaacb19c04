# Run make alone for the list of targets.
.DEFAULT_GOAL := help
SHELL := /bin/bash

# A machine without HOME (some CI, some containers) still has to find Go's caches.
ifeq ($(strip $(HOME)),)
export HOME := $(CURDIR)/.cache/home
endif

TOOL    = go tool -modfile=internal/tools/go.mod
COMPOSE = $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)
VERSION = $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)

# More arguments for go test, for example: make test TESTFLAGS='-run Claim -v'
TESTFLAGS ?=

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## build bin/millrace
	go build -trimpath -ldflags "-X main.version=$(VERSION)" -o bin/millrace ./cmd/millrace

.PHONY: setup-test
setup-test: ## install what the tests need (redis-server), when root and it is missing
	@scripts/setup-test.sh

.PHONY: test
test: setup-test ## run the tests
	go test -timeout 10m $(TESTFLAGS) ./...

.PHONY: race
race: setup-test ## run the tests under the race detector, without the models, which have one goroutine
	go test -race -short -skip '^TestModel' -timeout 15m $(TESTFLAGS) ./...

.PHONY: e2e
e2e: setup-test ## run the whole-system tests, with real processes
	go test -tags e2e -timeout 15m $(TESTFLAGS) ./internal/e2e/...

.PHONY: fuzz
fuzz: ## run every fuzz target for FUZZTIME (10) seconds
	scripts/fuzz.sh

.PHONY: bench
bench: setup-test ## measure against bare streams, then run the benchmarks
	cd bench && go run .
	go test -run '^$$' -bench . -benchmem -timeout 30m $(TESTFLAGS) ./...

.PHONY: lint
lint: ## check the code; the first run builds the linter, which takes minutes
	$(TOOL) golangci-lint run ./...

.PHONY: fmt
fmt: ## format the code
	$(TOOL) golangci-lint fmt ./...

.PHONY: proto
proto: ## generate the Go code of proto/
	$(TOOL) buf generate

.PHONY: proto-check
proto-check: ## check that generated code is fresh, lint proto/, find breaking changes
	scripts/proto-check.sh

.PHONY: vuln
vuln: ## look for known vulnerabilities in dependencies (needs the network)
	$(TOOL) govulncheck ./...

.PHONY: dev
dev: ## run everything in one process with a Redis of its own
	go run ./cmd/millrace dev

.PHONY: up
up: ## start the system in containers
	$(COMPOSE) up --build --detach

.PHONY: down
down: ## stop the containers; data is kept
	$(COMPOSE) down

.PHONY: compose-test
compose-test: ## test the system in containers; skipped where there is no Docker engine
	scripts/compose-test.sh

.PHONY: ci
ci: ## everything that CI runs, in its order
	bash .ci/run
