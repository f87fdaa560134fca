/* The native worker: what its files share.
 *
 *   lanes.c   lanes, tickets, `after`, the ready queues of the units; nothing runs here
 *   run.c     how a command runs: executables through libtorch's C ABI, copies, sleeps
 *   threads.c who runs it: threads, the hand-over to Python, waiting
 *   end.c     how it all begins and ends
 *   bell.c    sleeping and waking
 *
 * One mutex guards a runtime. Nobody waits, runs a command or wakes a thread while holding it,
 * but for copies that are quicker than a wake-up: bells to ring are collected in a `wake` and rung
 * behind the unlock.
 */
#pragma once
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define NS_MOST_THREADS 6 /* of a device: as many as its units have queues */
#define NS_EXPORT __attribute__((visibility("default")))

enum { NS_OUTSTANDING = 1024, NS_ROOM_AGAIN = NS_OUTSTANDING - 64, NS_INTERVALS = 1 << 16 };
enum { NS_COMPUTE, NS_TENSOR_OP, NS_COLLECTIVES, NS_UNITS };
enum { NS_MARKER, NS_PLEDGE, NS_SLEEP, NS_COPY, NS_EXECUTE, NS_PYTHON };
enum { NS_FULL = -1, NS_CLOSED = -2, NS_UNKNOWN_LANE = -3 };

/* Four words that the caller owns, and keeps until the last command that names them completed.
 * `owner` is a handle of a tensor that keeps `data` alive; NULL where the caller does. */
typedef struct ns_buffer {
    void *data;
    void *owner;
    int64_t nbytes;
    int64_t poisoned;
} ns_buffer;

/* Somebody sleeping. Rung once; lives on the sleeper's stack. */
typedef struct ns_bell {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    bool rung;
    bool listed; /* guarded by the runtime's mutex: nobody has decided to ring yet */
    int64_t value;
    struct ns_bell *next;
} ns_bell;

typedef struct ns_entry {
    struct ns_entry *next; /* behind it in its lane */
    struct ns_entry *next_for_python;
    struct ns_lane *lane;
    int64_t value, key, name;
    int kind, unit, blocked;
    bool queued, started, cancelled, reported, quick, poisoned, overwrites, offsets;
    double began, ended;
    int64_t failed; /* what ns_run returned */
    char *message;
    double *stamp;
    int64_t words[]; /* by kind, see ns_submit */
} ns_entry;

typedef struct ns_item {
    int64_t rank;
    uint64_t order;
    ns_entry *entry;
} ns_item;

typedef struct ns_heap {
    ns_item *items;
    int count, room;
} ns_heap;

typedef struct ns_lane {
    int64_t id, priority;
    int device;
    bool host, closing, listed;
    int64_t *counters; /* completed, submitted: the caller's, and read by it without a lock */
    ns_entry *head, *tail;
    ns_heap dependents; /* entries blocked by a value of this lane */
    ns_bell *waiters;   /* ascending by value */
    struct ns_lane *next;
} ns_lane;

typedef struct ns_device {
    ns_heap ready[NS_UNITS];
    int running[NS_UNITS];
    int moving; /* ready, handed over or running */
    int outstanding;
    int threads, called; /* called: rung or started, not yet back under the lock */
    ns_bell *idle;
    ns_bell *waiting_for_room;
} ns_device;

typedef struct ns_interval {
    int64_t device, unit, name;
    double began, ended;
} ns_interval;

typedef struct ns_runtime {
    pthread_mutex_t mutex;
    pthread_cond_t ended; /* cuts sleeps short */
    int device_count;
    ns_device *devices;
    ns_lane **slots;
    int64_t *free_slots;
    int64_t slot_count, slot_room, free_count, generation;
    ns_lane *moved; /* lanes whose heads may go on */
    uint64_t order;
    ns_entry *for_python, **for_python_end;
    int for_python_count, python_called, python_idle_count;
    ns_bell *python_idle;
    int moving, running;
    ns_bell *drainers;
    bool closed, cancelled;
    pthread_t *threads;
    int thread_count, alive;
    ns_interval *intervals;
    uint64_t interval_count;
} ns_runtime;

/* What to do behind the unlock, and which devices got something to do. */
typedef struct ns_wake {
    ns_bell *bells;
    uint64_t devices;
} ns_wake;

extern const int ns_queues[NS_UNITS];

double ns_now(void);
void *ns_room_for(void *memory, size_t size);

/* lanes.c */
ns_lane *ns_find(ns_runtime *, int64_t id);
ns_entry *ns_pop(ns_heap *);
void ns_advance(ns_runtime *, ns_wake *);
void ns_moved(ns_runtime *, ns_lane *);
void ns_finish(ns_runtime *, ns_entry *, ns_wake *);
void ns_free_entry(ns_entry *);

/* run.c */
bool ns_is_poisoned(const ns_entry *);
void ns_run_copy(ns_entry *);
void ns_run_entry(ns_runtime *, ns_entry *);
void ns_enter_thread(void);

/* bell.c */
void ns_condition_init(pthread_cond_t *);
int ns_timed_wait(pthread_cond_t *, pthread_mutex_t *, const struct timespec *until);
void ns_bell_init(ns_bell *);
void ns_bell_destroy(ns_bell *);
void ns_ring(ns_wake *, ns_bell **list);
void ns_ring_first(ns_wake *, ns_bell **list);
bool ns_sleep_on(ns_runtime *, ns_bell **list, ns_bell *, int64_t timeout_ns, ns_wake *);
void ns_unlock(ns_runtime *, ns_wake *);

/* threads.c */
void ns_call(ns_runtime *, ns_wake *);
