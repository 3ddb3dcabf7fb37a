/* A pool of threads that runs phases of tasks; the caller is one of them, the others sleep outside `pl_pool_run`.
 *
 * Tasks are taken from one word that holds which phase it is, how many tasks that phase has and how many were taken. One fetch_add
 * therefore says both which task was taken and of which phase: a thread that comes late, from a phase or a run that ended long ago, takes
 * a task of the present one or none, and never looks at a phase that may be gone. The thread that ends a phase's last task begins the
 * next phase, whichever thread it is, so a thread without a core holds up at most the task that it has in hand.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "kernels.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define SPIN_NS 50000  /* a phase of a small model is shorter than a sleep and a wake */
#define SPIN_LOOKS 64  /* between two looks at the clock */

/* The word: phase number (20 bits), tasks of the phase (22), tasks taken (22). No tasks: no run is going on. */
#define COUNT_BITS 22
#define COUNT_MASK ((1u << COUNT_BITS) - 1)
#define NUMBER_MASK 0xfffffu

typedef struct {
    pl_pool *pool;
    pthread_t handle;
    int32_t index;
} worker;

struct pl_pool {
    _Alignas(64) _Atomic uint64_t word;
    _Alignas(64) _Atomic uint32_t num_ended;    /* tasks of the present phase */
    _Alignas(64) _Atomic uint32_t signal;       /* changes after the word did; what sleepers wait for */
    _Atomic int32_t num_sleeping;               /* workers */
    _Atomic int32_t is_caller_sleeping;
    _Alignas(64) _Atomic int32_t is_closed;
    /* Written by the caller before a run's first phase begins, and by nobody until its last one has ended. */
    const pl_phase *phases;
    int32_t num_phases;
    uint32_t first_number; /* of phases[0] */
    int32_t num_threads;
    worker *workers; /* num_threads - 1; worker i is thread i + 1 */
};

static inline uint32_t number_of(uint64_t word)
{
    return (uint32_t)(word >> (2 * COUNT_BITS));
}

static inline uint32_t tasks_of(uint64_t word)
{
    return (uint32_t)(word >> COUNT_BITS) & COUNT_MASK;
}

static inline uint32_t taken_of(uint64_t word)
{
    return (uint32_t)word & COUNT_MASK;
}

static inline int has_task(uint64_t word)
{
    return taken_of(word) < tasks_of(word);
}

/* Which task a ticket is for. Threads that keep pace take every num_threads-th ticket, so each of them goes through a stretch of its own,
 * and what it asks for ahead of one task belongs to its next. */
static inline int32_t task_of(uint32_t ticket, uint32_t num_tasks, uint32_t num_threads)
{
    const uint32_t stretch = ticket % num_threads, rest = num_tasks % num_threads;
    return (int32_t)(stretch * (num_tasks / num_threads) + (stretch < rest ? stretch : rest) + ticket / num_threads);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void sleep_until_changed(_Atomic uint32_t *from, uint32_t value)
{
#if defined(__linux__)
    syscall(SYS_futex, from, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    (void)from, (void)value;
    sched_yield();
#endif
}

static void wake_all(_Atomic uint32_t *at)
{
#if defined(__linux__)
    syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
#else
    (void)at;
#endif
}

/* Begin the phase after `index`, or end the run. Called by one thread while no task of the run is in hand.
 *
 * A phase of one task is run here and now, and the others never hear of it: a norm of one token takes no longer than it takes to tell them.
 */
static void begin_next(pl_pool *pool, int32_t index, int32_t thread, int64_t ended_ns)
{
    uint32_t num_tasks = 0;
    for (index++; index < pool->num_phases; index++) {
        const pl_phase *phase = &pool->phases[index];
        if (phase->num_tasks > 1) {
            num_tasks = (uint32_t)phase->num_tasks;
            break;
        }
        if (phase->num_tasks == 1)
            phase->run(phase->context, 0, thread);
        if (phase->ended_ns)
            *phase->ended_ns = ended_ns = phase->num_tasks == 1 || ended_ns == 0 ? now_ns() : ended_ns;
    }
    const uint64_t number = (pool->first_number + (uint32_t)index) & NUMBER_MASK;
    atomic_store_explicit(&pool->num_ended, 0, memory_order_relaxed);
    atomic_store(&pool->word, number << (2 * COUNT_BITS) | (uint64_t)num_tasks << COUNT_BITS);
    atomic_fetch_add(&pool->signal, 1);
    /* A run's end concerns the caller alone. */
    if (atomic_load(&pool->is_caller_sleeping) || (num_tasks > 0 && atomic_load(&pool->num_sleeping) > 0))
        wake_all(&pool->signal);
}

/* Run tasks of the phase that `word`, with a task in hand, belongs to, until none is left; begin the next phase if they were the last. */
static void run_tasks(pl_pool *pool, uint64_t word, int32_t thread)
{
    const int32_t index = (int32_t)((number_of(word) - pool->first_number) & NUMBER_MASK);
    const pl_phase *phase = &pool->phases[index];
    const uint32_t num_tasks = tasks_of(word);
    uint32_t num_run = 0;
    do {
        phase->run(phase->context, task_of(taken_of(word), num_tasks, (uint32_t)pool->num_threads), thread);
        num_run++;
        word = atomic_fetch_add_explicit(&pool->word, 1, memory_order_acq_rel); /* still this phase: its count lacks num_run */
    } while (has_task(word));
    if (atomic_fetch_add_explicit(&pool->num_ended, num_run, memory_order_acq_rel) + num_run < num_tasks)
        return;
    int64_t ended_ns = 0;
    if (phase->ended_ns)
        *phase->ended_ns = ended_ns = now_ns();
    begin_next(pool, index, thread, ended_ns);
}

/* Until the phase of `word` is over: spin first if `may_spin`, then sleep. May return early. */
static void wait_for_change(pl_pool *pool, uint64_t word, int may_spin, int32_t thread)
{
    const uint32_t number = number_of(word);
    if (may_spin) {
        const int64_t deadline = now_ns() + SPIN_NS;
        do {
            for (int i = 0; i < SPIN_LOOKS; i++) {
                if (number_of(atomic_load_explicit(&pool->word, memory_order_acquire)) != number)
                    return;
                relax();
            }
        } while (now_ns() < deadline);
    }
    _Atomic int32_t *sleeping = thread == 0 ? &pool->is_caller_sleeping : &pool->num_sleeping;
    const uint32_t signal = atomic_load(&pool->signal);
    atomic_fetch_add(sleeping, 1);
    /* Whoever changes the word changes the signal next and then looks for sleepers: it sees this one, or this one sees the change. */
    if (number_of(atomic_load(&pool->word)) == number && !atomic_load(&pool->is_closed))
        sleep_until_changed(&pool->signal, signal);
    atomic_fetch_sub(sleeping, 1);
}

/* One round of every thread: tasks if there are any, else wait. Returns whether a run goes on. */
static int take_part(pl_pool *pool, int32_t thread)
{
    uint64_t word = atomic_load_explicit(&pool->word, memory_order_acquire);
    if (has_task(word)) {
        word = atomic_fetch_add_explicit(&pool->word, 1, memory_order_acq_rel);
        if (has_task(word)) {
            run_tasks(pool, word, thread);
            return 1;
        }
    }
    const int is_running = tasks_of(word) > 0;
    if (is_running || thread > 0)
        wait_for_change(pool, word, is_running, thread);
    return is_running;
}

static void *work(void *argument)
{
    const worker *self = argument;
    while (!atomic_load(&self->pool->is_closed))
        take_part(self->pool, self->index);
    return NULL;
}

static void run_alone(const pl_phase *phases, int32_t num_phases)
{
    for (int32_t i = 0; i < num_phases; i++) {
        for (int32_t task = 0; task < phases[i].num_tasks; task++)
            phases[i].run(phases[i].context, task, 0);
        if (phases[i].ended_ns)
            *phases[i].ended_ns = now_ns();
    }
}

int32_t pl_pool_run(pl_pool *pool, const pl_phase *phases, int32_t num_phases)
{
    for (int32_t i = 0; i < num_phases; i++)
        if (phases[i].num_tasks > PL_MAX_TASKS) /* the word has no room for them */
            return -2;
    if (pool->num_threads == 1) {
        run_alone(phases, num_phases);
        return 0;
    }
    const uint64_t word = atomic_load(&pool->word);
    pool->phases = phases;
    pool->num_phases = num_phases;
    pool->first_number = (number_of(word) + 1) & NUMBER_MASK;
    begin_next(pool, -1, 0, 0);
    while (take_part(pool, 0))
        ;
    return 0;
}

int32_t pl_pool_threads(const pl_pool *pool)
{
    return pool->num_threads;
}

/* Signals are for the threads of the program, not for these. */
static int start_worker(worker *one)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int status = pthread_create(&one->handle, NULL, work, one);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}

pl_pool *pl_pool_new(int32_t num_threads)
{
    pl_pool *pool = aligned_alloc(64, (sizeof(pl_pool) + 63) / 64 * 64);
    if (!pool)
        return NULL;
    *pool = (pl_pool){.num_threads = 1};
    pool->workers = calloc((size_t)num_threads, sizeof(worker));
    if (!pool->workers) {
        free(pool);
        return NULL;
    }
    for (int32_t i = 0; i < num_threads - 1; i++) {
        pool->workers[i] = (worker){.pool = pool, .index = i + 1};
        if (start_worker(&pool->workers[i]) != 0) {
            pl_pool_free(pool);
            return NULL;
        }
        pool->num_threads++;
    }
    return pool;
}

void pl_pool_free(pl_pool *pool)
{
    if (!pool)
        return;
    atomic_store(&pool->is_closed, 1);
    atomic_fetch_add(&pool->signal, 1);
    wake_all(&pool->signal);
    for (int32_t i = 0; i < pool->num_threads - 1; i++)
        pthread_join(pool->workers[i].handle, NULL);
    free(pool->workers);
    free(pool);
}
