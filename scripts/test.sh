#!/usr/bin/env bash
# Sets up, builds, and runs all C++ and Python tests.
source "$(dirname "$0")/environment.sh"

scripts/setup.sh
say "Building"
scripts/build.sh tests examples

log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0

say "C++ tests"
ctest=$(tool ctest)
"$ctest" --test-dir build --output-on-failure --progress >"$log" 2>&1 || failed=1
if [ $failed = 1 ]; then cat "$log"; fi
cpp=$(grep -E 'tests passed' "$log" || echo 'no summary: ctest did not finish')

say "Python tests"
"$PYTHON" -m pytest tests/python | tee "$log" || failed=1
python=$(tail -n 1 "$log")

say "C++:    $cpp"
say "Python: $python"
exit $failed
