#!/usr/bin/env bash
# Cross-compiles the kernels for 64-bit ARM and runs their tests in an emulator (needs root on Debian
# for g++-aarch64-linux-gnu, qemu-user and googletest, or those packages installed).
source "$(dirname "$0")/environment.sh"

missing=()
command -v aarch64-linux-gnu-g++ >/dev/null || missing+=(g++-aarch64-linux-gnu)
command -v qemu-aarch64 >/dev/null || missing+=(qemu-user)
[ -e /usr/src/googletest/googletest/src/gtest-all.cc ] || missing+=(googletest)
if [ ${#missing[@]} -gt 0 ]; then
  [ "$(id -u)" = 0 ] || fail "these packages are missing: ${missing[*]}"
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

build=build-neon
rm -rf $build  # or objects of sources that are gone would be linked
mkdir $build
gtest=/usr/src/googletest/googletest
compile() { aarch64-linux-gnu-g++ -std=c++20 -O2 -DQKV_ARM -Icsrc -I$gtest -I$gtest/include "$@"; }
say "Building for aarch64"
pids=()
for source in csrc/kernels/cpu/{isa,isa_neon,isa_generic}.cpp tests/cpp/test_kernels.cpp \
  $gtest/src/gtest-all.cc $gtest/src/gtest_main.cc; do
  compile -c "$source" -o "$build/$(basename "$source").o" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
compile $build/*.o -o $build/test_kernels -pthread
say "Running in qemu-aarch64"
qemu-aarch64 -L /usr/aarch64-linux-gnu $build/test_kernels --gtest_brief=1
