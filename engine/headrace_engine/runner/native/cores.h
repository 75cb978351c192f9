/* Moves the threads of a team between cores.
 *
 * On a busy machine Linux rarely looks for idle cores. A thread that wakes up waits behind another process on the core
 * where it ran last, and two threads share one core for milliseconds after another process has left a second one. The
 * team then stops, or runs at half its speed, although a core is idle. Therefore:
 *
 *   - A thread that waits for a descheduled thread moves that thread to its own core, and sleeps.
 *   - If two threads share a core, a helper thread on another core moves one of them there. The helper runs only when its
 *     core has nothing else to do (SCHED_IDLE; next to processes of other control groups it may run sooner).
 *
 * A thread is moved by a narrower affinity mask. It restores the mask itself as soon as it runs. If the system refuses any
 * of these calls, the threads stay where they are.
 */
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

static inline void spin_once(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#ifdef __linux__
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

static inline int32_t current_core(void) { return sched_getcpu() + 1; } /* from 1; 0: unknown */

static inline void sleep_while(_Atomic int32_t *word, int32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static inline void wake_all(_Atomic int32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0); }

/* The state of a thread. A mover claims it by the change from MOVABLE or MIGRATED to MIGRATING, and only the mover changes its
 * affinity then. A thread that must not be moved meanwhile sets UNWANTED, and the mover restores the affinity. So no thread
 * waits for another one that may be descheduled. */
enum { FIXED, MOVABLE, MIGRATING, MIGRATED, UNWANTED };

/* A thread that others may move. */
typedef struct {
    int32_t thread;
    _Atomic int32_t core, state; /* core: the last one reported */
    cpu_set_t allowed;           /* the affinity before the move */
} movable_thread;

/* Returns the record of the calling thread, or NULL. It outlives the thread, because helpers may read it. */
static movable_thread *own_thread(void) {
    static _Thread_local movable_thread *own;
    if (!own && (own = calloc(1, sizeof *own))) own->thread = (int32_t)syscall(SYS_gettid);
    return own;
}

static inline int change_state(movable_thread *p, int32_t from, int32_t to) {
    return atomic_compare_exchange_strong(&p->state, &from, to);
}

/* Returns whether the thread was moved. `again`: also move a thread that has not run since its last move. */
static int migrate_to(movable_thread *p, int32_t core, int again) {
    int before = change_state(p, MOVABLE, MIGRATING) ? MOVABLE : again && change_state(p, MIGRATED, MIGRATING) ? MIGRATED : FIXED;
    if (before == FIXED) return 0;
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core - 1, &only);
    int known = before == MIGRATED || !sched_getaffinity(p->thread, sizeof p->allowed, &p->allowed);
    int moved = known && CPU_ISSET(core - 1, &p->allowed) && !sched_setaffinity(p->thread, sizeof only, &only);
    if (change_state(p, MIGRATING, moved ? MIGRATED : before)) return moved;
    if (known) sched_setaffinity(p->thread, sizeof p->allowed, &p->allowed);
    atomic_store(&p->state, FIXED);
    return 0;
}

/* Allows others to move the thread. */
static inline void allow_migration(movable_thread *p) {
    if (p) change_state(p, FIXED, MOVABLE);
}

/* Restores the affinity of the calling thread if it was moved. */
static inline void restore_affinity(movable_thread *p) {
    if (!p || atomic_load_explicit(&p->state, memory_order_relaxed) != MIGRATED || !change_state(p, MIGRATED, MIGRATING)) return;
    sched_setaffinity(0, sizeof p->allowed, &p->allowed);
    atomic_store(&p->state, MOVABLE);
}

/* Ends the moves of the calling thread. Outside a team nothing would restore its affinity, and threads that it creates
 * inherit it. */
static void forbid_migration(movable_thread *p) {
    while (p && !change_state(p, MOVABLE, FIXED) && !change_state(p, MIGRATING, UNWANTED)) {
        int32_t state = atomic_load(&p->state);
        if (state == FIXED || state == UNWANTED) return;
        if (state == MIGRATED) restore_affinity(p);
    }
}

/* Returns the processor time of a clock in nanoseconds, -1 if there is no such clock. */
static int64_t used_ns(clockid_t clock) {
    struct timespec used;
    return clock_gettime(clock, &used) ? -1 : used.tv_sec * 1000000000LL + used.tv_nsec;
}

/* Returns the clock of one thread of this process, as pthread_getcpuclockid does. */
static inline clockid_t cpu_clock_of(const movable_thread *p) { return (clockid_t)((~(unsigned)p->thread << 3) | 6); }

/* Returns whether the thread is not running now. Returns 0 if that is unknown: the thread has ended, or the clocks are so
 * coarse that even the caller does not seem to run. */
static int is_descheduled(const movable_thread *p) {
    int64_t own = used_ns(CLOCK_THREAD_CPUTIME_ID), its = used_ns(cpu_clock_of(p));
    for (int spin = 0; spin < 40; spin++) spin_once();
    return its >= 0 && used_ns(cpu_clock_of(p)) == its && used_ns(CLOCK_THREAD_CPUTIME_ID) > own;
}

/* The request to the helper of a core. */
enum { NO_REQUEST, CLAIMED, REQUESTED };
static struct {
    _Atomic int32_t request, begun, shared;
    movable_thread *_Atomic moved, *_Atomic other;
} helpers[CPU_SETSIZE];

static void *help(void *argument) {
    int32_t core = (int32_t)(intptr_t)argument;
    const struct sched_param none = {0};
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core - 1, &only);
    if (sched_setaffinity(0, sizeof only, &only) || sched_setscheduler(0, SCHED_IDLE, &none)) return NULL;
    _Atomic int32_t *request = &helpers[core - 1].request;
    for (;;) {
        for (int32_t now; (now = atomic_load(request)) != REQUESTED;) sleep_while(request, now);
        movable_thread *moved = atomic_load(&helpers[core - 1].moved), *other = atomic_load(&helpers[core - 1].other);
        int32_t shared = atomic_load(&helpers[core - 1].shared);
        atomic_store(request, NO_REQUEST);
        if (atomic_load(&moved->core) == shared && atomic_load(&other->core) == shared && used_ns(cpu_clock_of(moved)) >= 0)
            migrate_to(moved, core, 0);
    }
}

static int has_helper(int32_t core) {
    if (atomic_exchange(&helpers[core - 1].begun, 1)) return 1;
    pthread_t thread;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 65536);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
    int failed = pthread_create(&thread, &small, help, (void *)(intptr_t)core);
    pthread_attr_destroy(&small);
    return !failed;
}

/* Requests that `moved` leave the caller's core, where `other` runs too, for an idle core without a thread of the team. */
static void request_idle_core(movable_thread *moved, movable_thread *other, movable_thread *const _Atomic *movable,
                          int num_threads) {
    int32_t here = current_core();
    cpu_set_t cores;
    if (here <= 0 || sched_getaffinity(moved->thread, sizeof cores, &cores)) return;
    CPU_CLR(here - 1, &cores);
    for (int i = 0; i < num_threads; i++) {
        const movable_thread *p = atomic_load(movable + i);
        int32_t taken = p ? atomic_load(&p->core) : 0;
        if (taken) CPU_CLR(taken - 1, &cores);
    }
    for (int32_t core = 1; core <= CPU_SETSIZE; core++) {
        if (!CPU_ISSET(core - 1, &cores)) continue;
        int32_t nothing = NO_REQUEST;
        _Atomic int32_t *request = &helpers[core - 1].request;
        /* A helper that has not handled its previous request is on a busy core. */
        if (!atomic_compare_exchange_strong(request, &nothing, CLAIMED) || !has_helper(core)) continue;
        atomic_store(&helpers[core - 1].moved, moved);
        atomic_store(&helpers[core - 1].other, other);
        atomic_store(&helpers[core - 1].shared, here);
        atomic_store(request, REQUESTED);
        wake_all(request);
        return;
    }
}
#else
typedef struct {
    _Atomic int32_t core;
} movable_thread;
static inline int32_t current_core(void) { return 0; }
static inline void sleep_while(_Atomic int32_t *word, int32_t value) { (void)word, (void)value, sched_yield(); }
static inline void wake_all(_Atomic int32_t *word) { (void)word; }
static inline movable_thread *own_thread(void) { return 0; }
static inline int migrate_to(movable_thread *p, int32_t core, int again) { return (void)p, (void)core, (void)again, 0; }
static inline void allow_migration(movable_thread *p) { (void)p; }
static inline void restore_affinity(movable_thread *p) { (void)p; }
static inline void forbid_migration(movable_thread *p) { (void)p; }
static inline int is_descheduled(const movable_thread *p) { return (void)p, 0; }
static inline void request_idle_core(movable_thread *moved, movable_thread *other, movable_thread *const _Atomic *movable,
                                 int num_threads) {
    (void)moved, (void)other, (void)movable, (void)num_threads;
}
#endif
