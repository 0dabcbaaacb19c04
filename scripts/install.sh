#!/usr/bin/env bash
# Installs the Debian packages given that are not installed yet, without starting their services.
#
#   scripts/install.sh redis-server python3-redis
#
# Uses the network only when something is missing. Exits 1, with a line that says what to do, when it cannot install:
# not root, or no apt.
set -euo pipefail

missing=()
for package in "$@"; do
  if ! dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$'; then
    missing+=("$package")
  fi
done
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "install: missing: ${missing[*]}. On Debian or Ubuntu: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi

# A policy-rc.d that says no keeps the packages' servers from being started; one of the machine's own stays.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  printf '#!/bin/sh\nexit 101\n' >$policy
  chmod +x $policy
  trap 'rm -f $policy' EXIT
fi
echo "install: ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >&2
apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
