/* Runs of random phases on a pool of threads: every task once, no task before the phase before has ended, nothing after the run.
 * Before them, one run in which the caller has gone to sleep when there are tasks again, which need all threads to end.
 *
 *   pool_stress NUM_THREADS NUM_RUNS SEED LIMIT_S
 *
 * Exits 0, or 1 with what went wrong; a run that never ends is killed by the alarm.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels.h"

enum { MAX_PHASES = 60, MAX_TASKS = 40 };

typedef struct {
    _Atomic int32_t *num_ended; /* tasks of the run */
    int32_t num_before;         /* tasks of the phases before */
    int32_t spin;
    int32_t times_run[MAX_TASKS]; /* plain: a second thread in the same task is a race */
    int32_t is_live;
} context;

static _Atomic int32_t num_errors;

static void fail(const char *what, int32_t got, int32_t wanted)
{
    if (atomic_fetch_add(&num_errors, 1) < 5)
        printf("%s: %d, not %d\n", what, got, wanted);
}

static void task(void *argument, int32_t index, int32_t thread)
{
    context *self = argument;
    (void)thread;
    if (!self->is_live)
        fail("a task ran outside its run", index, 0);
    const int32_t num_ended = atomic_load(self->num_ended);
    if (num_ended < self->num_before)
        fail("tasks ended before this phase", num_ended, self->num_before);
    self->times_run[index]++;
    for (volatile int32_t i = 0; i < self->spin * (index % 3); i++)
        ;
    atomic_fetch_add(self->num_ended, 1);
}

static void run_once(pl_pool *pool, unsigned *seed)
{
    static context contexts[MAX_PHASES];
    pl_phase phases[MAX_PHASES];
    _Atomic int32_t num_ended = 0;
    int32_t num_tasks = 0;
    int64_t ended_ns[MAX_PHASES];
    const int32_t num_phases = rand_r(seed) % MAX_PHASES;
    memset(contexts, 0, sizeof contexts);
    memset(phases, 0, sizeof phases);
    for (int32_t i = 0; i < num_phases; i++) {
        const int32_t kind = rand_r(seed) % 4;
        phases[i] = (pl_phase){task, &contexts[i], kind == 0 ? 0 : kind == 1 ? 1 : rand_r(seed) % MAX_TASKS, &ended_ns[i]};
        contexts[i].num_ended = &num_ended;
        contexts[i].num_before = num_tasks;
        contexts[i].spin = rand_r(seed) % 8 ? 10 : 20000; /* at times so long that those who wait go to sleep */
        contexts[i].is_live = 1;
        num_tasks += phases[i].num_tasks;
    }
    pl_pool_run(pool, phases, num_phases);
    if (num_ended != num_tasks)
        fail("tasks that ended", num_ended, num_tasks);
    for (int32_t i = 0; i < num_phases; i++) {
        if (i > 0 && ended_ns[i] < ended_ns[i - 1])
            fail("a phase ended before the one before it", i, i - 1);
        for (int32_t j = 0; j < MAX_TASKS; j++)
            if (contexts[i].times_run[j] != (j < phases[i].num_tasks))
                fail("times that a task ran", contexts[i].times_run[j], j < phases[i].num_tasks);
    }
    for (int32_t i = 0; i < MAX_PHASES; i++)
        contexts[i].is_live = 0;
    memset(phases, 0xff, sizeof phases); /* whoever reads them now reads nonsense */
}

typedef struct {
    int32_t num_threads, waits_for_sleep;
    _Atomic int32_t num_begun, has_caller_ended;
} meeting;

/* Whether the first thread of this process, which calls the pool, is asleep. */
static int32_t is_caller_asleep(void)
{
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)getpid());
    FILE *file = fopen(path, "r");
    if (!file)
        return 1; /* not Linux: nobody sleeps there */
    const char *end = fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    fclose(file);
    return !end || end[1] != ' ' || end[2] == 'S';
}

/* One task per thread, for none ends before all have begun. */
static void meet(void *argument, int32_t index, int32_t thread)
{
    meeting *self = argument;
    (void)index;
    atomic_fetch_add(&self->num_begun, 1);
    while (atomic_load(&self->num_begun) < self->num_threads)
        usleep(100);
    if (thread == 0)
        atomic_store(&self->has_caller_ended, 1); /* it sleeps nowhere but in the pool from now on */
    while (self->waits_for_sleep && thread > 0 && !(atomic_load(&self->has_caller_ended) && is_caller_asleep()))
        usleep(100);
}

static void wake_caller(pl_pool *pool)
{
    const int32_t num_threads = pl_pool_threads(pool);
    meeting first = {.num_threads = num_threads, .waits_for_sleep = 1}, second = {.num_threads = num_threads};
    const pl_phase phases[] = {
        {.run = meet, .context = &first, .num_tasks = num_threads}, {.run = meet, .context = &second, .num_tasks = num_threads}};
    pl_pool_run(pool, phases, 2);
    if (second.num_begun != num_threads)
        fail("tasks after the caller's sleep", second.num_begun, num_threads);
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    alarm((unsigned)atoi(argv[4]));
    const int32_t num_threads = atoi(argv[1]), num_runs = atoi(argv[2]);
    unsigned seed = (unsigned)atoi(argv[3]);
    pl_pool *pool = pl_pool_new(num_threads);
    if (!pool || pl_pool_threads(pool) != num_threads)
        return 2;
    wake_caller(pool);
    for (int32_t run = 0; run < num_runs; run++) {
        run_once(pool, &seed);
        if (rand_r(&seed) % 16 == 0)
            usleep(200); /* the workers are asleep by now */
    }
    pl_pool_free(pool);
    pl_pool_free(NULL);
    return num_errors != 0;
}
