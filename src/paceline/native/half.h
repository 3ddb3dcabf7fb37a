/* IEEE half precision to single, exactly, in plain C: what vcvtph2ps and fcvtl do. */
#ifndef PL_HALF_H
#define PL_HALF_H

#include <stdint.h>
#include <string.h>

static inline float pl_half_to_float(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
    uint32_t bits;
    float value;
    if (exponent == 31)
        bits = 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000 : 0); /* a NaN comes out quiet */
    else if (exponent != 0)
        bits = (exponent + 112) << 23 | mantissa << 13;
    else {
        value = (float)mantissa * 0x1p-24f; /* zero and subnormal: normal numbers in single precision */
        memcpy(&bits, &value, sizeof bits);
    }
    bits |= sign;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t pl_load_half(const uint8_t *from)
{
    uint16_t half;
    memcpy(&half, from, sizeof half);
    return half;
}

#endif
