#include "explain.h"

#include <sstream>

#include "cpu/kernels.h"
#include "dtype_name.h"
#if defined(QKV_HAS_CUDA)
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include "kernels/cuda/sm80/tasks.h"
#endif

namespace qkv {

namespace {

/// Whether sizes say which kernels run: symbols do not, and for no heads none do.
bool sizes_choose_kernels(const Operands& x) {
  const auto are_numbers = [](const Tensor& operand) {
    return !operand.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  };
  return are_numbers(x.query) && are_numbers(x.key) && are_numbers(x.value) && x.key.size(-3) > 0;
}

/// Whether kernels multiply operands in 16 bits as such (with gradients a GPU's float16 as tf32),
/// where the processor or the GPU can and sums are long enough for roundings to average out; else
/// float32 converted from them.
struct MultipliesIn16Bits {
  bool forward = false, backward = false, second_order = false;

  explicit MultipliesIn16Bits(const Operands& x) {
    if (x.query.is_cuda()) {
#if defined(QKV_HAS_CUDA)
      // The tensors of a trace may be on a device that is not there.
      const auto device = x.query.device();
      c10::cuda::OptionalCUDAGuard guard;
      if (device.index() < c10::cuda::device_count()) guard.set_device(device);
      forward = kernels::sm80::takes_forward(sizes_of<float>(x));
      backward = kernels::sm80::takes_backward(sizes_of<float>(x));
#endif
      return;
    }
    const auto& table = cpu::kernel_table();
    const auto has_own = [sizes = sizes_of<float>(x)](const auto*... kernels) {
      return cpu::half_kernels_for(sizes, kernels...) != nullptr;
    };
    forward = has_own(table.bfloat16_forward, table.float16_forward);
    backward = has_own(table.bfloat16_backward);
    second_order = has_own(table.bfloat16_tangents);
  }
};

/// The instruction set of the CPU kernels; two, if passes in 16 bits and in float32 differ.
std::string isa(const Operands& x) {
  const std::string usual = cpu::kernel_table().isa;
  if (x.query.scalar_type() == at::kDouble || !sizes_choose_kernels(x)) return usual;
  const std::string of_float32 = cpu::kernel_table_for(sizes_of<float>(x)).isa;
  const MultipliesIn16Bits own(x);
  if (!own.forward && !own.backward && !own.second_order) return of_float32;
  const bool all = own.forward && own.backward && own.second_order;
  return all || of_float32 == usual ? usual : usual + " and " + of_float32;
}

/// The folders of the CUDA kernels: those for tensor cores, those for any GPU, or both.
std::string cuda_kernels(const Operands& x) {
  if (!has_16_bits(x.query)) return "simt";
  if (!sizes_choose_kernels(x)) return "sm80 or simt";
  const MultipliesIn16Bits own(x);
  return !own.forward ? "simt" : own.backward ? "sm80" : "sm80 and simt";
}

std::string kernel_name(const Call& call, bool second_order) {
  if (!call.unfused_reason.empty()) return "unfused reference: " + call.unfused_reason;
  const Tensor& query = call.operands.query;
  const auto name = c10::str("fused ", query.device().type(), ' ', dtype_name(query.scalar_type()));
  if (query.is_cuda()) return name + ' ' + (second_order ? "simt" : cuda_kernels(call.operands));
  return query.is_cpu() ? name + ' ' + isa(call.operands) : name;
}

/// What is multiplied for operands in 16 bits.
std::string products(const Operands& x) {
  const MultipliesIn16Bits own(x);
  if (x.query.is_cuda() && !own.forward) {
    return dtype_name(at::kFloat) + ", without tensor cores";
  }
  const auto numbers = [&](bool in_16_bits) {
    return dtype_name(in_16_bits ? x.query.scalar_type() : at::kFloat);
  };
  return c10::str("forward ", numbers(own.forward), ", backward ", numbers(own.backward),
                  ", second order and jvp ", numbers(own.second_order));
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
  out << "  forward, backward  " << kernel_name(call, false) << '\n';
  out << "  second order, jvp  " << kernel_name(call, true) << '\n';
  const bool fused = call.unfused_reason.empty();
  const char* rest = fused ? "unfused reference formulas" : "unfused reference";
  out << "  third order        " << rest << '\n';
  out << "  jvp of a jvp       " << rest << '\n';
  if (fused && has_16_bits(x.query) && sizes_choose_kernels(x) &&
      (x.query.is_cuda() || x.query.is_cpu())) {
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
