/* Runs every kernel of every instruction set of this processor on made-up numbers, and compares each with the portable one bit by bit.
 *
 * Prints one line per instruction set, with a checksum that is the same on all machines; ends with 1 at the first difference.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { MAX_ROWS = 50, MAX_K = 1536, MAX_TOKENS = 9 };

static pl_pool *pool;
static uint64_t state;
static uint64_t checksum;

static uint32_t draw(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

static float draw_float(void)
{
    return (float)(int32_t)(draw() - 0x40000000) * 0x1p-28f; /* -4 .. 4, in steps that are exact */
}

static void add_to_checksum(const void *from, size_t num_bytes)
{
    const uint8_t *bytes = from;
    for (size_t i = 0; i < num_bytes; i++)
        checksum = (checksum ^ bytes[i]) * 1099511628211u;
}

static int differ(const char *what, const void *a, const void *b, size_t num_bytes)
{
    add_to_checksum(a, num_bytes);
    if (memcmp(a, b, num_bytes) == 0)
        return 0;
    printf("%s: %s differs from portable\n", pl_variant(), what);
    return 1;
}

/* `name` against portable: 0 if all products agree. */
static int compare_products(const char *name, int32_t format, int32_t rows, int32_t k, int32_t count)
{
    static uint8_t elements[MAX_ROWS * MAX_K];
    static uint16_t scales[MAX_ROWS * MAX_K / PL_GROUP], minima[MAX_ROWS * MAX_K / PL_GROUP];
    static float x[MAX_TOKENS * MAX_K], bias[MAX_ROWS], out[MAX_TOKENS * MAX_ROWS], expected[MAX_TOKENS * MAX_ROWS];
    for (int32_t i = 0; i < rows * k; i++)
        elements[i] = (uint8_t)(format == PL_W4 ? draw() % 16 : draw() % 255 - 127);
    for (int32_t i = 0; i < rows * (k / PL_GROUP); i++) {
        scales[i] = (uint16_t)(draw() % 0x7c00 | draw() % 2 << 15); /* any finite one */
        minima[i] = (uint16_t)(draw() % 0x7c00 | draw() % 2 << 15);
    }
    for (int32_t i = 0; i < count * k; i++)
        x[i] = draw_float();
    for (int32_t i = 0; i < rows; i++)
        bias[i] = draw_float();
    const size_t num_bytes = (size_t)pl_packed_bytes(format, rows, k);
    uint8_t *packed = aligned_alloc(64, (num_bytes + 63) / 64 * 64);
    if (packed == NULL)
        return 1;
    pl_pack(format, rows, k, elements, scales, format == PL_W4 ? minima : NULL, packed);
    const pl_matrix matrix = {.data = packed, .bias = bias, .rows = rows, .k = k, .format = format};
    int failed = pl_force_variant("portable") != 0 || pl_linear(pool, &matrix, x, count, expected) != 0;
    failed |= pl_force_variant(name) != 0 || pl_linear(pool, &matrix, x, count, out) != 0;
    failed = failed || differ(format == PL_W4 ? "a 4-bit product" : "an 8-bit product", out, expected, sizeof(float) * (size_t)(rows * count));
    for (int32_t row = 0; row < rows && !failed; row += 7) {
        pl_unpack_row(&matrix, row, x);
        add_to_checksum(x, sizeof(float) * (size_t)k);
    }
    free(packed);
    return failed;
}

static int compare_quantised(const char *name, float size)
{
    float x[320], scale[10], expected_scale[10];
    int8_t q[320], expected_q[320];
    int32_t sum[10], expected_sum[10];
    for (int32_t i = 0; i < 320; i++)
        x[i] = draw_float() * size;
    pl_force_variant("portable");
    pl_quantise(x, 320, expected_q, expected_scale, expected_sum);
    pl_force_variant(name);
    pl_quantise(x, 320, q, scale, sum);
    return differ("an element", q, expected_q, sizeof q) || differ("a scale", scale, expected_scale, sizeof scale) ||
           differ("a sum", sum, expected_sum, sizeof sum);
}

static int compare(const char *name)
{
    static const int32_t shapes[][3] = {{1, 32, 1}, {16, 64, 2}, {50, 576, 9}, {33, 1536, 4}, {17, 1056, 7}, {48, 96, 3}};
    static const float sizes[] = {0.0f, 0x1p-149f, 0x1p-128f, 0x1p-60f, 1.0f, 0x1p100f, 0x1p125f};
    int failed = 0;
    state = 1;
    checksum = 14695981039346656037u;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int32_t format = 0; format < 2 && !failed; format++)
            failed = compare_products(name, format, shapes[i][0], shapes[i][1], shapes[i][2]);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !failed; i++)
        failed = compare_quantised(name, sizes[i]);
    printf("%s %s %016llx\n", name, failed ? "differs" : "agrees", (unsigned long long)checksum);
    return failed;
}

int main(void)
{
    static const char *const names[] = {"portable", "avx2", "avx512vnni", "neon"};
    int failed = 0;
    pool = pl_pool_new(2);
    if (pool == NULL)
        return 2;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (pl_force_variant(names[i]) == 0)
            failed |= compare(names[i]);
    pl_pool_free(pool);
    return failed;
}
