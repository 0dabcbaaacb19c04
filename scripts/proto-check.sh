#!/usr/bin/env bash
# Checks proto/: that the committed Go code is what the .proto files give, that they pass buf lint, and that nothing
# breaks what was there before. Changes no file of the tree.
set -euo pipefail
cd "$(dirname "$0")/.."

buf=(go tool -modfile=internal/tools/go.mod buf)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
failed=0

echo "proto-check: generated code"
"${buf[@]}" generate -o "$tmp/new"
generated() { (cd "$1" && find proto -name '*.pb.go' -o -name '*.connect.go' | sort); }
if ! diff <(generated .) <(generated "$tmp/new"); then
  echo "proto-check: other files are generated than are there; run: make proto" >&2
  failed=1
fi
while IFS= read -r file; do
  if [ -f "$file" ] && ! diff -u "$file" "$tmp/new/$file" >"$tmp/diff"; then
    head -n 20 "$tmp/diff"
    echo "proto-check: $file is not what its .proto gives; run: make proto" >&2
    failed=1
  fi
done < <(generated "$tmp/new")

echo "proto-check: lint"
"${buf[@]}" lint || failed=1

# What to compare with: the last release; before the first one, where this branch left main. On main itself that is
# the last commit, so that changes are found before they are committed.
base() {
  git rev-parse --git-dir >/dev/null 2>&1 || return 1
  git describe --tags --abbrev=0 --match 'v[0-9]*' 2>/dev/null && return
  local main
  for main in origin/main main; do
    git merge-base HEAD "$main" 2>/dev/null && return
  done
  git rev-parse --verify -q HEAD
}
if ! base=$(base) || [ -z "$(git ls-tree -r --name-only "$base" -- proto 2>/dev/null | grep '\.proto$')" ]; then
  echo "proto-check: breaking changes: skipped, there is no release, main or commit with .proto files to compare with"
  exit $failed
fi
echo "proto-check: breaking changes since $(git describe --tags --always "$base")"
mkdir "$tmp/old"
git archive "$base" proto | tar -x -C "$tmp/old"
cp buf.yaml "$tmp/old/" # the rules of today, also for the files of then
if ! "${buf[@]}" breaking --against "$tmp/old"; then
  echo "proto-check: these changes break programs or data of the version before; reserve the numbers and names of" \
    "removed fields, and add new ones beside old ones" >&2
  failed=1
fi
exit $failed
