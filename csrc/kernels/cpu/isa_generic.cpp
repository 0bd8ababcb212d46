#define QKV_ISA generic
#include "kernels/cpu/simd_generic.h"
#include "kernels/cpu/table.inc.h"
