/* The native worker: what its files share.
 *
 *   lanes.c   lanes, tickets, `after`, the ready queues of the units; nothing runs here
 *   threads.c the threads that run commands, and waiting
 *   end.c     how a runtime begins and ends
 *   bell.c    sleeping and waking
 *
 * What a command does is its caller's: a `call` is an opaque pointer and a table of functions.
 * One mutex guards a runtime. Nothing waits, wakes a thread or frees a call while holding it, and
 * of the calls only the quick ones run under it, those that cost less than a wake-up: bells to ring
 * and calls to drop are collected in a `wake`, and dealt with after the unlock.
 */
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define NS_MOST_THREADS 64 /* of a device: as many as its units have queues */
#define NS_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum { NS_OUTSTANDING = 1024, NS_ROOM_AGAIN = NS_OUTSTANDING - 64, NS_INTERVALS = 1 << 16 };
enum { NS_COMPUTE, NS_TENSOR_OP, NS_COLLECTIVES, NS_PEERS, NS_UNITS };
enum { NS_MARKER, NS_PLEDGE, NS_SLEEP, NS_CALL };
enum { NS_FULL = -1, NS_CLOSED = -2, NS_UNKNOWN_LANE = -3, NS_NO_THREAD = -4 };

/* A command as it is submitted. */
typedef struct ns_command {
    int kind, unit;
    bool quick;          /* of a CALL: cheaper to run in place than to wake a thread for */
    const char *name;    /* kept by the caller for ever */
    double *stamp;       /* of a MARKER: takes the moment of its completion, or NULL */
    int64_t nanoseconds; /* of a SLEEP */
    void *call;          /* of a CALL; of any other kind kept for `drop` alone, or NULL */
} ns_command;

typedef struct ns_ticket {
    int64_t lane, value;
} ns_ticket;

/* What a runtime does with a call: run it to its end on a thread of its own, before the command
 * counts as completed, and let go of it some time after. Neither may call the runtime's functions
 * that wait; `run` of a quick call may call none. */
typedef struct ns_calls {
    void (*run)(void *call, int64_t lane, int64_t value);
    void (*drop)(void *call);
    void (*enter_thread)(void);
} ns_calls;

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
    struct ns_entry *next; /* behind it in its lane, then in the list of those to be freed */
    struct ns_lane *lane;
    ns_command command;
    int64_t value;
    int blocked;
    bool queued, started, cancelled;
    double began, ended;
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
    int64_t device, unit;
    const char *name;
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
    ns_calls calls;
    int moving, running;
    ns_bell *drainers;
    bool closed, cancelled;
    pthread_t *threads;
    int thread_count, alive;
    ns_interval *intervals;
    uint64_t interval_count;
} ns_runtime;

/* What to do after the unlock, and which devices got something to do. */
typedef struct ns_wake {
    ns_bell *bells;
    ns_entry *done;
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
void ns_free_entries(ns_runtime *, ns_entry *);

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
bool ns_has_thread(ns_runtime *, int device);
void ns_start_threads(ns_runtime *, ns_wake *);

/* The functions for the owner of a runtime; each says more where it stands. */
ns_runtime *ns_new(int64_t devices, const ns_calls *calls);
int64_t ns_open_lane(ns_runtime *, int64_t device, int64_t priority, bool host, int64_t *counters);
void ns_close_lane(ns_runtime *, int64_t id);
int64_t ns_submit(ns_runtime *, int64_t id, const ns_command *, const ns_ticket *after,
                  int64_t count);
void ns_complete(ns_runtime *, int64_t id, int64_t value);
bool ns_wait(ns_runtime *, int64_t id, int64_t value, int64_t timeout_ns);
void ns_wait_for_room(ns_runtime *, int64_t id, int64_t timeout_ns);
bool ns_head(ns_runtime *, int64_t id, ns_command *, ns_ticket *head, ns_ticket *awaited);
int64_t ns_intervals(ns_runtime *, ns_interval *);
bool ns_drain(ns_runtime *, int64_t timeout_ns);
typedef void (*ns_on_cancel)(void *context, const ns_command *, ns_ticket, bool running);
void ns_cancel(ns_runtime *, ns_on_cancel, void *context);
void ns_stop(ns_runtime *);
int64_t ns_join(ns_runtime *, int64_t timeout_ns);
void ns_free(ns_runtime *);

#ifdef __cplusplus
}
#endif
