#!/usr/bin/env bash
# Configures and builds into build/: the library, and what is named of: tests, examples, benchmarks.
#
#   scripts/build.sh [tests] [examples] [benchmarks]
#
# Afterwards `.venv/bin/python -c "import qkv"` works, from any directory.
source "$(dirname "$0")/environment.sh"

targets=(qkv)
options=()
for what in "$@"; do
  case $what in
    tests) options+=(-DQKV_BUILD_TESTS=ON) targets+=(qkv_tests) ;;
    examples) options+=(-DQKV_BUILD_EXAMPLES=ON) targets+=(qkv_examples) ;;
    benchmarks) options+=(-DQKV_BUILD_BENCHMARKS=ON) targets+=(qkv_benchmarks) ;;
    *) fail "scripts/build.sh: what is '$what'? Known: tests, examples, benchmarks" ;;
  esac
done

[ -x "$PYTHON" ] || fail "$PYTHON does not exist; run scripts/setup.sh first"
cmake=$(tool cmake)
ninja=$(tool ninja)
[ -n "$cmake" ] || fail "cmake is missing; scripts/setup.sh installs it"

torch_dir=$("$PYTHON" -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
mkdir -p build
if [ -n "$ninja" ] && [ ! -e build/CMakeCache.txt ]; then
  options+=(-G Ninja "-DCMAKE_MAKE_PROGRAM=$ninja")
fi
"$cmake" -S . -B build "-DQKV_TORCH_DIR=$torch_dir" "${options[@]}" >build/configure.log 2>&1 ||
  { cat build/configure.log; exit 1; }
grep -- '-- qkv' build/configure.log || true
"$cmake" --build build --parallel "${QKV_JOBS:-$(nproc)}" --target "${targets[@]}"

# Make `import qkv` find this tree from .venv (nothing is installed into another Python).
if [ -z "${QKV_PYTHON:-}" ]; then
  echo "$PWD" >"$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/qkv.pth"
fi
