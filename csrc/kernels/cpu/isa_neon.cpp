#define QKV_ISA neon
#include "kernels/cpu/simd_neon.h"
#include "kernels/cpu/table.inc.h"
