#include "explain.h"

#include <sstream>

#include "cpu/kernels.h"
#include "dtype_name.h"

namespace qkv {

namespace {

bool has_sizes(const Operands& x) {
  const auto are_numbers = [](const Tensor& operand) {
    return !operand.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  };
  return are_numbers(x.query) && are_numbers(x.key) && are_numbers(x.value);
}

/// The instruction set of a CPU kernel.
const char* isa(const Operands& x) {
  const bool chosen_by_sizes =
      x.query.scalar_type() == at::kFloat && has_sizes(x) && x.key.size(-3) > 0;
  return (chosen_by_sizes ? cpu::kernel_table_for(sizes_of<float>(x)) : cpu::kernel_table()).isa;
}

std::string kernel_name(const Call& call) {
  if (!call.unfused_reason.empty()) return "unfused reference: " + call.unfused_reason;
  const Tensor& query = call.operands.query;
  const auto name = c10::str("fused ", query.device().type(), ' ', dtype_name(query.scalar_type()));
  if (query.is_cuda()) return name + " simt";
  return query.is_cpu() ? name + ' ' + isa(call.operands) : name;
}

/// What CPU kernels multiply for operands in 16 bits: their type where the processor can and sums
/// are long enough for roundings to average out, else float32 converted from it.
std::string products(const Operands& x) {
  const auto& table = cpu::kernel_table();
  const auto numbers = [&](const auto*... kernels) {
    const bool has_own = cpu::half_kernels_for(sizes_of<float>(x), kernels...) != nullptr;
    return dtype_name(has_own ? x.query.scalar_type() : at::kFloat);
  };
  return c10::str("forward ", numbers(table.bfloat16_forward, table.float16_forward), ", backward ",
                  numbers(table.bfloat16_backward), ", second order and jvp ",
                  numbers(table.bfloat16_tangents));
}

std::string bound(const c10::SymInt& x) {
  std::ostringstream out;
  if (x < 0) {
    out << "unbounded";
  } else {
    out << x;
  }
  return out.str();
}

}  // namespace

std::string description(const char* op, const Call& call) {
  const Operands& x = call.operands;
  const auto sizes = x.query.sym_sizes();
  std::ostringstream out;
  out << op << '\n';
  out << "  forward, backward  " << kernel_name(call) << '\n';
  out << "  second order, jvp  " << kernel_name(call) << '\n';
  const bool fused = call.unfused_reason.empty();
  const char* rest = fused ? "unfused reference formulas" : "unfused reference";
  out << "  third order        " << rest << '\n';
  out << "  jvp of a jvp       " << rest << '\n';
  if (fused && has_sizes(x) && x.query.is_cpu() && has_16_bits(x.query)) {
    out << "  products           " << products(x) << '\n';
  }
  out << "  shape              B=" << sizes.slice(0, sizes.size() - 3)
      << " Hq=" << x.query.sym_size(-3) << " Hkv=" << x.key.sym_size(-3)
      << " M=" << x.query.sym_size(-2) << " N=" << x.key.sym_size(-2)
      << " D=" << x.query.sym_size(-1) << " Dv=" << x.value.sym_size(-1) << ' '
      << dtype_name(x.query.scalar_type()) << ' ' << x.query.device() << '\n';
  out << "  band               left " << bound(x.band[0]) << ", right " << bound(x.band[1])
      << ", query_offset " << x.band[2] << '\n';
  return out.str();
}

}  // namespace qkv
