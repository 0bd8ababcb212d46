#!/usr/bin/env bash
# Formats all C++, Python and Markdown, but tables that programs write. With --check, changes nothing and
# fails if something would change.
source "$(dirname "$0")/environment.sh"

mapfile -t cpp < <(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')
mapfile -t markdown < <(git ls-files '*.md' ':!docs/benchmarks')
markdown=("$(tool mdformat)" --wrap 110 --compact-tables "${markdown[@]}")
if [ "${1:-}" = --check ]; then
  "$(tool clang-format)" --dry-run --Werror "${cpp[@]}"
  "$(tool ruff)" format --check .
  "$(tool ruff)" check .
  "${markdown[@]}" --check
else
  "$(tool clang-format)" -i "${cpp[@]}"
  "$(tool ruff)" format .
  "$(tool ruff)" check --fix .
  "${markdown[@]}"
fi
