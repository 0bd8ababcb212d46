#define QKV_ISA avx512
#include "kernels/cpu/simd_avx512.h"
#include "kernels/cpu/table.inc.h"
