/* Threads that compute something together, started by OpenMP, and how they wait for each other between its parts. After
 * cores.h.
 *
 * OpenMP's own barrier spins for a while wherever the others are. When another process has taken a core, two threads may
 * share the one that is left, and then whoever spins keeps the core from the one that it waits for. Here it sleeps at
 * once, and threads change their cores (`cores.h`). After the centralised barrier of Mellor-Crummey and Scott (1991),
 * asleep by Linux's futex.
 */
#include <omp.h>

#define SPINS_BETWEEN_LOOKS 64    /* at where the others are */
#define SPINS_BETWEEN_CHECKS 512  /* of whether they run, by system calls */
#define MOST_MOVED 64             /* threads of a team that are moved; of more none is */

enum { ABSENT, AT_WORK, ASLEEP };

typedef struct {
    _Alignas(64) _Atomic int32_t core; /* where the thread was seen last, counted from 1; 0: it was not */
    _Atomic int32_t meeting;           /* to which it has come already */
    _Atomic int32_t presence;
} seat;

typedef struct {
    seat *seats;             /* one a thread, zeros at first */
    movable_thread *_Atomic *movable;  /* one a thread, as a team before had them, or NULL; NULL itself: none is moved */
    int32_t spins;           /* of a thread that waits, before it sleeps; see openmp.py */
    _Alignas(64) _Atomic int32_t meeting; /* how many there were */
    _Alignas(64) _Atomic int32_t arrived, asleep;
    _Atomic int32_t failed; /* of whoever wants to say so before a meeting */
    int64_t claimed;        /* pieces of work that somebody has; a meeting sets it to 0 */
} team;

typedef struct {
    team *team;
    movable_thread *self;
    int thread, threads;
} member;

/* Of the threads of a team that whoever calls is about to begin; NULL where it has too many to move them, or one alone. From now
 * on they may be moved, those that have not joined among them, as far as they were in one before. */
static inline movable_thread *_Atomic *movable_threads(int threads) {
    static _Thread_local movable_thread *_Atomic movable[MOST_MOVED];
    if (threads < 2 || threads > MOST_MOVED) return NULL;
    for (int thread = 0; thread < threads; thread++) allow_migration(atomic_load(movable + thread));
    return movable;
}

/* This member is at work, on this core, and may run on any other, too. */
static inline void be_seen(const member *m) {
    seat *own = m->team->seats + m->thread;
    restore_affinity(m->self);
    int32_t core = current_core();
    if (m->self) atomic_store_explicit(&m->self->core, core, memory_order_relaxed);
    atomic_store_explicit(&own->core, core, memory_order_relaxed);
    atomic_store_explicit(&own->presence, AT_WORK, memory_order_relaxed);
}

/* Within a parallel region. The team has a seat for each of its threads. */
static inline member join_team(team *t) {
    member own = {t, t->movable ? own_thread() : NULL, omp_get_thread_num(), omp_get_num_threads()};
    allow_migration(own.self);
    be_seen(&own);
    if (t->movable) atomic_store(t->movable + own.thread, own.self);
    return own;
}

/* Before the region ends, where a team moves its threads. */
static inline void leave_team(const member *m) { forbid_migration(m->self); }

static inline int has_come(const member *m, int thread, int32_t meeting) {
    /* or to a later one, where this thread was long kept from looking */
    return atomic_load_explicit(&m->team->seats[thread].meeting, memory_order_relaxed) - meeting >= 0;
}

/* One that has not come and cannot come, as it was seen last on this very core; -1 where there is none. */
static inline int kept_from_coming(const member *m, int32_t meeting) {
    int32_t here = current_core();
    for (int thread = 0; thread < m->threads && here > 0; thread++)
        if (thread != m->thread && !has_come(m, thread, meeting) &&
            atomic_load_explicit(&m->team->seats[thread].core, memory_order_relaxed) == here)
            return thread;
    return -1;
}

/* This thread and another one are on one core, and one of them is to go to an idle one: not the first of the team, which may
 * be about to go on without a team. */
static void part(const member *m, int other) {
    movable_thread *own = m->self, *its = m->team->movable ? atomic_load(m->team->movable + other) : NULL;
    if (!own || !its) return;
    ask_idle_core(other ? its : own, other ? own : its, m->team->movable, m->threads);
}

static inline int is_over(team *t, int32_t before) { return atomic_load_explicit(&t->meeting, memory_order_acquire) != before; }

/* One that has not come, and does not run, comes to this core. Of those that sleep or have not begun it is not asked
 * unless `all`: they may be about to wake up elsewhere. Returns whether there was one. */
static int pull_one(const member *m, int32_t before, int all) {
    for (int thread = 0; m->self && thread < m->threads && !is_over(m->team, before); thread++) {
        if (thread == m->thread || has_come(m, thread, before + 1)) continue;
        movable_thread *its = atomic_load(m->team->movable + thread);
        if (!its || !(all || atomic_load(&m->team->seats[thread].presence) == AT_WORK)) continue;
        if (is_kept_from_running(its) && !has_come(m, thread, before + 1) && migrate_to(its, current_core(), 1)) return 1;
    }
    return 0;
}

/* Returns whether the meeting was over before it was time to sleep. */
static int spin_until_over(const member *m, int32_t before) {
    for (int32_t spin = 0; spin < m->team->spins; spin++) {
        if (is_over(m->team, before)) return 1;
        int other = spin % SPINS_BETWEEN_LOOKS ? -1 : kept_from_coming(m, before + 1);
        if (other >= 0) {
            part(m, other);
            return 0;
        }
        if (spin % SPINS_BETWEEN_CHECKS == SPINS_BETWEEN_CHECKS - 1 && pull_one(m, before, 0)) return 0;
        spin_once();
    }
    pull_one(m, before, 1);
    return 0;
}

static void wait_for_others(const member *m, int32_t before) {
    team *t = m->team;
    if (spin_until_over(m, before)) return;
    atomic_store_explicit(&t->seats[m->thread].presence, ASLEEP, memory_order_relaxed);
    while (!is_over(t, before)) {
        atomic_fetch_add(&t->asleep, 1);
        sleep_while(&t->meeting, before);
        atomic_fetch_sub(&t->asleep, 1);
    }
    be_seen(m);
}

/* Until all members have come. What each wrote before is then seen by all. */
static inline void meet(const member *m) {
    team *t = m->team;
    if (m->threads == 1) {
        t->claimed = 0;
        return;
    }
    be_seen(m);
    int32_t before = atomic_load_explicit(&t->meeting, memory_order_relaxed); /* which cannot change without this one */
    atomic_store_explicit(&t->seats[m->thread].meeting, before + 1, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) < m->threads - 1) {
        wait_for_others(m, before);
        return;
    }
    atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
    t->claimed = 0;
    atomic_store(&t->meeting, before + 1); /* in one order with `asleep`: who sleeps is seen here, or sees this */
    if (atomic_load(&t->asleep)) wake_all(&t->meeting);
}
