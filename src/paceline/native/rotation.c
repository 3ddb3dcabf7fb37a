/* Cosine and sine of rotary angles: reduced by multiples of pi / 2, then the Taylor series about 0. */
#include "program.h"

void turn_by(float angle, float *cosine, float *sine)
{
    const double magic = 0x1.8p52; /* adding it rounds to an integer */
    const double quarters = ((double)angle * 0x1.45f306dc9c883p-1 + magic) - magic;
    /* pi / 2 in two parts; the first has 33 bits, so its product is exact for fewer than 2^20 quarters. */
    const double r = ((double)angle - quarters * 0x1.921fb544p0) - quarters * 0x1.0b4611a626331p-34;
    const double s = r * r;
    double c = s * (-1.0 / 87178291200) + 1.0 / 479001600;
    c = c * s - 1.0 / 3628800;
    c = c * s + 1.0 / 40320;
    c = c * s - 1.0 / 720;
    c = c * s + 1.0 / 24;
    c = (c * s - 0.5) * s + 1.0;
    double d = s * (1.0 / 6227020800) - 1.0 / 39916800;
    d = d * s + 1.0 / 362880;
    d = d * s - 1.0 / 5040;
    d = d * s + 1.0 / 120;
    d = (d * s - 1.0 / 6) * s * r + r;
    const int64_t turns = (int64_t)quarters & 3;
    *cosine = (float)(turns == 0 ? c : turns == 1 ? -d : turns == 2 ? -c : d);
    *sine = (float)(turns == 0 ? d : turns == 1 ? c : turns == 2 ? -d : -c);
}
