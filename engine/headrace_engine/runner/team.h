/* Threads that compute something together, started by OpenMP, and how they wait for each other between its parts.
 *
 * OpenMP's own barrier spins for a while wherever the others are. When another process has taken a core, two threads may
 * share the one that is left, and then whoever spins keeps the core from the one that it waits for. Here it sleeps at
 * once. After the centralised barrier of Mellor-Crummey and Scott (1991), asleep by Linux's futex.
 */
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define SPINS_BETWEEN_LOOKS 64 /* at where the others are */

typedef struct {
    _Alignas(64) _Atomic int32_t core; /* where the thread was seen last, counted from 1; 0: it was not */
    _Atomic int32_t meeting;           /* to which it has come already */
} seat;

typedef struct {
    seat *seats;   /* one a thread, zeros at first */
    int32_t spins; /* of a thread that waits, before it sleeps; see openmp.py */
    _Alignas(64) _Atomic int32_t meeting; /* how many there were */
    _Alignas(64) _Atomic int32_t arrived, asleep;
    _Atomic int32_t failed; /* of whoever wants to say so before a meeting */
    int64_t claimed;        /* pieces of work that somebody has; a meeting sets it to 0 */
} team;

typedef struct {
    team *team;
    int thread, threads;
} member;

#ifdef __linux__
static inline int32_t current_core(void) { return sched_getcpu() + 1; }

static inline void sleep_while(_Atomic int32_t *word, int32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static inline void wake_all(_Atomic int32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0); }
#else
static inline int32_t current_core(void) { return 0; }
static inline void sleep_while(_Atomic int32_t *word, int32_t value) { (void)word, (void)value, sched_yield(); }
static inline void wake_all(_Atomic int32_t *word) { (void)word; }
#endif

static inline void spin_once(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Within a parallel region. The team has a seat for each of its threads. */
static inline member join_team(team *t) {
    member own = {t, omp_get_thread_num(), omp_get_num_threads()};
    atomic_store_explicit(&t->seats[own.thread].core, current_core(), memory_order_relaxed);
    return own;
}

/* Whether one that has not come cannot come, as it was seen last on this very core. */
static inline int keeps_from_coming(const member *m, int32_t meeting) {
    int32_t here = current_core();
    for (int thread = 0; thread < m->threads && here > 0; thread++) {
        const seat *other = m->team->seats + thread;
        if (thread != m->thread && atomic_load_explicit(&other->core, memory_order_relaxed) == here &&
            atomic_load_explicit(&other->meeting, memory_order_relaxed) != meeting)
            return 1;
    }
    return 0;
}

static inline int is_over(team *t, int32_t before) { return atomic_load_explicit(&t->meeting, memory_order_acquire) != before; }

static void wait_for_others(const member *m, int32_t before) {
    team *t = m->team;
    for (int32_t spin = 0; spin < t->spins; spin++) {
        if (is_over(t, before)) return;
        if (spin % SPINS_BETWEEN_LOOKS == 0 && keeps_from_coming(m, before + 1)) break;
        spin_once();
    }
    while (!is_over(t, before)) {
        atomic_fetch_add(&t->asleep, 1);
        sleep_while(&t->meeting, before);
        atomic_fetch_sub(&t->asleep, 1);
    }
    atomic_store_explicit(&t->seats[m->thread].core, current_core(), memory_order_relaxed);
}

/* Until all members have come. What each wrote before is then seen by all. */
static inline void meet(const member *m) {
    team *t = m->team;
    if (m->threads == 1) {
        t->claimed = 0;
        return;
    }
    seat *own = t->seats + m->thread;
    int32_t before = atomic_load_explicit(&t->meeting, memory_order_relaxed); /* which cannot change without this one */
    atomic_store_explicit(&own->core, current_core(), memory_order_relaxed);
    atomic_store_explicit(&own->meeting, before + 1, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) < m->threads - 1) {
        wait_for_others(m, before);
        return;
    }
    atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
    t->claimed = 0;
    atomic_store(&t->meeting, before + 1); /* in one order with `asleep`: who sleeps is seen here, or sees this */
    if (atomic_load(&t->asleep)) wake_all(&t->meeting);
}
