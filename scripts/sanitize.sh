#!/usr/bin/env bash
# Errors that show in no result, by clang's sanitizers. LibTorch itself is not instrumented.
#
#   scripts/sanitize.sh [address] [thread] [fuzz]     all three by default
#
# address: the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer, those of a GPU's kernels
#          on the emulated device as well. (The kernels' tests allocate what the kernels ask for to
#          the byte, so that an overrun shows.)
# thread:  the C++ tests that are about threads, and the kernels', under ThreadSanitizer.
# fuzz:    random calls for QKV_FUZZ_SECONDS=300, compared with the definition, under the first two.
source "$(dirname "$0")/environment.sh"

phases=("$@")
[ $# -gt 0 ] || phases=(address thread fuzz)

scripts/setup.sh
missing=""
command -v clang++ >/dev/null || missing+=" clang"
ls /usr/lib/llvm-*/lib/libomp.so >/dev/null 2>&1 || missing+=" libomp-dev"
if [ -n "$missing" ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
  else
    fail "missing; on Debian or Ubuntu install them with:  sudo apt-get install$missing"
  fi
fi
llvm=$(dirname "$(dirname "$(readlink -f "$(command -v clang++)")")")
export PATH="$PATH:$llvm/bin" # llvm-symbolizer

# build FOLDER SANITIZER TARGET..
build() {
  local folder=$1 sanitizer=$2 torch_dir
  shift 2
  say "Building $* with the $sanitizer sanitizer"
  torch_dir=$("$PYTHON" -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
  "$(tool cmake)" -S . -B "$folder" -G Ninja "-DCMAKE_MAKE_PROGRAM=$(tool ninja)" \
    "-DCMAKE_CXX_COMPILER=$(command -v clang++)" -DCMAKE_BUILD_TYPE=Debug "-DQKV_SANITIZE=$sanitizer" \
    -DCMAKE_UNITY_BUILD=OFF -DQKV_BUILD_TESTS=ON "-DQKV_TORCH_DIR=$torch_dir" >/dev/null
  "$(tool cmake)" --build "$folder" --parallel "${QKV_JOBS:-2}" --target "$@"
}

export UBSAN_OPTIONS=print_stacktrace=1
export KMP_BLOCKTIME=0 # libomp's threads would spin while they wait
# Leaks: LibTorch keeps its registries, and libomp its threads, to the end and frees neither.
export ASAN_OPTIONS=detect_leaks=0

for phase in "${phases[@]}"; do
  case $phase in
    address)
      build build-asan address test_qkv test_kernels test_cuda_emulation
      say "Tests under AddressSanitizer and UndefinedBehaviorSanitizer"
      build-asan/tests/test_kernels --gtest_brief=1
      halves=() # of the emulated kernels' tests, which have one thread each
      for half in 0 1; do
        GTEST_TOTAL_SHARDS=2 GTEST_SHARD_INDEX=$half \
          build-asan/tests/test_cuda_emulation --gtest_brief=1 &
        halves+=($!)
      done
      for process in "${halves[@]}"; do wait "$process"; done
      build-asan/tests/test_qkv --gtest_brief=1
      ;;
    thread)
      build build-tsan thread test_qkv test_kernels
      say "Tests under ThreadSanitizer"
      # Archer tells it what OpenMP's barriers order; races between LibTorch and itself, which it
      # cannot see whole, are not for us to report.
      export OMP_TOOL_LIBRARIES=$llvm/lib/libarcher.so
      export TSAN_OPTIONS=ignore_noninstrumented_modules=1
      build-tsan/tests/test_kernels --gtest_brief=1
      build-tsan/tests/test_qkv --gtest_brief=1 --gtest_filter='Invariance.*:Threads*'
      ;;
    fuzz)
      build build-asan address fuzz_attention
      say "Fuzzing for ${QKV_FUZZ_SECONDS:-300} seconds"
      mkdir -p build-asan/corpus
      build-asan/tests/fuzz_attention build-asan/corpus -max_total_time="${QKV_FUZZ_SECONDS:-300}" \
        -max_len=256 -len_control=0 -print_final_stats=1 -artifact_prefix=build-asan/
      ;;
    *) fail "scripts/sanitize.sh: what is '$phase'? Known: address, thread, fuzz" ;;
  esac
done
say "Clean: ${phases[*]}"
