#include "explain.h"

#include <sstream>

#include "cpu/kernels.h"
#include "dtype_name.h"

namespace qkv {

namespace {

std::string kernel_name(const Call& call) {
  if (!call.unfused_reason.empty()) return "unfused reference: " + call.unfused_reason;
  const Tensor& query = call.operands.query;
  std::ostringstream name;
  const auto& kernels = cpu::kernel_table();
  const bool is_double = query.scalar_type() == at::kDouble;
  name << "fused cpu " << dtype_name(query.scalar_type()) << ' ' << kernels.isa << ", tiles of "
       << (is_double ? kernels.float64.tile_rows : kernels.float32.tile_rows) << " queries x "
       << (is_double ? kernels.float64.block_keys : kernels.float32.block_keys) << " keys";
  return name.str();
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
  out << "  further orders     "
      << (call.unfused_reason.empty() ? "unfused reference formulas" : "unfused reference") << '\n';
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
