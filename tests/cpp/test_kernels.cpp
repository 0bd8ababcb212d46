// The kernels by themselves, without torch: every instruction set that this processor has, and with
// AVX2 those of AVX-512 that it lacks in software, against loops in double. (Through the operator,
// the other tests only see the one that is chosen.) QKV_TEST_EMULATED=1: also those that it has.

#include <gtest/gtest.h>

#include <cfenv>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "half_kernels.h"
#include "kernel_run.h"
#include "weights_run.h"

#if defined(QKV_EMULATES_AVX512)
// Compiled for AVX2, with what that lacks in software (tests/avx512_emulation,
// tests/amx_emulation).
namespace qkv::kernels {
namespace avx512_emulated {
extern const CpuKernelTable table;
}
namespace avx512_bf16_emulated {
extern const CpuKernelTable table;
extern const char* wrong_instruction();
}  // namespace avx512_bf16_emulated
namespace avx512_amx_emulated {
extern const CpuKernelTable table;
}
namespace avx512_amx_fp16_emulated {
extern const CpuKernelTable table;
}
namespace avx512_bf16 {
extern const char* wrong_instruction();
}
}  // namespace qkv::kernels
#endif

namespace {

using namespace kernel_run;

struct Emulated {
  std::string name;
  const CpuKernelTable* table;

  /// Whether the processor's own kernels show all that these would.
  bool is_needless() const {
    const std::string real = name.substr(0, name.rfind('_'));
    return choose_cpu_kernels(real.c_str()).choice == IsaChoice::kFound &&
           std::getenv("QKV_TEST_EMULATED") == nullptr;
  }
};
const std::vector<Emulated> kEmulated = {
#if defined(QKV_EMULATES_AVX512)
    {"avx512_emulated", &avx512_emulated::table},
    {"avx512_bf16_emulated", &avx512_bf16_emulated::table},
    {"avx512_amx_emulated", &avx512_amx_emulated::table},
    {"avx512_amx_fp16_emulated", &avx512_amx_fp16_emulated::table},
#endif
};

class Kernels : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string isa = GetParam();
    auto chosen = choose_cpu_kernels(isa.c_str());
    for (const Emulated& emulated : kEmulated) {
      if (isa != emulated.name) continue;
      if (emulated.is_needless()) GTEST_SKIP() << "this processor has it";
      chosen = {choose_cpu_kernels("avx2").choice, emulated.table};
    }
    if (chosen.choice != IsaChoice::kFound) GTEST_SKIP() << "not on this processor";
    table_ = chosen.table;
  }

  static bool borrows_float32() { return std::string(GetParam()).find("amx") != std::string::npos; }

  const CpuKernelTable* table_ = nullptr;
};

TEST_P(Kernels, EqualLoopsInDouble) {
  if (borrows_float32()) GTEST_SKIP() << "has those of AVX-512";
  const Band all{-1, -1, 0}, causal{-1, 0, 0}, window{9, 3, 11}, outside{2, 2, -500};
  const Shape shapes[] = {
      {1, 1, 1, 1, 1, 1, all},
      {2, 2, 5, 7, 3, 4, all},
      {1, 1, 17, 33, 8, 8, causal},
      {1, 1, 50, 300, 20, 17, all},
      {2, 1, 100, 290, 16, 33, causal},
      {6, 2, 40, 200, 31, 64, causal},
      {4, 2, 60, 90, 24, 80, window},
      {1, 1, 30, 20, 5, 5, outside},
      {1, 1, 49, 97, 65, 63, causal},
      {3, 1, 33, 129, 48, 1, window},
      // Few rows: other kernels, and with many keys several ranges of them.
      {2, 2, 1, 2100, 33, 70, all},
      {4, 1, 1, 2100, 16, 5, window},
      {3, 1, 1, 40, 7, 64, all},
      {2, 1, 1, 3000, 8, 16, outside},
      {1, 1, 30, 2500, 9, 20, all},
      {1, 1, 2, 300, 64, 64, all, true},
      {1, 1, 2, 301, 20, 9, {-1, 0, 250}},
      {2, 1, 1, 2100, 70, 33, {-1, 0, 1900}, true},
      {1, 1, 4, 290, 24, 20, window, false, true},
      {1, 1, 3, 500, 40, 9, {100, 20, 300}},
      {8, 1, 1, 2100, 33, 20, all},
      {2, 2, 5, 300, 64, 70, {-1, 0, 295}},
      {7, 1, 1, 290, 40, 150, window, true},
      {4, 2, 60, 290, 24, 20, all, true},
      {2, 1, 20, 2100, 8, 8, causal, true},
      // Scores are capped where they leave their product.
      {1, 1, 50, 400, 20, 17, all, false, true},
      {2, 1, 70, 290, 24, 20, {-1, 0, 200}, false, true},
      {2, 1, 35, 4200, 9, 20, {-1, 0, 4170}},  // two tiles or three of 48 or 24 rows
      {1, 1, 45, 4200, 5, 8, {2100, 40, 0}},
      // Fewer columns than what is worked on beside a product comes in.
      {1, 1, 40, 400, 3, 5, all},
      // Many bytes a key: tiles take turns more than once.
      {1, 1, 70, 400, 64, 300, {-1, 0, 330}},
      // Copies of the narrower rows lie further apart, where all would lie in few sets of a cache.
      {1, 1, 40, 257, 257, 256, all},
      {2, 1, 20, 257, 128, 129, causal},
      // More keys than second order keeps weights of.
      {2, 1, 3, 16500, 4, 5, {16470, 0, 16480}},
  };
  const auto expect_equal = [&](const Shape& shape, int64_t splits, const std::string& what) {
    const double bound = shape.head_dim > 256 ? 5e-4 : 5e-5;  // scores grow with it
    EXPECT_LT((KernelRun<float>(*table_, shape, splits).errors().largest()), bound) << what;
    EXPECT_LT((KernelRun<double>(*table_, shape, splits).errors().largest()), 5e-13) << what;
  };
  for (const Shape& shape : shapes) {
    for (int64_t splits : {1, 2, 3, 5}) {
      if (splits > (shape.keys + 95) / 96) continue;
      const std::string what = "heads " + std::to_string(shape.heads) + " queries " +
                               std::to_string(shape.queries) + " keys " +
                               std::to_string(shape.keys) + " splits " + std::to_string(splits);
      expect_equal(shape, splits, what);
      if (rows_of_head(shape) > kFewRows) continue;
      Shape in_tiles = shape;
      in_tiles.few_rows_in_tiles = true;
      expect_equal(in_tiles, splits, what + " in tiles");
    }
  }
}

TEST_P(Kernels, WeightsEqualLoopsInDouble) {
  const Band all{-1, -1, 0}, causal{-1, 0, 0}, window{9, 3, 11}, outside{2, 2, -500};
  const Shape shapes[] = {
      {1, 1, 1, 1, 1, 0, all},
      {2, 2, 5, 7, 3, 0, all},
      {1, 1, 17, 33, 8, 0, causal},
      {1, 1, 50, 300, 20, 0, all},
      {6, 2, 40, 200, 32, 0, causal},
      {4, 2, 60, 290, 24, 0, window, true},
      {2, 1, 70, 260, 257, 0, {-1, 0, 200}, false, true},
      {1, 1, 30, 20, 6, 0, outside},
      {3, 1, 129, 130, 40, 0, {100, 0, 0}, true},
      // Few rows.
      {2, 2, 1, 300, 33, 0, all},
      {2, 2, 1, 700, 64, 0, {100, 20, 300}, true},
      {3, 1, 1, 290, 40, 0, all},
      {4, 1, 1, 400, 16, 0, window, false, true},
      {1, 1, 2, 301, 33, 0, {-1, 0, 250}, true},
      {7, 1, 1, 290, 40, 0, window, true},
      {2, 1, 4, 129, 64, 0, {-1, 0, 120}, true},
      {2, 1, 1, 300, 8, 0, outside},
  };
  const HalfForwardKernels* half = table_->bfloat16_forward;
  for (const Shape& shape : shapes) {
    const std::string what = "heads " + std::to_string(shape.heads) + " queries " +
                             std::to_string(shape.queries) + " keys " + std::to_string(shape.keys);
    const auto expect_small = [&](const WeightsErrors& errors, double bound) {
      EXPECT_LT(errors.weights, bound) << what;
      EXPECT_LT(errors.lse, 10 * bound) << what;
      EXPECT_LT(errors.dots, 10 * bound) << what;
      EXPECT_LT(errors.gradients, 10 * bound) << what;
    };
    for (int64_t splits : {1, 3}) {
      if (splits > (shape.keys + 95) / 96) continue;
      if (half == nullptr) {
        const auto& float32 = table_->float32;
        const auto& float64 = table_->float64;
        expect_small(WeightsRun<float>(shape, splits, float32, float32).errors(), 5e-6);
        expect_small(WeightsRun<double>(shape, splits, float64, float64).errors(), 1e-13);
        continue;
      }
      const bool few = rows_of_head(shape) <= kFewRows && half->few_rows_backward == nullptr;
      if (few || shape.head_dim % 2 != 0) continue;
      expect_small(
          WeightsRun<float>(shape, splits, *half, *table_->bfloat16_backward, true).errors(0x1p-8),
          1e-5);
    }
  }
}

TEST_P(Kernels, LogOfEverySum) {
  if (borrows_float32()) GTEST_SKIP() << "has those of AVX-512";
  Shape shape{1, 1, 700, 700, 4, 4, {-1, 0, 0}};  // row i sees i + 1 keys, whose scores are 0
  shape.scale = 0.0;
  EXPECT_LT((KernelRun<float>(*table_, shape, 1).errors().lse), 1e-6);
  EXPECT_LT((KernelRun<double>(*table_, shape, 1).errors().lse), 1e-14);
}

/// Every bit of what comes from columns is where rows have it, and nothing else is written.
template <class Bits>
void expect_transposed(void (*transpose)(const Transposition&), Storage storage) {
  constexpr int64_t kSizes[] = {1, 3, 4, 8, 15, 16, 17, 33, 40, 100};
  for (const int64_t rows : kSizes) {
    for (const int64_t columns : kSizes) {
      const int64_t from_column = rows + 3, to_row = columns + 5;
      std::vector<Bits> from(from_column * columns), to(to_row * rows, Bits{7}), expected = to;
      std::mt19937_64 random(rows * 1000 + columns);
      for (Bits& x : from) x = static_cast<Bits>(random());
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) expected[r * to_row + c] = from[c * from_column + r];
      }
      transpose({from.data(), from_column, to.data(), to_row, rows, columns, storage});
      EXPECT_EQ(to, expected) << rows << " x " << columns << ", bytes " << sizeof(Bits);
    }
  }
}

TEST_P(Kernels, Transpose) {
  expect_transposed<uint32_t>(table_->float32.transpose, Storage::kSame);
  expect_transposed<uint16_t>(table_->float32.transpose, Storage::kBFloat16);
  expect_transposed<uint64_t>(table_->float64.transpose, Storage::kSame);
}

/// Scores of 1e6 are 1/16 apart: derivatives must compute the very ones that lse comes from.
TEST_P(Kernels, WeightsOfDerivativesAddUp) {
  const Converting converting(*table_);
  Shape shapes[] = {
      {2, 1, 60, 200, 64, 8, {-1, -1, 0}},
      {2, 1, 60, 200, 64, 8, {-1, 0, 100}},
      // Forwards in bfloat16 do not take these.
      {1, 1, 60, 100, 64, 8, {-1, -1, 0}},
      {1, 1, 60, 200, 65, 8, {-1, -1, 0}},
      // Few rows, which have kernels of their own.
      {1, 1, 1, 200, 64, 8, {-1, -1, 0}},
      {4, 2, 2, 700, 30, 8, {-1, 0, 680}},
      {6, 1, 1, 700, 40, 8, {-1, 0, 680}},
  };
  for (Shape& shape : shapes) {
    for (const double scale : {1.0, 1e3, 1e5}) {
      shape.scale = scale;
      const std::string what = "keys " + std::to_string(shape.keys) + " D " +
                               std::to_string(shape.head_dim) + " scale " + std::to_string(scale);
      for (int64_t splits : {1, 2}) {
        EXPECT_LT((KernelRun<float>(*table_, shape, splits).excess()), 1e-5) << what;
        EXPECT_LT((KernelRun<double>(*table_, shape, splits).excess()), 1e-13) << what;
        if (table_->bfloat16_backward == nullptr) continue;
        const OfHalf in_bfloat16 = of_bfloat16(*table_, converting, shape);
        const double of_rounding = 0x1p-8;
        EXPECT_LT((KernelRun<float>(*table_, shape, splits, in_bfloat16).excess()), of_rounding)
            << what;
      }
    }
  }
}

/// However far a weight lies below the largest, no product with it is a subnormal number, which
/// takes a hundred times as long on some processors.
TEST_P(Kernels, NothingUnderflows) {
  if (borrows_float32()) GTEST_SKIP() << "has those of AVX-512";
  const auto underflows = [&](auto number, const Shape& shape) {
    std::feclearexcept(FE_UNDERFLOW);
    KernelRun<decltype(number)>(*table_, shape, 1);
    return std::fetestexcept(FE_UNDERFLOW) != 0;
  };
  Shape shapes[] = {
      {2, 1, 60, 600, 64, 8, {-1, -1, 0}},
      {2, 1, 60, 300, 64, 8, {-1, 0, 200}},
      {1, 1, 2, 2100, 64, 8, {-1, -1, 0}},
  };
  for (Shape& shape : shapes) {
    shape.scale = 4.0;  // scores have a standard deviation of 32
    EXPECT_FALSE(underflows(float(), shape)) << shape.keys;
    shape.scale = 40.0;
    EXPECT_FALSE(underflows(double(), shape)) << shape.keys;
  }
}

TEST_P(Kernels, RowsFarApartAreTheSame) {
  const Band all{-1, -1, 0}, causal{-1, 0, 0};
  const Shape shapes[] = {
      {1, 1, 150, 200, 20, 17, all},
      {4, 2, 90, 300, 33, 64, causal},
      {1, 1, 450, 130, 5, 3, all},  // more than eight tiles
      {1, 1, 2, 300, 64, 5, all},
      {1, 1, 70, 400, 256, 300, causal},
      {1, 1, 120, 400, 8, 12, {30, 5, 211}},  // nobody sees the first keys
  };
  const auto expect_same = [&](auto number, Shape shape, int64_t splits) {
    using T = decltype(number);
    const auto together = KernelRun<T>(*table_, shape, splits).results();
    for (const bool keys : {false, true}) {
      shape.keys_far_apart = keys;
      for (const bool values : {false, true}) {
        shape.values_far_apart = values;
        EXPECT_EQ(together, KernelRun<T>(*table_, shape, splits).results());
      }
    }
  };
  for (const Shape& shape : shapes) {
    for (int64_t splits : {1, 2}) {
      expect_same(float(), shape, splits);
      expect_same(double(), shape, splits);
    }
  }
}

TEST_P(Kernels, DropTheSameWeights) {
  if (borrows_float32()) GTEST_SKIP() << "has those of AVX-512";
  for (const int64_t queries : {50, 2, 4}) {
    Shape shape{2, 1, queries, 200, 40, 12, {-1, 0, 200 - queries}};
    const auto all = KernelRun<float>(*table_, shape, 2).results();
    shape.drops = true;
    const auto dropped = KernelRun<float>(*table_, shape, 2).results();
    const auto expected =
        KernelRun<float>(*choose_cpu_kernels("generic").table, shape, 2).results();
    double error = 0.0, difference = 0.0;
    for (size_t i = 0; i < expected.size(); ++i) {
      error = std::max(error, std::abs(double(dropped[i]) - double(expected[i])));
      difference = std::max(difference, std::abs(double(dropped[i]) - double(all[i])));
    }
    EXPECT_LT(error, 5e-5) << queries;
    EXPECT_GT(difference, 0.1) << queries;
  }
}

const std::vector<Shape>& shapes_of_few_rows() {
  static const Band all{-1, -1, 0}, causal{-1, 0, 299}, window{70, 3, 211};
  static const std::vector<Shape> shapes = {
      {1, 1, 1, 300, 64, 64, all},
      {4, 1, 1, 290, 72, 80, all},
      {2, 1, 2, 301, 33, 7, causal},
      {2, 1, 1, 301, 33, 7, window, true},
      {1, 1, 3, 301, 31, 7, window},
      {6, 2, 1, 2300, 40, 24, all},
      {4, 1, 1, 300, 1, 9, all},
      {4, 1, 1, 290, 72, 80, causal, true},
      {8, 1, 1, 290, 41, 24, all},
      // One key more or less than whole tiles.
      {1, 1, 8, 113, 64, 33, all},
      {2, 1, 2, 143, 32, 64, {-1, 0, 130}},
  };
  return shapes;
}

const std::vector<Shape>& shapes_of_half_products() {
  static const Band all{-1, -1, 0}, causal{-1, 0, 0}, window{9, 3, 11};
  static const std::vector<Shape> shapes = {
      {1, 1, 17, 33, 8, 8, causal},
      {1, 1, 50, 300, 20, 17, all},
      {2, 1, 100, 291, 16, 33, causal},
      {6, 2, 40, 200, 34, 64, causal},
      {4, 2, 60, 90, 24, 80, window},
      {1, 1, 49, 97, 66, 63, causal},
      {1, 1, 30, 2501, 10, 20, all},            // ranges of keys
      {2, 1, 35, 4201, 10, 20, {-1, 0, 4170}},  // of several tiles
      {4, 2, 60, 290, 24, 20, all, true},
      {2, 1, 20, 2100, 8, 8, causal, true},
      {1, 1, 170, 409, 64, 300, {-1, 0, 239}},  // several turns
      // Rows of one vector, alone and after other tiles.
      {16, 1, 1, 291, 64, 40, all},
      {4, 1, 3, 2300, 8, 72, {-1, 0, 2200}, true},
      {2, 1, 52, 330, 34, 17, all},
  };
  return shapes;
}

/// In values of a few columns and of many.
void expect_nan_reaches_nobody(const CpuKernelTable& table, const OfHalf& kernels) {
  for (const int64_t queries : {2, 70}) {
    for (const int64_t width : {12, 72}) {
      Shape shape{1, 1, queries, 300, width, width, {-1, 0, 220 - queries}};
      const auto without = KernelRun<float>(table, shape, 1, kernels).outputs();
      shape.has_nan = true;
      EXPECT_EQ(without, KernelRun<float>(table, shape, 1, kernels).outputs())
          << queries << " queries, " << width << " columns";
    }
  }
}

TEST_P(Kernels, ProductsInBFloat16) {
  if (table_->bfloat16_forward == nullptr) GTEST_SKIP() << "has none";
  for (const Shape& shape : shapes_of_half_products()) {
    const auto errors = KernelRun<float>(*table_, shape, 1, {table_->bfloat16_forward}).errors();
    const std::string what =
        "queries " + std::to_string(shape.queries) + " keys " + std::to_string(shape.keys);
    // A weight is rounded by up to 2^-9, values are up to 4: most of it averages out, of few keys
    // less.
    EXPECT_LT(errors.output, 1.5e-2) << what;
    EXPECT_LT(errors.along, shape.keys < 128 ? 2.5e-2 : 1.5e-2) << what;
    EXPECT_LT(errors.lse, 5e-5) << what;
  }
}

TEST_P(Kernels, NanInBFloat16ReachesNobodyWhoDoesNotSeeIt) {
  if (table_->bfloat16_forward == nullptr) GTEST_SKIP() << "has none";
  expect_nan_reaches_nobody(*table_, {table_->bfloat16_forward});
}

/// A row's largest score may be far above those of the keys before, in the same block or in a later
/// one.
TEST_P(Kernels, SharpScoresInBFloat16) {
  if (table_->bfloat16_forward == nullptr) GTEST_SKIP() << "has none";
  for (const double scale : {2.0, 6.0, 30.0}) {
    for (const int64_t keys : {128, 200, 301, 700}) {
      Shape shape{1, 1, 100, keys, 16, 8, {-1, -1, 0}};
      shape.scale = scale;
      const KernelRun<float> run(*table_, shape, 1, {table_->bfloat16_forward});
      EXPECT_LT(run.errors().output, 1.5e-2) << scale << " keys " << keys;
    }
  }
}

/// The table with the kernels of float16; the rest of it is another's.
class Float16Kernels : public Kernels {
 protected:
  OfHalf multiplying() const {
    return {table_->float16_forward, nullptr, nullptr, Storage::kFloat16};
  }
};

TEST_P(Float16Kernels, Products) {
  for (const Shape& shape : shapes_of_half_products()) {
    const auto errors = KernelRun<float>(*table_, shape, 1, multiplying()).errors();
    const std::string what =
        "queries " + std::to_string(shape.queries) + " keys " + std::to_string(shape.keys);
    EXPECT_LT(errors.output, 1.5e-3) << what;  // a weight is rounded by up to 2^-12
    EXPECT_LT(errors.along, shape.keys < 128 ? 6e-3 : 4e-3) << what;
    EXPECT_LT(errors.lse, 5e-5) << what;
  }
}

TEST_P(Float16Kernels, FewRows) {
  for (const Shape& shape : shapes_of_few_rows()) {
    const auto errors = KernelRun<float>(*table_, shape, 1, multiplying()).errors(0x1p-11);
    const std::string what =
        "queries " + std::to_string(shape.queries) + " keys " + std::to_string(shape.keys);
    EXPECT_LT(errors.output, 5e-5) << what;
    EXPECT_LT(errors.lse, 5e-5) << what;
    EXPECT_LT(errors.gradients, 2e-4) << what;
  }
}

TEST_P(Float16Kernels, NanReachesNobodyWhoDoesNotSeeIt) {
  expect_nan_reaches_nobody(*table_, multiplying());
}

TEST_P(Float16Kernels, DropTheSameWeights) {
  const Shape shape{2, 1, 50, 200, 8, 12, {-1, 0, 150}, false, false, true};
  const CpuKernelTable& generic = *choose_cpu_kernels("generic").table;
  const HalfForwardKernels converting{generic.float32, [](const auto&) { return true; }};
  const auto dropped = KernelRun<float>(*table_, shape, 1, multiplying()).outputs();
  const auto expected =
      KernelRun<float>(generic, shape, 1, {&converting, nullptr, nullptr, Storage::kFloat16})
          .outputs();
  ASSERT_EQ(dropped.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(dropped[i], expected[i], 2e-3);
}

INSTANTIATE_TEST_SUITE_P(Isa, Float16Kernels,
                         ::testing::Values("avx512_amx_fp16", "avx512_amx_fp16_emulated"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(Kernels, OneKeyIsMoreThanATurn) {
  if (borrows_float32()) GTEST_SKIP() << "has those of AVX-512";
  const Shape shape{1, 1, 65, 3, 1, 68000, {-1, -1, 0}};
  EXPECT_LT((KernelRun<float>(*table_, shape, 1).errors().output), 5e-5);
}

/// As in decoding and in pooling: by pairs or tiles where there are instructions for them, else
/// converted.
TEST_P(Kernels, FewRowsOfBFloat16) {
  const Converting converting(*table_);
  for (const Shape& shape : shapes_of_few_rows()) {
    for (const int64_t splits : {1, 2}) {
      for (const bool converts : {true, false}) {
        if (!converts && table_->bfloat16_forward == nullptr) continue;
        const OfHalf kernels =
            converts ? converting.kernels() : of_bfloat16(*table_, converting, shape);
        const auto errors = KernelRun<float>(*table_, shape, splits, kernels).errors(0x1p-8);
        const std::string what = "queries " + std::to_string(shape.queries) + " keys " +
                                 std::to_string(shape.keys) + " D " +
                                 std::to_string(shape.head_dim);
        EXPECT_LT(errors.output, 5e-5) << what;
        EXPECT_LT(errors.lse, 5e-5) << what;
        EXPECT_LT(errors.gradients, 2e-4) << what;
      }
    }
  }
}

/// By those that multiply in it, if there are any, and by those that convert it. Exact but along
/// the directions with AVX512-BF16, where tiles are rounded if there are 128 keys.
TEST_P(Kernels, DerivativesOfBFloat16) {
  const Converting converting(*table_);
  const OfHalf multiplying{nullptr, table_->bfloat16_backward, table_->bfloat16_tangents};
  const Band all{-1, -1, 0}, causal{-1, 0, 0}, window{9, 3, 11}, outside{2, 2, -500};
  const Shape shapes[] = {
      {1, 1, 17, 33, 8, 8, causal},
      {1, 1, 50, 300, 20, 17, all},
      {2, 1, 100, 291, 16, 33, causal},
      {6, 2, 40, 200, 34, 64, causal},
      {4, 2, 60, 90, 24, 80, window},
      {1, 1, 49, 97, 65, 63, causal},
      {3, 1, 133, 230, 1, 1, window},
      {1, 1, 32, 96, 32, 32, outside},
      {4, 2, 60, 290, 24, 20, all, true},
      {2, 1, 20, 300, 8, 8, causal, true},
      {1, 1, 170, 409, 64, 300, {-1, 0, 239}},  // several turns of a forward
      {1, 1, 50, 140, 270, 20, all},            // more pairs than are multiplied at a time
      {16, 1, 1, 291, 20, 40, all},             // rows of one vector
      {2, 1, 70, 290, 24, 40, all, true},       // whole tiles, of which two vectors have no row
      {1, 1, 96, 400, 40, 24, {150, 20, 230}},  // whole blocks that begin anywhere
  };
  for (const Shape& shape : shapes) {
    for (int64_t splits : {1, 2, 3}) {
      if (splits > (shape.keys + 95) / 96) continue;
      for (const OfHalf& kernels : {converting.kernels(), multiplying}) {
        if (kernels.backward == nullptr) continue;
        const auto errors = KernelRun<float>(*table_, shape, splits, kernels).errors(0x1p-8);
        const std::string what = "queries " + std::to_string(shape.queries) + " keys " +
                                 std::to_string(shape.keys) + " splits " + std::to_string(splits);
        // Sums of up to 300 numbers, which are cut off at 2^-16 where AMX multiplies them.
        EXPECT_LT(errors.gradients, 2e-4) << what;
        EXPECT_LT(errors.output, 2e-4) << what;
        const bool rounds = kernels.tangents == table_->bfloat16_tangents &&
                            std::string(table_->isa) == "avx512_bf16" && shape.keys >= 128;
        const double bound = shape.head_dim > 256 ? 5e-4 : 2e-4;  // scores grow with it
        EXPECT_LT(errors.along, rounds ? 0.05 : bound) << what;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Kernels,
                         ::testing::Values("generic", "avx2", "avx512", "avx512_bf16", "avx512_amx",
                                           "avx512_emulated", "avx512_bf16_emulated",
                                           "avx512_amx_emulated", "neon"),
                         [](const auto& info) { return std::string(info.param); });

#if defined(QKV_EMULATES_AVX512)
TEST(Avx512, InstructionsAreEmulated) {
  if (choose_cpu_kernels("avx2").choice != IsaChoice::kFound) GTEST_SKIP() << "needs AVX2";
  EXPECT_STREQ(avx512_bf16_emulated::wrong_instruction(), nullptr);
}

TEST(Avx512, InstructionsAreThoseOfTheProcessor) {
  if (choose_cpu_kernels("avx512_bf16").choice != IsaChoice::kFound) GTEST_SKIP() << "has none";
  EXPECT_STREQ(avx512_bf16::wrong_instruction(), nullptr);
}
#endif

TEST(Isa, NamesAreChecked) {
  EXPECT_EQ(choose_cpu_kernels("sse9").choice, IsaChoice::kUnknownName);
  EXPECT_EQ(choose_cpu_kernels(nullptr).choice, IsaChoice::kFound);
  EXPECT_STREQ(choose_cpu_kernels("generic").table->isa, "generic");
}

TEST(Isa, VectorsHalfAsLongAreForThoseThatAskedForNone) {
  for (const char* isa : {"generic", "avx2", "avx512", "avx512_bf16"}) {
    EXPECT_EQ(choose_cpu_kernels(isa).of_half_vectors, nullptr) << isa;
  }
  const auto leave_half = [](int64_t query_heads, int64_t queries, int64_t head_dim) {
    Problem<float> sizes{};
    sizes.query_heads = query_heads;
    sizes.kv_heads = 2;
    sizes.queries = queries;
    sizes.head_dim = head_dim;
    return leaves_half_a_vector(sizes);
  };
  EXPECT_TRUE(leave_half(2, 24, 64));
  EXPECT_TRUE(leave_half(6, 6, 128));
  EXPECT_TRUE(leave_half(2, 8, 16));
  EXPECT_FALSE(leave_half(2, 8, 64));  // multiplied along its columns
  EXPECT_FALSE(leave_half(2, 4, 16));
  for (const int64_t queries : {9, 16, 25, 40, 128}) EXPECT_FALSE(leave_half(2, queries, 16));
}

}  // namespace
