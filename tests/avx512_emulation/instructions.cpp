#include <immintrin.h>
#include <stdint.h>
#include <string.h>

// What could be wrong in an emulated instruction and unseen in an attention, against values from
// Intel's manual, by hand. Compiled with the emulation, and for processors that have AVX512-BF16
// and AVX512-VNNI.

namespace qkv::kernels::QKV_ISA {

namespace {

constexpr uint32_t kInf = 0x7f800000, kMinusInf = 0xff800000, kNaN = 0x7fc00000, kZero = 0,
                   kMinusZero = 0x80000000, kIndefinite = 0xffc00000;  // 0 times infinity
const char* wrong = nullptr;

void check(const char* what, bool is_right) {
  if (!is_right && wrong == nullptr) wrong = what;
}
template <class Vector, class T, int kCount>
void check(const char* what, Vector found, const T (&expected)[kCount]) {
  static_assert(sizeof(Vector) >= sizeof(expected));  // or the first lanes
  check(what, memcmp(&found, expected, sizeof(expected)) == 0);
}

uint32_t bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
/// Lanes that are not given are zeros.
template <int kCount>
__m512i words(const uint32_t (&lanes)[kCount]) {
  uint32_t all[16] = {};
  memcpy(all, lanes, sizeof(lanes));
  return _mm512_loadu_si512(all);
}
template <int kCount>
__m512 floats(const float (&lanes)[kCount]) {
  float all[16] = {};
  memcpy(all, lanes, sizeof(lanes));
  return _mm512_loadu_ps(all);
}

void permutations() {
  uint16_t a[32], b[32], index[32], reversed[32], of_two[32];
  for (int l = 0; l < 32; ++l) {
    a[l] = 100 + l;
    b[l] = 200 + l;
    index[l] = 0xff00 + (7 * l + 3) % 64;  // upper bits do not count
    reversed[l] = 0xffe0 + 31 - l;
  }
  for (int l = 0; l < 32; ++l) of_two[l] = (index[l] % 64 < 32 ? a : b)[index[l] % 32];
  const auto x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  check("permutex2var_epi16", _mm512_permutex2var_epi16(x, _mm512_loadu_si512(index), y), of_two);
  check("unpacklo_epi16", _mm512_unpacklo_epi16(x, y),
        {uint16_t(100), uint16_t(200), uint16_t(101), uint16_t(201), uint16_t(102), uint16_t(202),
         uint16_t(103), uint16_t(203), uint16_t(108), uint16_t(208)});
  check("unpackhi_epi16", _mm512_unpackhi_epi16(x, y),
        {uint16_t(104), uint16_t(204), uint16_t(105), uint16_t(205), uint16_t(106), uint16_t(206),
         uint16_t(107), uint16_t(207), uint16_t(112), uint16_t(212)});
  check("permutexvar_epi16", _mm512_permutexvar_epi16(_mm512_loadu_si512(reversed), x),
        {uint16_t(131), uint16_t(130), uint16_t(129)});
  check("permutexvar_epi32",
        _mm512_permutexvar_epi32(words({3, 0, 0xfffffff2}), words({7, 8, 9, 10})), {10, 7, 9});
  check("permutex2var_ps",
        _mm512_permutex2var_ps(floats({1, 2, 3}), words({17, 2, 0xffffffe0, 16}), floats({4, 5})),
        {5.0f, 3.0f, 1.0f, 4.0f, 1.0f});

  const auto first = words({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
  const auto second = _mm512_add_epi32(first, _mm512_set1_epi32(16));
  check("shuffle_i32x4", _mm512_shuffle_i32x4(first, second, 0x78),  // 0, 2, 3, 1
        {0, 1, 2, 3, 8, 9, 10, 11, 28, 29, 30, 31, 20, 21, 22, 23});
  check("mask_shuffle_epi32", _mm512_mask_shuffle_epi32(second, 0x80f3, first, _MM_PERM_CDAB),
        {1, 0, 18, 19, 5, 4, 7, 6, 24, 25, 26, 27, 28, 29, 30, 14});
  check("set_epi32", _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
        {0, 1, 2, 3});
}

void words_and_masks() {
  const auto a = words({0xf0}), b = words({0xcc}), c = words({0xaa});  // bit i: those of i
  check("ternarylogic_epi32", _mm512_ternarylogic_epi32(a, b, c, 0x1d), {0xffffff1d});
  const auto pair = [](int even, int odd) {
    return words({(static_cast<uint32_t>(even) & 0xffff) | static_cast<uint32_t>(odd) << 16});
  };
  check("dpwssd_epi32", _mm512_dpwssd_epi32(words({1}), pair(-2, 3), pair(5, 7)), {12});
  check("max_epu16", _mm512_max_epu16(words({0x8000ffff, 3}), words({0x7fff0001, 2})),
        {static_cast<int>(0x8000ffff), 3});
  check("min_epi32", _mm512_min_epi32(words({0xffffffff, 3}), words({1, 2})), {-1, 2});
  check("dpwssd_epi32, the largest",
        _mm512_dpwssd_epi32(words({~0u}), pair(-0x8000, -0x8000), pair(-0x8000, -0x8000)),
        {0x7fffffff});
  check("mul_epu32", _mm512_mul_epu32(words({~0u, 5}), words({~0u, 7})), {0xfffffffe00000001u});
  check("slli_epi32", _mm512_slli_epi32(words({3}), 32), {0});
  check("srli_epi32", _mm512_srli_epi32(words({0x80000000}), 31), {1});
  check("mask_blend_ps", _mm512_mask_blend_ps(2, floats({1, 2}), floats({3, 4})), {1.0f, 4.0f});
  check("cmpge_epu32", _mm512_cmpge_epu32_mask(words({0x80000000}), words({1})) == 0xffff);
  check("test_epi8", _mm512_test_epi8_mask(words({0x01000200}), words({0x01000300})) == 0xa);

  uint32_t memory[16] = {1, 2, 3};
  _mm512_mask_storeu_epi32(memory, 2, words({4, 5, 6}));
  check("mask_storeu_epi32", memory[0] == 1 && memory[1] == 5 && memory[2] == 3);
  check("maskz_loadu_epi16", _mm512_maskz_loadu_epi16(4, memory), {0, 5, 0, 0});
}

void numbers() {
  const auto nan = _mm512_castsi512_ps(words({kNaN})), one = _mm512_set1_ps(1);
  check("max_ps", _mm512_max_ps(nan, one), {1.0f});
  check("max_ps", _mm512_max_ps(one, nan), {kNaN});
  check("max_ps", _mm512_max_ps(floats({0.0f}), floats({-0.0f})), {kMinusZero});
  check("min_ps", _mm512_min_ps(floats({-0.0f}), floats({0.0f})), {kZero});
  check("cmp_ps, not less", (_mm512_cmp_ps_mask(nan, one, _CMP_NLT_UQ) & 3) == 1);
  check("cmp_ps, ordered", (_mm512_cmp_ps_mask(one, nan, _CMP_ORD_Q) & 3) == 2);
  check("fpclass_ps, subnormal",
        _mm512_fpclass_ps_mask(floats({0.0f, -0x1p-127f, 0x1p-126f, 0x1p-149f}), 0x20) == 0xa);
  check("fmadd_ps", _mm512_fmadd_ps(floats({1 + 0x1p-20f}), floats({1 - 0x1p-20f}), floats({-1})),
        {-0x1p-40f});
  check("fnmadd_ps", _mm512_fnmadd_ps(floats({1 + 0x1p-20f}), floats({1 - 0x1p-20f}), floats({1})),
        {0x1p-40f});
  check("rcp14_ps", _mm512_rcp14_ps(floats({1, -4})), {1.0f, -0.25f});
  float of_three[16];
  _mm512_storeu_ps(of_three, _mm512_rcp14_ps(_mm512_set1_ps(3)));
  check("rcp14_ps", __builtin_fabsf(3 * of_three[0] - 1) < 0x1p-14f);
  check("reduce_add_ps",
        _mm512_reduce_add_ps(floats({0x1p24f, 1, 1, 1, 1, 1, 1, 1, -0x1p24f})) == 7);
  float of_eight[8];
  const auto counted = floats({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
  _mm256_storeu_ps(of_eight, _mm512_extractf32x8_ps(counted, 1));
  check("extractf32x8_ps", of_eight[0] == 8 && of_eight[7] == 15);
  _mm256_storeu_ps(of_eight, _mm512_castps512_ps256(counted));
  check("castps512_ps256", of_eight[0] == 0 && of_eight[7] == 7);

  check("reduce_ps",
        _mm512_reduce_ps(floats({2.75f, -2.75f}), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC),
        {0.75f, 0.25f});
  check("scalef_ps", _mm512_maskz_scalef_ps(3, floats({3, 3, 1}), floats({2.7f, -2.7f, 1})),
        {12.0f, 0.375f, 0.0f});
#ifdef QKV_EMULATES_BF16  // as the manual has them, and Intel's processors; AMD's were not asked
  const float infinity = __builtin_inff();
  check("reduce_ps, of what is an integer, tiny or infinite",
        _mm512_reduce_ps(floats({3, 10066329 * -0x1p-25f, -1e-30f, infinity, 0}),
                         _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC),
        {kMinusZero, bits(11744051 * 0x1p-24f), bits(0x1.fffffep-1f), kZero, kMinusZero});
  check("scalef_ps, to what is subnormal or infinite",
        _mm512_maskz_scalef_ps(0x1ff, floats({1, 1.5f, 1, -1, 0, infinity, 1, -1, 0x1p-149f}),
                               floats({-149.5f, -149.5f, 1e30f, -1e30f, infinity, -infinity,
                                       infinity, -infinity, 276.5f})),
        {kZero, 1u, kInf, kMinusZero, kIndefinite, kIndefinite, kInf, kMinusZero, bits(0x1p127f)});
#endif
}

void bfloat16() {
  const auto x = _mm512_castsi512_ps(words({0x3f808000, 0x3f818000, 0x3f808001, 0x007fffff,
                                            0x807fffff, 0x7f800001, 0x7f7fffff, kMinusInf}));
  const uint16_t rounded[] = {0x3f80, 0x3f82, 0x3f81, 0, 0x8000, 0x7fc0, 0x7f80, 0xff80};
  check("cvtneps_pbh", _mm512_cvtneps_pbh(x), rounded);
  const auto both = _mm512_cvtne2ps_pbh(x, _mm512_set1_ps(1));
  check("cvtne2ps_pbh", both, {uint16_t(0x3f80), uint16_t(0x3f80)});
  check("cvtne2ps_pbh", memcmp(reinterpret_cast<const char*>(&both) + 32, rounded, 16) == 0);

  const auto pairs = [](float even, float odd) {  // upper halves
    return reinterpret_cast<__m512bh>(words({bits(even) >> 16 | (bits(odd) & 0xffff0000)}));
  };
  const auto sum = [&](float sum, __m512bh a, __m512bh b) {
    return _mm512_dpbf16_ps(floats({sum}), a, b);
  };
  check("dpbf16_ps", sum(1, pairs(2, 3), pairs(4, 5)), {24.0f});
#ifdef QKV_EMULATES_BF16  // as above
  check("dpbf16_ps, odd first", sum(1, pairs(-0x1p12f, 0x1p12f), pairs(0x1p12f, 0x1p12f)), {0.0f});
  check("dpbf16_ps, then even", sum(1, pairs(0x1p12f, -0x1p12f), pairs(0x1p12f, 0x1p12f)), {1.0f});
  check("dpbf16_ps, fused", sum(-0x1p127f, pairs(0, 0x1p64f), pairs(0, 0x1p64f)), {0x1p127f});
#endif
  check("dpbf16_ps, subnormal sum", sum(0x1p-130f, pairs(0, 0), pairs(1, 1)), {0.0f});
  check("dpbf16_ps, subnormal factor", sum(0, pairs(0x1p-130f, 0), pairs(0x1p30f, 0)), {0.0f});
  check("dpbf16_ps, subnormal result", sum(0, pairs(0x1p-100f, 0), pairs(0x1p-30f, 0)), {0.0f});
}

}  // namespace

/// The first that is wrong, or nullptr.
extern const char* wrong_instruction() {
  permutations();
  words_and_masks();
  numbers();
  bfloat16();
  return wrong;
}

}  // namespace qkv::kernels::QKV_ISA
