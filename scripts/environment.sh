# Sourced by the other scripts: which Python, CMake and Ninja they use.
#
# QKV_PYTHON=/path/to/python  use this interpreter with its torch, and install nothing (for
#                             machines without a network). Otherwise .venv, made by setup.sh.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${QKV_PYTHON:-$PWD/.venv/bin/python}

# Prefer the tools that come with that Python.
tool() {
  local beside
  beside=$(dirname "$PYTHON")/$1
  if [ -x "$beside" ]; then echo "$beside"; else command -v "$1" || true; fi
}

say() { printf '\033[1m== %s\033[0m\n' "$*"; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}
