#include "kernels/cpu/isa.h"

#include <string.h>

#include "kernels/cpu/has_amx.h"

namespace qkv::kernels {

namespace {

struct Isa {
  const CpuKernelTable* table;
  bool (*runs_here)();
  bool (*is_slow_here)() = [] { return false; };  // then it runs only if asked for by name
  const CpuKernelTable* of_half_vectors = nullptr;
};

#if defined(QKV_X86)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vnni");
}

/// Zen 4, the one processor of its family with AVX-512, does operations of 512 bits as two of 256.
bool halves_long_vectors() { return has_avx512() && __builtin_cpu_is("amdfam19h"); }
#else
bool halves_long_vectors() { return false; }
#endif

// Best first.
const Isa kIsas[] = {
#if defined(QKV_X86)
    {&avx512_amx_fp16::table, [] { return has_avx512_bf16() && has_amx() && has_amx_fp16(); }},
    {&avx512_amx::table, [] { return has_avx512_bf16() && has_amx(); }},
    // Products of bfloat16 are twice as fast as float32's on AMD's processors, but half as fast on
    // Intel's (measured on Emerald Rapids), which have AMX for them.
    {&avx512_bf16::table, has_avx512_bf16, [] { return !__builtin_cpu_is("amd"); }, &avx2::table},
    {&avx512::table, has_avx512, [] { return false; }, &avx2::table},
    {&avx2::table,
     [] {
       // And f16c, which every processor with avx2 has, and clang 14 no name for.
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
     }},
#elif defined(QKV_ARM)
    {&neon::table, [] { return true; }},  // every 64-bit ARM has it
#endif
    {&generic::table, [] { return true; }},
};

}  // namespace

ChosenKernels choose_cpu_kernels(const char* name) {
  for (const Isa& isa : kIsas) {
    if (name == nullptr ? isa.is_slow_here() : strcmp(name, isa.table->isa) != 0) continue;
    if (isa.runs_here()) {
      const bool has_choice = name == nullptr && halves_long_vectors();
      return {IsaChoice::kFound, isa.table, has_choice ? isa.of_half_vectors : nullptr};
    }
    if (name != nullptr) return {IsaChoice::kNotOnThisCpu, nullptr};
  }
  return {IsaChoice::kUnknownName, nullptr};
}

bool leaves_half_a_vector(const Problem<float>& problem) {
  const int64_t rows = problem.query_heads / problem.kv_heads * problem.queries;
  // Up to 8 rows of wider heads are multiplied along these (few_rows.inc.h), up to 4 of any.
  return (rows > 16 && rows <= 24) || (rows > 4 && rows <= 8 && problem.head_dim < 32);
}

const char* cpu_isa_names() {
#if defined(QKV_X86)
  return "avx512_amx_fp16, avx512_amx, avx512_bf16, avx512, avx2, generic";
#elif defined(QKV_ARM)
  return "neon, generic";
#else
  return "generic";
#endif
}

}  // namespace qkv::kernels
