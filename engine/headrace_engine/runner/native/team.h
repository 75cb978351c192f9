/* A team of OpenMP threads, and its barrier. Include after cores.h.
 *
 * OpenMP's own barrier spins without a look at where the other threads run. If another process has taken a core, two threads
 * may share the remaining one, and the spinning thread keeps the core from the thread that it waits for. This barrier sleeps
 * at once in that case, and moves threads between cores (cores.h). It is the centralised barrier of Mellor-Crummey and Scott
 * (1991) with a futex to sleep on.
 */
#include <omp.h>

#define SPINS_BETWEEN_CORE_CHECKS 64 /* checks of where the other threads run */
#define SPINS_BETWEEN_RUN_CHECKS 512 /* checks of whether they run, by system calls */
#define MAX_MOVED 64                 /* in a team with more threads, none is moved */

enum { ABSENT, AT_WORK, ASLEEP };

typedef struct {
    _Alignas(64) _Atomic int32_t core; /* the last one that the thread reported, from 1; 0: none */
    _Atomic int32_t generation;        /* of the last barrier at which the thread arrived */
    _Atomic int32_t presence;
} team_slot;

typedef struct {
    team_slot *slots;                 /* one for each thread, initially zero */
    movable_thread *_Atomic *movable; /* one for each thread, NULL before its first team; NULL: no thread is moved */
    int32_t spins;                    /* of a waiting thread before it sleeps; see system/openmp.py */
    _Alignas(64) _Atomic int32_t generation; /* number of barriers passed */
    _Alignas(64) _Atomic int32_t arrived, asleep;
    _Atomic int32_t failed; /* set by any thread before a barrier */
    int64_t claimed;        /* units of work that are claimed; a barrier sets it to 0 */
} team;

typedef struct {
    team *team;
    movable_thread *self;
    int thread, threads;
} member;

/* Returns the records for a team that the caller is about to start, NULL if the team has one thread or too many to move.
 * From now on, threads that were in an earlier team may be moved, even before they join this one. */
static inline movable_thread *_Atomic *movable_threads(int threads) {
    static _Thread_local movable_thread *_Atomic movable[MAX_MOVED];
    if (threads < 2 || threads > MAX_MOVED) return NULL;
    for (int thread = 0; thread < threads; thread++) allow_migration(atomic_load(movable + thread));
    return movable;
}

/* Reports that this member runs, and on which core. Restores its affinity. */
static inline void report_core(const member *m) {
    team_slot *own = m->team->slots + m->thread;
    restore_affinity(m->self);
    int32_t core = current_core();
    if (m->self) atomic_store_explicit(&m->self->core, core, memory_order_relaxed);
    atomic_store_explicit(&own->core, core, memory_order_relaxed);
    atomic_store_explicit(&own->presence, AT_WORK, memory_order_relaxed);
}

/* Call within a parallel region. The team has a slot for each thread. */
static inline member join_team(team *t) {
    member own = {t, t->movable ? own_thread() : NULL, omp_get_thread_num(), omp_get_num_threads()};
    allow_migration(own.self);
    report_core(&own);
    if (t->movable) atomic_store(t->movable + own.thread, own.self);
    return own;
}

/* Call before the region ends. */
static inline void leave_team(const member *m) { forbid_migration(m->self); }

static inline int has_arrived(const member *m, int thread, int32_t generation) {
    /* also true for a later barrier, if this thread was descheduled for long */
    return atomic_load_explicit(&m->team->slots[thread].generation, memory_order_relaxed) - generation >= 0;
}

/* Returns a thread that has not arrived and was last seen on the caller's core, where it cannot run; -1 if there is none. */
static inline int thread_on_same_core(const member *m, int32_t generation) {
    int32_t here = current_core();
    for (int thread = 0; thread < m->threads && here > 0; thread++)
        if (thread != m->thread && !has_arrived(m, thread, generation) &&
            atomic_load_explicit(&m->team->slots[thread].core, memory_order_relaxed) == here)
            return thread;
    return -1;
}

/* Separates two threads that share a core: one of them moves to an idle core. Thread 0 stays, as it may be about to continue
 * without the team. */
static void separate(const member *m, int other) {
    movable_thread *own = m->self, *others = m->team->movable ? atomic_load(m->team->movable + other) : NULL;
    if (!own || !others) return;
    request_idle_core(other ? others : own, other ? own : others, m->team->movable, m->threads);
}

static inline int is_passed(team *t, int32_t before) { return atomic_load_explicit(&t->generation, memory_order_acquire) != before; }

/* Moves one descheduled thread that has not arrived to the caller's core. Returns whether there was one. Threads that sleep
 * or have not joined count only if `all` is set, as they may be about to wake up elsewhere. */
static int pull_thread(const member *m, int32_t before, int all) {
    for (int thread = 0; m->self && thread < m->threads && !is_passed(m->team, before); thread++) {
        if (thread == m->thread || has_arrived(m, thread, before + 1)) continue;
        movable_thread *other = atomic_load(m->team->movable + thread);
        if (!other || !(all || atomic_load(&m->team->slots[thread].presence) == AT_WORK)) continue;
        if (is_descheduled(other) && !has_arrived(m, thread, before + 1) && migrate_to(other, current_core(), 1)) return 1;
    }
    return 0;
}

/* Returns whether the barrier was passed before it was time to sleep. */
static int spin_until_passed(const member *m, int32_t before) {
    for (int32_t spin = 0; spin < m->team->spins; spin++) {
        if (is_passed(m->team, before)) return 1;
        int other = spin % SPINS_BETWEEN_CORE_CHECKS ? -1 : thread_on_same_core(m, before + 1);
        if (other >= 0) {
            separate(m, other);
            return 0;
        }
        if (spin % SPINS_BETWEEN_RUN_CHECKS == SPINS_BETWEEN_RUN_CHECKS - 1 && pull_thread(m, before, 0)) return 0;
        spin_once();
    }
    pull_thread(m, before, 1);
    return 0;
}

static void wait_at_barrier(const member *m, int32_t before) {
    team *t = m->team;
    if (spin_until_passed(m, before)) return;
    atomic_store_explicit(&t->slots[m->thread].presence, ASLEEP, memory_order_relaxed);
    while (!is_passed(t, before)) {
        atomic_fetch_add(&t->asleep, 1);
        sleep_while(&t->generation, before);
        atomic_fetch_sub(&t->asleep, 1);
    }
    report_core(m);
}

/* Waits until all members have arrived. Everything that they wrote before is then visible to all. */
static inline void barrier(const member *m) {
    team *t = m->team;
    if (m->threads == 1) {
        t->claimed = 0;
        return;
    }
    report_core(m);
    int32_t before = atomic_load_explicit(&t->generation, memory_order_relaxed); /* cannot change before this thread arrives */
    atomic_store_explicit(&t->slots[m->thread].generation, before + 1, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) < m->threads - 1) {
        wait_at_barrier(m, before);
        return;
    }
    atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
    t->claimed = 0;
    atomic_store(&t->generation, before + 1); /* sequentially consistent with `asleep`: a sleeper is seen here, or sees this */
    if (atomic_load(&t->asleep)) wake_all(&t->generation);
}
