/* Which instruction set runs: the best that this build and this processor have, unless a test forces another. */
#include <stdatomic.h>
#include <string.h>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

/* Best first. */
static const pl_kernels *const tables[] = {
#if defined(__x86_64__)
    &pl_avx512vnni,
    &pl_avx2,
#elif defined(__aarch64__)
    &pl_neon,
#endif
    &pl_portable,
};

static _Atomic(const pl_kernels *) chosen;

#if defined(__x86_64__)
static int has_f16c(void)
{
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

/* The compiler's built-in also asks whether the operating system saves the wide registers. */
static int runs_here(const pl_kernels *table)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (table == &pl_avx512vnni)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni") && has_f16c();
    if (table == &pl_avx2)
        return __builtin_cpu_supports("avx2") && has_f16c();
#elif defined(__aarch64__)
    if (table == &pl_neon) {
#if defined(__linux__)
        return (getauxval(AT_HWCAP) & (1UL << 20)) != 0; /* HWCAP_ASIMDDP: the dot products of ARMv8.2 */
#else
        return 0;
#endif
    }
#endif
    return table == &pl_portable;
}

const pl_kernels *pl_current(void)
{
    const pl_kernels *table = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (table)
        return table;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if (runs_here(tables[i])) {
            atomic_store_explicit(&chosen, tables[i], memory_order_relaxed);
            return tables[i];
        }
    return &pl_portable;
}

int32_t pl_abi(void)
{
    return PL_ABI;
}

const char *pl_variant(void)
{
    return pl_current()->name;
}

int32_t pl_force_variant(const char *name)
{
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if (strcmp(tables[i]->name, name) == 0 && runs_here(tables[i])) {
            atomic_store_explicit(&chosen, tables[i], memory_order_relaxed);
            return 0;
        }
    return -1;
}
