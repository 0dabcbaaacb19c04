#!/bin/bash
# Runs the compose test: builds the images, starts docker-compose.yml under a name of its own and works on it for a few
# minutes (internal/e2e/compose_test.go says what with). It cleans up after itself; where no Docker engine answers it
# says so and succeeds. Arguments go to go test.
set -euo pipefail
cd "$(dirname "$0")/.."
# -count=1: the result depends on more than the Go files, so a cached one says nothing.
exec go test -tags compose -run '^TestCompose$' -count=1 -v -timeout 15m "$@" ./internal/e2e/
