/* On which cores the threads of a team run, and how they change them.
 *
 * On a busy machine Linux hardly looks for idle cores. A thread that wakes up waits behind another process on the core
 * where it ran before, and two threads stay on one core for milliseconds after another process has left the other one.
 * A team stands still meanwhile, or runs at half its speed, though there is an idle core. So
 *
 *   - whoever waits for a thread that is kept from running takes it to its own core, and sleeps;
 *   - where two are on one core, a helper on another core, which runs only when that has nothing else to do
 *     (SCHED_IDLE), fetches one of them.
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

enum { STAYS, MOVABLE, MOVING, MOVED };

/* A thread, for those who move it. */
typedef struct {
    int32_t thread;
    _Atomic int32_t core, state; /* core: where it was seen last */
    cpu_set_t allowed;           /* before it was moved */
} place;

/* The caller's, or NULL. It is kept behind the thread's end, as helpers may look at it. */
static place *own_place(void) {
    static _Thread_local place *own;
    if (!own && (own = calloc(1, sizeof *own))) own->thread = (int32_t)syscall(SYS_gettid);
    return own;
}

/* Returns whether it was moved. */
static int move_to(place *p, int32_t core) {
    int32_t expected = MOVABLE;
    if (!atomic_compare_exchange_strong(&p->state, &expected, MOVING)) return 0;
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core - 1, &only);
    int moved = !sched_getaffinity(p->thread, sizeof p->allowed, &p->allowed) && CPU_ISSET(core - 1, &p->allowed) &&
                !sched_setaffinity(p->thread, sizeof only, &only);
    atomic_store(&p->state, moved ? MOVED : MOVABLE);
    return moved;
}

/* The caller may be moved from now on. */
static inline void begin_to_move(place *p) {
    int32_t expected = STAYS;
    if (p) atomic_compare_exchange_strong(&p->state, &expected, MOVABLE);
}

/* The caller runs where it was moved to, and may run anywhere again. */
static inline void be_free(place *p) {
    if (!p) return;
    atomic_store_explicit(&p->core, current_core(), memory_order_relaxed);
    if (atomic_load_explicit(&p->state, memory_order_acquire) != MOVED) return;
    sched_setaffinity(0, sizeof p->allowed, &p->allowed);
    atomic_store(&p->state, MOVABLE);
}

/* The caller is moved no more: threads that it makes would inherit what it was narrowed to. */
static void stay(place *p) {
    for (int32_t expected = MOVABLE; p && !atomic_compare_exchange_weak(&p->state, &expected, STAYS); expected = MOVABLE)
        be_free(p);
}

/* Processor time of a thread of this process, -1 where it is none. */
static int64_t used_ns(int32_t thread) {
    struct timespec used;
    clockid_t clock = (clockid_t)((~(unsigned)thread << 3) | 6); /* as pthread_getcpuclockid makes it */
    return clock_gettime(clock, &used) ? -1 : used.tv_sec * 1000000000LL + used.tv_nsec;
}

/* Whether it does not run at this moment; of a thread that has ended, no. */
static int is_kept_from_running(const place *p) {
    int64_t before = used_ns(p->thread);
    for (int spin = 0; spin < 40; spin++) spin_once();
    return before >= 0 && used_ns(p->thread) == before;
}

/* What a core's helper is asked for. */
static struct {
    _Atomic int32_t pending, begun, shared;
    place *_Atomic fetched, *_Atomic other;
} helpers[CPU_SETSIZE];

static void *help(void *argument) {
    int32_t core = (int32_t)(intptr_t)argument;
    const struct sched_param none = {0};
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core - 1, &only);
    if (sched_setaffinity(0, sizeof only, &only) || sched_setscheduler(0, SCHED_IDLE, &none)) return NULL;
    _Atomic int32_t *pending = &helpers[core - 1].pending;
    for (;;) {
        while (!atomic_load(pending)) sleep_while(pending, 0);
        place *fetched = atomic_load(&helpers[core - 1].fetched), *other = atomic_load(&helpers[core - 1].other);
        int32_t shared = atomic_load(&helpers[core - 1].shared);
        atomic_store(pending, 0);
        if (atomic_load(&fetched->core) == shared && atomic_load(&other->core) == shared && used_ns(fetched->thread) >= 0)
            move_to(fetched, core);
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
static void ask_for_core(place *fetched, place *other, place *const _Atomic *places, int num_places) {
    int32_t here = current_core();
    cpu_set_t cores;
    if (here <= 0 || sched_getaffinity(fetched->thread, sizeof cores, &cores)) return;
    CPU_CLR(here - 1, &cores);
    for (int i = 0; i < num_places; i++) {
        const place *p = atomic_load(places + i);
        int32_t taken = p ? atomic_load(&p->core) : 0;
        if (taken) CPU_CLR(taken - 1, &cores);
    }
    int32_t core = 1;
    while (core <= CPU_SETSIZE && !CPU_ISSET(core - 1, &cores)) core++;
    if (core > CPU_SETSIZE || atomic_load(&helpers[core - 1].pending) || !has_helper(core)) return;
    atomic_store(&helpers[core - 1].fetched, fetched);
    atomic_store(&helpers[core - 1].other, other);
    atomic_store(&helpers[core - 1].shared, here);
    atomic_store(&helpers[core - 1].pending, 1);
    wake_all(&helpers[core - 1].pending);
}
#else
typedef struct place place;
static inline int32_t current_core(void) { return 0; }
static inline void sleep_while(_Atomic int32_t *word, int32_t value) { (void)word, (void)value, sched_yield(); }
static inline void wake_all(_Atomic int32_t *word) { (void)word; }
static inline place *own_place(void) { return 0; }
static inline int move_to(place *p, int32_t core) { return (void)p, (void)core, 0; }
static inline void begin_to_move(place *p) { (void)p; }
static inline void be_free(place *p) { (void)p; }
static inline void stay(place *p) { (void)p; }
static inline int is_kept_from_running(const place *p) { return (void)p, 0; }
static inline void ask_for_core(place *fetched, place *other, place *const _Atomic *places, int num_places) {
    (void)fetched, (void)other, (void)places, (void)num_places;
}
#endif
