#!/bin/sh
# Programs from Debian that the tests start: installed where we are root, named where we are not.
set -eu
missing=
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need redis-server redis-server
need prometheus prometheus
need promtool prometheus
need node nodejs
need npm npm
missing=$(printf '%s\n' $missing | sort -u | tr '\n' ' ')
[ -n "$(printf %s "$missing" | tr -d ' ')" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing from Debian: $missing"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  # shellcheck disable=SC2086 -- a list of names
  apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
  echo "the tests need programs that are missing: $missing" >&2
  echo "install them as root: apt-get install --no-install-recommends $missing" >&2
  exit 1
fi
