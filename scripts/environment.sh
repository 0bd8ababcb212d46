# Sourced by the other scripts: which Python, CMake and Ninja they use.
#
# QKV_PYTHON=/path/to/python  use this interpreter with its torch, and install nothing (for
#                             machines without a network). Otherwise .venv, made by setup.sh.

set -euo pipefail
CALLER=$PWD # where paths among arguments begin
cd "$(dirname "${BASH_SOURCE[0]}")/.."

in_caller() { if [[ $1 = /* ]]; then echo "$1"; else echo "$CALLER/$1"; fi; }

if [ -n "${QKV_PYTHON:-}" ]; then
  if [[ $QKV_PYTHON = */* ]]; then
    QKV_PYTHON=$(in_caller "$QKV_PYTHON")
  else
    QKV_PYTHON=$(command -v "$QKV_PYTHON") || { echo "error: there is no such QKV_PYTHON" >&2; exit 1; }
  fi
  export QKV_PYTHON
fi
PYTHON=${QKV_PYTHON:-$PWD/.venv/bin/python}
# Or each of many programs compiles the Python of torch anew, which takes it up to ten seconds.
unset PYTHONDONTWRITEBYTECODE

# python_in_caller PROGRAM ARGUMENT..   ends the script with it
python_in_caller() {
  local root=$PWD
  cd "$CALLER"
  PYTHONPATH=$root exec "$PYTHON" "$root/$1" "${@:2}"
}

# The path of a program, nothing if there is none. Those that come with that Python come first.
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
