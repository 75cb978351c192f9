/* On which cores the threads of a team run, and how they change them.
 *
 * On a busy machine Linux hardly looks for idle cores. A thread that wakes up waits behind another process on the core
 * where it ran before, and two threads stay on one core for milliseconds after another process has left the other one.
 * A team stands still meanwhile, or runs at half its speed, though there is an idle core. So
 *
 *   - whoever waits for a thread that is kept from running takes it to its own core, and sleeps;
 *   - where two are on one core, a helper on another core, which runs only when that has nothing else to do
 *     (SCHED_IDLE; beside processes of other control groups it may run sooner), fetches one of them.
 *
 * To move a thread is to narrow the set of its cores; as soon as it runs it widens it again by itself. Where any of this
 * is refused, threads stay where they are.
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

static inline int32_t current_core(void) { return sched_getcpu() + 1; } /* counted from 1; 0: unknown */

static inline void sleep_while(_Atomic int32_t *word, int32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static inline void wake_all(_Atomic int32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0); }

/* A thread's state. From MOVABLE or MIGRATED somebody claims it as MIGRATING, and only who has claimed it changes its cores. Where
 * its thread wants to stay meanwhile, it says UNWANTED, and whoever moves it gives its cores back: nobody waits for another one
 * that may be kept from running. */
enum { FIXED, MOVABLE, MIGRATING, MIGRATED, UNWANTED };

/* A thread, for those who move it. */
typedef struct {
    int32_t thread;
    _Atomic int32_t core, state; /* core: where it was seen last */
    cpu_set_t allowed;           /* before it was moved */
} movable_thread;

/* The caller's, or NULL. It is kept behind the thread's end, as helpers may look at it. */
static movable_thread *own_thread(void) {
    static _Thread_local movable_thread *own;
    if (!own && (own = calloc(1, sizeof *own))) own->thread = (int32_t)syscall(SYS_gettid);
    return own;
}

static inline int changes(movable_thread *p, int32_t from, int32_t to) {
    return atomic_compare_exchange_strong(&p->state, &from, to);
}

/* `again`: also where it was moved before, and has not run since. Returns whether it was moved. */
static int migrate_to(movable_thread *p, int32_t core, int again) {
    int before = changes(p, MOVABLE, MIGRATING) ? MOVABLE : again && changes(p, MIGRATED, MIGRATING) ? MIGRATED : FIXED;
    if (before == FIXED) return 0;
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core - 1, &only);
    int known = before == MIGRATED || !sched_getaffinity(p->thread, sizeof p->allowed, &p->allowed);
    int moved = known && CPU_ISSET(core - 1, &p->allowed) && !sched_setaffinity(p->thread, sizeof only, &only);
    if (changes(p, MIGRATING, moved ? MIGRATED : before)) return moved;
    if (known) sched_setaffinity(p->thread, sizeof p->allowed, &p->allowed);
    atomic_store(&p->state, FIXED);
    return 0;
}

/* It may be moved from now on. */
static inline void allow_migration(movable_thread *p) {
    if (p) changes(p, FIXED, MOVABLE);
}

/* The caller may run anywhere again where it was moved. */
static inline void restore_affinity(movable_thread *p) {
    if (!p || atomic_load_explicit(&p->state, memory_order_relaxed) != MIGRATED || !changes(p, MIGRATED, MIGRATING)) return;
    sched_setaffinity(0, sizeof p->allowed, &p->allowed);
    atomic_store(&p->state, MOVABLE);
}

/* The caller is not moved any more: outside of a team nobody would give its cores back, and threads that it makes inherit
 * them. */
static void forbid_migration(movable_thread *p) {
    while (p && !changes(p, MOVABLE, FIXED) && !changes(p, MIGRATING, UNWANTED)) {
        int32_t state = atomic_load(&p->state);
        if (state == FIXED || state == UNWANTED) return;
        if (state == MIGRATED) restore_affinity(p);
    }
}

/* Processor time by a clock, -1 where there is no such clock. */
static int64_t used_ns(clockid_t clock) {
    struct timespec used;
    return clock_gettime(clock, &used) ? -1 : used.tv_sec * 1000000000LL + used.tv_nsec;
}

/* Of a thread of this process alone, as pthread_getcpuclockid makes it. */
static inline clockid_t clock_of(const movable_thread *p) { return (clockid_t)((~(unsigned)p->thread << 3) | 6); }

/* Whether it does not run at this moment. It is not known, and then no, of a thread that has ended, and where clocks are so
 * coarse that the caller seems not to run either. */
static int is_kept_from_running(const movable_thread *p) {
    int64_t own = used_ns(CLOCK_THREAD_CPUTIME_ID), its = used_ns(clock_of(p));
    for (int spin = 0; spin < 40; spin++) spin_once();
    return its >= 0 && used_ns(clock_of(p)) == its && used_ns(CLOCK_THREAD_CPUTIME_ID) > own;
}

/* What a core's helper is asked for. */
enum { NOTHING, BEING_ASKED, ASKED };
static struct {
    _Atomic int32_t request, begun, shared;
    movable_thread *_Atomic fetched, *_Atomic other;
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
        for (int32_t now; (now = atomic_load(request)) != ASKED;) sleep_while(request, now);
        movable_thread *fetched = atomic_load(&helpers[core - 1].fetched), *other = atomic_load(&helpers[core - 1].other);
        int32_t shared = atomic_load(&helpers[core - 1].shared);
        atomic_store(request, NOTHING);
        if (atomic_load(&fetched->core) == shared && atomic_load(&other->core) == shared && used_ns(clock_of(fetched)) >= 0)
            migrate_to(fetched, core, 0);
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

/* `fetched` and `other` are both on the caller's core: the first is to be fetched from there to one that is idle, and that no
 * thread of the team is on. */
static void ask_idle_core(movable_thread *fetched, movable_thread *other, movable_thread *const _Atomic *movable,
                          int num_threads) {
    int32_t here = current_core();
    cpu_set_t cores;
    if (here <= 0 || sched_getaffinity(fetched->thread, sizeof cores, &cores)) return;
    CPU_CLR(here - 1, &cores);
    for (int i = 0; i < num_threads; i++) {
        const movable_thread *p = atomic_load(movable + i);
        int32_t taken = p ? atomic_load(&p->core) : 0;
        if (taken) CPU_CLR(taken - 1, &cores);
    }
    for (int32_t core = 1; core <= CPU_SETSIZE; core++) {
        if (!CPU_ISSET(core - 1, &cores)) continue;
        int32_t nothing = NOTHING;
        _Atomic int32_t *request = &helpers[core - 1].request;
        /* One that has not come to what it was asked before has something else on its core. */
        if (!atomic_compare_exchange_strong(request, &nothing, BEING_ASKED) || !has_helper(core)) continue;
        atomic_store(&helpers[core - 1].fetched, fetched);
        atomic_store(&helpers[core - 1].other, other);
        atomic_store(&helpers[core - 1].shared, here);
        atomic_store(request, ASKED);
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
static inline int is_kept_from_running(const movable_thread *p) { return (void)p, 0; }
static inline void ask_idle_core(movable_thread *fetched, movable_thread *other, movable_thread *const _Atomic *movable,
                                 int num_threads) {
    (void)fetched, (void)other, (void)movable, (void)num_threads;
}
#endif
