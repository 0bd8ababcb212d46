#!/usr/bin/env bash
# The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer. (They allocate what the
# kernels ask for to the byte, so that an overrun shows.)
source "$(dirname "$0")/environment.sh"

build=build-sanitize
mkdir -p $build
flags=(-std=c++20 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Icsrc)
declare -A isa_flags=(
  [generic]=""
  [avx2]="-mavx2 -mfma -mf16c"
  [avx512]="-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma"
)
case $(uname -m) in
  x86_64) isas=(generic avx2 avx512) flags+=(-DQKV_X86) ;;
  aarch64) isas=(generic neon) flags+=(-DQKV_ARM) ;;
  *) isas=(generic) ;;
esac

say "Building with sanitizers"
c++ "${flags[@]}" -c csrc/kernels/cpu/isa.cpp -o $build/isa.o
c++ "${flags[@]}" -c tests/cpp/test_kernels.cpp -o $build/test_kernels.o
for isa in "${isas[@]}"; do
  # shellcheck disable=SC2086
  c++ "${flags[@]}" ${isa_flags[$isa]:-} -c "csrc/kernels/cpu/isa_$isa.cpp" -o "$build/isa_$isa.o"
done
c++ "${flags[@]}" $build/*.o -lgtest -lgtest_main -pthread -o $build/test_kernels
say "Running"
$build/test_kernels --gtest_brief=1
