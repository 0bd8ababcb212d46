#!/usr/bin/env bash
# Formats all C++ and Python. With --check, changes nothing and fails if something would change.
source "$(dirname "$0")/environment.sh"

mapfile -t cpp < <(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')
if [ "${1:-}" = --check ]; then
  "$(tool clang-format)" --dry-run --Werror "${cpp[@]}"
  "$(tool ruff)" format --check .
  "$(tool ruff)" check .
else
  "$(tool clang-format)" -i "${cpp[@]}"
  "$(tool ruff)" format .
  "$(tool ruff)" check --fix .
fi
