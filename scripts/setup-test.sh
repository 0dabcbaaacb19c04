#!/usr/bin/env bash
# Makes sure that the tests find a redis-server. Does nothing, and uses no network, when there is one.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -n "${MILLRACE_TEST_REDIS_SERVER:-}" ]; then exit 0; fi
if command -v redis-server >/dev/null || command -v valkey-server >/dev/null; then exit 0; fi

if scripts/install.sh redis-server; then exit 0; fi
if [ -n "${CI:-}" ]; then
  echo "setup-test: no redis-server, and CI is set: the tests that need it would fail" >&2
  exit 1
fi
echo "setup-test: no redis-server on PATH: the tests that need it are skipped" >&2
