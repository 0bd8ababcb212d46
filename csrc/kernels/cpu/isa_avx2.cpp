#define QKV_ISA avx2
#include "kernels/cpu/simd_avx2.h"
#include "kernels/cpu/table.inc.h"
