#pragma once

#include <string>

// The three environment variables, read once; but QKV_STRICT at every fallback, so that a test may
// allow one.

namespace qkv {

/// QKV_STRICT=1: what would fall back to the unfused reference raises an error.
bool strict();

/// QKV_VERBOSE=1: every call of attention and attention_with_lse says on stderr what it runs.
bool verbose();

/// QKV_CPU_ISA, one of kernels::cpu_isa_names(): the instruction set to use instead of the best
/// one; nullptr if it is not set.
const char* requested_cpu_isa();

/// Says, once for each reason, that something runs unfused; raises it as an error if strict().
void report_fallback(const char* op, const std::string& reason);

}  // namespace qkv
