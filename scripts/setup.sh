#!/usr/bin/env bash
# Installs all that building, testing and the demo need, on a fresh Debian or Ubuntu with Python
# 3.10 to 3.13: system packages by apt if run as root (others are told which), Python packages into
# .venv. Quick when there is nothing left to do.
source "$(dirname "$0")/environment.sh"

if [ -n "${QKV_PYTHON:-}" ]; then
  "$PYTHON" -c 'import torch' || fail "QKV_PYTHON=$QKV_PYTHON cannot import torch"
  exit 0
fi

# The first Python of a supported version.
find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11 python3.10; do
    if "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
}

has_header() { echo "#include <$1>" | c++ -E -x c++ - >/dev/null 2>&1; }

# The apt packages that are missing. What counts is whether the thing is there, not who put it.
missing_packages() {
  local python
  command -v c++ >/dev/null || echo g++
  has_header gtest/gtest.h || echo libgtest-dev           # tests
  has_header nlohmann/json.hpp || echo nlohmann-json3-dev # tests, examples
  has_header CLI/CLI.hpp || echo libcli11-dev             # examples
  has_header benchmark/benchmark.h || echo libbenchmark-dev
  python=$(find_python)
  if [ -z "$python" ]; then
    echo python3 python3-venv python3-dev
  else
    "$python" -c 'import ensurepip' 2>/dev/null || echo python3-venv
    # torch.compile compiles against Python's headers.
    [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
      echo python3-dev
  fi
}

missing=$(missing_packages | xargs)
if [ -n "$missing" ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "apt-get install $missing"
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
  else
    fail "these packages are missing: $missing
       On Debian or Ubuntu, install them with:  sudo apt-get install $missing"
  fi
fi

python=$(find_python)
[ -n "$python" ] || fail "no Python 3.10 to 3.13 found"

# requirements.txt as it was when .venv was last brought up to date.
stamp=.venv/requirements-installed.txt
if ! cmp -s requirements.txt "$stamp"; then
  say "Python packages into .venv (about 3 GB to download, with torch's libraries for GPUs)"
  # Anew too where a first time was interrupted.
  .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt
  cp requirements.txt "$stamp"
fi
