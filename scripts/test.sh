#!/usr/bin/env bash
# Sets up, builds, and runs all C++ and Python tests.
source "$(dirname "$0")/environment.sh"

scripts/setup.sh
say "Building"
scripts/build.sh tests examples

log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0

# Programs that run side by side have fewer cores than threads: those that wait must not spin.
export OMP_WAIT_POLICY=passive

say "C++ tests"
"$(tool ctest)" --test-dir build --parallel 2 --verbose >"$log" 2>&1 || failed=1
if [ $failed = 1 ]; then cat "$log"; else grep -E 'Passed|tests passed' "$log"; fi
cpp=$(awk '/\[  PASSED  \]/ {n += $5} END {print n + 0}' "$log")
programs=$(grep -E 'tests passed' "$log" || echo 'ctest did not finish')

say "Python tests"
# Most are small: two processes with a thread each are faster than one with two. (What is about
# threads is tested in C++.)
OMP_NUM_THREADS=1 "$PYTHON" -m pytest tests/python --numprocesses 2 --dist worksteal |
  tee "$log" || failed=1
python=$(tail -n 1 "$log")

say "C++:    $cpp tests passed; of the programs that run them, $programs"
say "Python: $python"
exit $failed
