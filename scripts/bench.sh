#!/usr/bin/env bash
# Speed beside PyTorch and beside the machine's limits, measured in one run, in turns.
#
#   scripts/bench.sh [cpu] [--quick] [--filter WORDS] [--turns N] [--output DIR] [--read JSON]
#   scripts/bench.sh cuda [--quick] [--filter WORDS] [--rounds N] [--output DIR]
#
# Nothing else may run meanwhile. The full grid of the CPU takes about 15 minutes, --quick under 3.
source "$(dirname "$0")/environment.sh"

scripts/setup.sh
say "Building"
if [ "${1:-}" = cuda ]; then
  scripts/build.sh
  python_in_caller benchmarks/cuda.py "${@:2}"
fi
scripts/build.sh benchmarks
python_in_caller benchmarks/run.py "$@"
