#!/usr/bin/env bash
# Everything that only a GPU can show: builds with this machine's own Python and torch, without a
# network, and runs the tests on CUDA, compute-sanitizer and the benchmark. What says most in the
# least time comes first.
#
#   scripts/gpu_check.sh [--output DIR]     results: DIR/gpu_check.log, cuda.json, cuda.md; of a few points first: DIR/quick
#
# Without a GPU it goes as far as it can: it builds, and says what was not run.
source "$(dirname "$0")/environment.sh"

output=build/gpu_check
case ${1:-} in
  --output) output=$(in_caller "${2:?--output takes a directory}") ;;
  "") ;;
  *) fail "usage: scripts/gpu_check.sh [--output DIR]" ;;
esac
mkdir -p "$output"
exec > >(tee "$output/gpu_check.log") 2>&1

if [ -z "${QKV_PYTHON:-}" ] && [ ! -x .venv/bin/python ]; then
  QKV_PYTHON=$(command -v python3)
  export QKV_PYTHON
  PYTHON=$QKV_PYTHON
fi
"$PYTHON" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
say "Building"
scripts/build.sh
export PYTHONPATH=$PWD OMP_NUM_THREADS=2
"$PYTHON" -c 'import qkv; print("library loaded:", qkv.__version__)'
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  say "No GPU here: the tests on CUDA, compute-sanitizer and the benchmark were not run"
  exit 0
fi

failed=0
"$PYTHON" -c 'import pytest' || fail "the tests need pytest: $PYTHON -m pip install pytest hypothesis"
say "Tests of the GPU itself, $("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name())')"
"$PYTHON" -m pytest -q --device cuda tests/python/test_cuda.py || failed=1

say "Benchmark, a few points"
"$PYTHON" benchmarks/cuda.py --quick --output "$output/quick" || failed=1

say "All tests"
parallel=()
if "$PYTHON" -c 'import xdist' 2>/dev/null; then parallel=(--numprocesses 8); fi
"$PYTHON" -m pytest -q --device cuda "${parallel[@]}" tests/python --ignore tests/python/test_cuda.py || failed=1

sanitizer=$(command -v compute-sanitizer || true)
if [ -n "$sanitizer" ]; then
  # At once, without torch's cache, whose blocks are larger than the tensors in them, and of our kernels
  # only; but initcheck has to see what torch's kernels write. Racecheck takes half a minute a case.
  declare -A cases=([memcheck]=sanitize [synccheck]=sanitize [initcheck]=sanitize [racecheck]="sanitize and 40")
  declare -A running
  for check in "${!cases[@]}"; do
    ours=(--kernel-name kns=3qkv7kernels)
    [ $check != initcheck ] || ours=()
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 300 \
      "$sanitizer" --tool $check "${ours[@]}" --error-exitcode 9 \
      "$PYTHON" -m pytest -q --device cuda tests/python/test_cuda.py -k "${cases[$check]}" \
      >"$output/$check.log" 2>&1 &
    running[$check]=$!
  done
  for check in "${!running[@]}"; do
    wait "${running[$check]}" || failed=1
    say "compute-sanitizer: $check"
    tail -n 20 "$output/$check.log"
  done
else
  say "compute-sanitizer: there is none here"
fi

say "Benchmark"
"$PYTHON" benchmarks/cuda.py --output "$output" || failed=1
exit $failed
