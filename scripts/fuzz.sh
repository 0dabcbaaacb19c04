#!/usr/bin/env bash
# Runs every fuzz target of the module for a while: 10 s each, or less when there are so many that
# FUZZ_BUDGET (seconds, default none) would be passed.
#
#   FUZZTIME=60 scripts/fuzz.sh            every target
#   FUZZTIME=60 scripts/fuzz.sh FuzzFrame  those whose name matches
set -euo pipefail
cd "$(dirname "$0")/.."

pattern=${1:-^Fuzz}
seconds=${FUZZTIME:-10}
seconds=${seconds%s}

targets=()
while IFS= read -r dir; do
  while IFS= read -r name; do
    targets+=("$dir $name")
  done < <(go test -list "$pattern" "./$dir" | grep '^Fuzz' || true)
done < <(git ls-files --cached --others --exclude-standard '*_test.go' | xargs -r grep -lE '^func Fuzz' | xargs -r -n1 dirname | sort -u)

if [ ${#targets[@]} -eq 0 ]; then
  echo "fuzz: no target matches $pattern"
  exit 0
fi
if [ -n "${FUZZ_BUDGET:-}" ] && [ $((seconds * ${#targets[@]})) -gt "$FUZZ_BUDGET" ]; then
  seconds=$((FUZZ_BUDGET / ${#targets[@]}))
  if [ "$seconds" -lt 1 ]; then seconds=1; fi
fi
echo "fuzz: ${#targets[@]} targets, ${seconds}s each"

failed=0
for target in "${targets[@]}"; do
  read -r dir name <<<"$target"
  echo "--- $dir $name"
  if ! go test -run '^$' -fuzz "^$name\$" -fuzztime "${seconds}s" "./$dir"; then
    echo "fuzz: $name failed; the input is in $dir/testdata/fuzz/$name, to be committed with the fix" >&2
    failed=1
  fi
done
exit $failed
