#!/bin/bash
# Stand-ins for the base images of Dockerfile and docker-compose.yml, for machines that cannot pull.
#
# Docker has no registry to ask on an isolated build machine. This script makes images of the same names from
# Debian's packages (debootstrap), the Go distribution of this machine and the modules in its module cache, so that
# the unchanged Dockerfile and docker-compose.yml build and run there. An image that is there already and was not made
# by this script is never touched: where images can be pulled, pull them and this script does nothing.
#
#   scripts/images.sh           make what is missing or outdated
#   scripts/images.sh --pull    the same, but try to pull each of them first
#   scripts/images.sh --list    print the names
#   scripts/images.sh --remove  remove the stand-ins, and nothing else
#
# The unpacked trees are kept in $MILLRACE_IMAGE_CACHE (default: ~/.cache/millrace/images), because making them takes
# a minute and importing them seconds. MILLRACE_DEBIAN_MIRROR names another package mirror than debootstrap's own.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly debian=debian:bookworm-slim
readonly golang=golang:1.26-bookworm
readonly python=python:3.11-slim-bookworm
readonly redis=redis:7.0-bookworm
readonly label=io.millrace.stand-in
readonly recipe=$(sha256sum scripts/images.sh | cut -c 1-16)
readonly store=${MILLRACE_IMAGE_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/millrace/images}
readonly cache=$store/$recipe # a changed script starts with empty hands: a tree never outlives what made it

say() { echo "images: $*" >&2; }
die() { say "$*"; exit 1; }

# used prints the base images that the two files really name, so that a changed FROM cannot go unnoticed.
used() {
  {
    awk 'toupper($1) == "FROM" { if (!($2 in stage)) print $2; if (toupper($3) == "AS") stage[$4] }' Dockerfile
    awk '$1 == "image:" && $2 !~ /^millrace/ { print $2 }' docker-compose.yml
  } | sort -u
}

# go_key identifies what the Go stand-in was made from, beside this script.
go_key() { { echo "$recipe" && cat go.mod go.sum && go version; } | sha256sum | cut -c 1-16; }

# current NAME KEY: true when there is nothing to do for NAME. KEY says what a stand-in is made from; it is its label.
current() {
  local have
  have=$(docker image inspect --format "{{index .Config.Labels \"$label\"}}" "$1" 2>/dev/null) || return 1
  if [ -z "$have" ] || [ "$have" = '<no value>' ]; then
    say "$1 is there and not ours: left alone"
    return 0
  fi
  [ "$have" = "$2" ]
}

# pulled NAME: true when --pull was given and the real image could be had.
pulled() { [ "$pull" = yes ] && timeout 300 docker pull --quiet "$1" >/dev/null 2>&1; }

# tree NAME COMMAND...: makes the directory $cache/NAME once; COMMAND gets the directory to fill.
tree() {
  local name=$1
  shift
  [ -d "$cache/$name" ] && return 0
  rm -rf "$cache/$name.partial"
  if ! "$@" "$cache/$name.partial" >"$cache/$name.log" 2>&1; then
    tail -20 "$cache/$name.log" >&2
    die "cannot make the tree for $name; the whole output is in $cache/$name.log"
  fi
  mv "$cache/$name.partial" "$cache/$name"
}

make_debian() {
  if ! command -v debootstrap >/dev/null; then
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends debootstrap
  fi
  debootstrap --variant=minbase --include=ca-certificates bookworm "$1" ${MILLRACE_DEBIAN_MIRROR:+"$MILLRACE_DEBIAN_MIRROR"}
  # Packages that start a service when installed must not do so on the machine that builds the image.
  printf '#!/bin/sh\nexit 101\n' >"$1/usr/sbin/policy-rc.d"
  chmod 755 "$1/usr/sbin/policy-rc.d"
  slim "$1"
}

# slim removes what a container never reads; the images are copied often enough.
slim() {
  rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/* "$1"/usr/share/{doc,man,info,locale}/* "$1"/var/log/*
}

# with_packages PACKAGES DIRECTORY: the base tree plus packages. The word list comes first because tree adds the directory.
with_packages() {
  cp -a "$cache/debian" "$2"
  rm -f "$2/etc/resolv.conf"
  cp /etc/resolv.conf "$2/etc/resolv.conf"
  chroot "$2" apt-get update
  # shellcheck disable=SC2086 # a list of words on purpose
  DEBIAN_FRONTEND=noninteractive chroot "$2" apt-get install -y --no-install-recommends $1
  slim "$2"
}

make_redis() {
  with_packages redis-server "$1"
  install -d -m 0755 "$1/data"
  chroot "$1" chown redis:redis /data
}

# modules fills $cache/modules with what go.mod names, from this machine's module cache first.
make_modules() {
  local here
  here=$(go env GOMODCACHE)/cache/download
  GOFLAGS="-mod=mod -modcacherw" GOMODCACHE="$1" GOPROXY="file://$here,$(go env GOPROXY)" GONOSUMDB='*' go mod download -x
}

# import NAME KEY CHANGES... reads a tar of the root file system from standard input.
import() {
  local name=$1 id=$2 changes=() old
  shift 2
  old=$(docker image inspect --format '{{.Id}}' "$name" 2>/dev/null || true)
  for change in "$@"; do changes+=(--change "$change"); done
  docker import "${changes[@]}" --change "LABEL $label=$id" - "$name" >/dev/null
  if [ -n "$old" ]; then # the stand-in that this one replaces; an image built on it keeps it alive
    docker image rm "$old" >/dev/null 2>&1 || true
  fi
  say "$name made ($(docker image inspect --format '{{.Size}}' "$name" | awk '{printf "%.0f MB", $1/1e6}'))"
}

stand_in_debian() {
  if current "$debian" "$recipe" || pulled "$debian"; then return; fi
  tree debian make_debian
  tar -C "$cache/debian" -c . | import "$debian" "$recipe" 'CMD ["bash"]'
}

stand_in_python() {
  if current "$python" "$recipe" || pulled "$python"; then return; fi
  tree debian make_debian
  tree python with_packages "python3 netbase tzdata"
  tar -C "$cache/python" -c . | import "$python" "$recipe" 'ENV LANG=C.UTF-8' 'CMD ["python3"]'
}

stand_in_redis() {
  if current "$redis" "$recipe" || pulled "$redis"; then return; fi
  tree debian make_debian
  tree redis make_redis
  tar -C "$cache/redis" -c . | import "$redis" "$recipe" 'VOLUME /data' 'WORKDIR /data' 'EXPOSE 6379' 'CMD ["redis-server"]'
}

stand_in_golang() {
  local id root modules
  id=$(go_key)
  if current "$golang" "$id" || pulled "$golang"; then return; fi
  command -v go >/dev/null || die "go is not on PATH: the stand-in for $golang is made from this machine's Go"
  tree debian make_debian
  modules=modules-$id
  tree "$modules" make_modules
  find "$cache" -maxdepth 1 -name 'modules-*' ! -name "$modules" ! -name "$modules.log" -exec rm -rf {} +
  root=$(go env GOROOT)
  # Tests and their data are half of Go's source; nothing that a build reads.
  tar -c --exclude='*_test.go' --exclude=testdata --exclude="${root##*/}/test" --exclude="${root##*/}/doc" \
      --exclude="${root##*/}/api" --exclude="${root##*/}/pkg/mod" \
      --transform="flags=rSH;s,^${root##*/}\(/\|\$\),usr/local/go\1," \
      --transform="flags=rSH;s,^$modules\(/\|\$\),go/pkg/mod\1," \
      -C "$cache/debian" . -C "${root%/*}" "${root##*/}" -C "$cache" "$modules" |
    import "$golang" "$id" 'ENV GOPATH=/go' 'ENV GOTOOLCHAIN=local' 'ENV GOPROXY=off' 'ENV GOSUMDB=off' \
      'ENV PATH=/go/bin:/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
      'WORKDIR /go' 'CMD ["bash"]'
}

remove() {
  local name
  for name in "$debian" "$golang" "$python" "$redis"; do
    if [ -n "$(docker image ls --quiet --filter "label=$label" "$name")" ]; then
      docker image rm --no-prune "$name" >/dev/null && say "$name removed"
    fi
  done
}

main() {
  pull=no
  case ${1:-} in
    '') ;;
    --pull) pull=yes ;;
    --list) printf '%s\n' "$debian" "$golang" "$python" "$redis" && return ;;
    --remove) remove && return ;;
    *) die "unknown argument $1; see the head of scripts/images.sh" ;;
  esac
  local name
  for name in $(used); do
    case $name in
      "$debian" | "$golang" | "$python" | "$redis") ;;
      *) die "Dockerfile or docker-compose.yml names $name, and there is no stand-in for it: add one here" ;;
    esac
  done
  docker version >/dev/null || die "no Docker engine answers; start one, or pull nothing and skip the compose test"
  mkdir -p "$cache"
  exec 8>"$store/lock" # two runs at once would fill the same trees
  flock 8
  find "$store" -mindepth 1 -maxdepth 1 -type d ! -path "$cache" -exec rm -rf {} +
  stand_in_debian
  stand_in_python
  stand_in_redis
  stand_in_golang
}

main "$@"
