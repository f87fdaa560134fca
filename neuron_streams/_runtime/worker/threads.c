/* The threads that run commands, and waiting. See worker.h.
 *
 * A thread that finishes a command goes on with what is ready and calls another only for work that
 * it cannot take. `called` counts those on their way, so that nobody is called twice for one
 * command.
 */
#include "worker.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

static void *work(void *argument);

typedef struct ns_start {
    ns_runtime *runtime;
    int device;
} ns_start;

/* Signals are for the threads of Python, which must notice them. False if the system gives none: the
 * threads that are there do all of the work, and the next call asks again. */
static bool start_thread(ns_runtime *r, int device) {
    ns_start *start = ns_room_for(NULL, sizeof *start);
    *start = (ns_start){r, device};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&r->threads[r->thread_count], NULL, work, start);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(start);
        return false;
    }
    r->thread_count++;
    r->alive++;
    r->devices[device].threads++;
    r->devices[device].called++;
    return true;
}

/* Whether the device has a thread, which is started if need be, and stays until the end. */
bool ns_has_thread(ns_runtime *r, int device) {
    return r->devices[device].threads > 0 || start_thread(r, device);
}

static int takeable(const ns_device *device) {
    int count = 0;
    for (int unit = 0; unit < NS_UNITS; unit++) {
        int room = ns_queues[unit] - device->running[unit];
        count += device->ready[unit].count < room ? device->ready[unit].count : room;
    }
    return count;
}

static void call_threads(ns_runtime *r, int number, ns_wake *wake) {
    ns_device *device = &r->devices[number];
    if (r->closed) return;
    for (int wanted = takeable(device) - device->called; wanted > 0; wanted--) {
        if (device->idle == NULL) {
            if (device->threads == NS_MOST_THREADS || !start_thread(r, number)) return;
            continue;
        }
        ns_ring_first(wake, &device->idle);
        device->called++;
    }
}

static ns_entry *start(ns_runtime *r, ns_device *device, int unit) {
    device->running[unit]++;
    r->running++;
    return ns_pop(&device->ready[unit]);
}

/* Start what is ready on the devices where something became so. */
void ns_start_threads(ns_runtime *r, ns_wake *wake) {
    for (int i = 0; wake->devices; i++, wake->devices >>= 1)
        if (wake->devices & 1) call_threads(r, i, wake);
    if (!r->moving) ns_ring(wake, &r->drainers);
}

/* The most urgent ready command of a device whose unit is free. */
static ns_entry *take(ns_runtime *r, ns_device *device) {
    int best = -1;
    for (int unit = 0; unit < NS_UNITS; unit++) {
        const ns_heap *ready = &device->ready[unit];
        if (!ready->count || device->running[unit] == ns_queues[unit]) continue;
        const ns_item *a = ready->items, *b = best < 0 ? NULL : device->ready[best].items;
        if (b == NULL || a->rank < b->rank || (a->rank == b->rank && a->order < b->order))
            best = unit;
    }
    if (best < 0) return NULL;
    ns_entry *entry = start(r, device, best);
    entry->started = true;
    return entry;
}

static void run_sleep(ns_runtime *r, int64_t nanoseconds) {
    double end = ns_now() + 1e-9 * (double)nanoseconds;
    struct timespec until = {(time_t)end, (long)((end - (double)(time_t)end) * 1e9)};
    pthread_mutex_lock(&r->mutex);
    while (!r->closed && ns_now() < end) ns_timed_wait(&r->ended, &r->mutex, &until);
    pthread_mutex_unlock(&r->mutex);
}

/* Without the lock: the end of the runtime may take the lane away from what still runs. */
static void run(ns_runtime *r, ns_entry *entry, int64_t lane) {
    entry->began = ns_now();
    if (entry->command.kind == NS_SLEEP) run_sleep(r, entry->command.nanoseconds);
    else r->calls.run(entry->command.call, lane, entry->value);
    entry->ended = ns_now();
}

static void *work(void *argument) {
    ns_start begin = *(ns_start *)argument;
    free(argument);
    ns_runtime *r = begin.runtime;
    ns_device *device = &r->devices[begin.device];
    ns_bell bell;
    ns_wake wake = {0};
    ns_bell_init(&bell);
    r->calls.enter_thread();
    pthread_mutex_lock(&r->mutex);
    device->called--;
    while (!r->closed) {
        ns_entry *entry = take(r, device);
        ns_start_threads(r, &wake);
        if (entry == NULL) {
            ns_sleep_on(r, &device->idle, &bell, -1, &wake);
            device->called--;
            continue;
        }
        int64_t lane = entry->lane->id;
        ns_unlock(r, &wake);
        run(r, entry, lane);
        pthread_mutex_lock(&r->mutex);
        ns_finish(r, entry, &wake);
    }
    ns_start_threads(r, &wake);
    if (--r->alive == 0) ns_ring(&wake, &r->drainers);
    ns_unlock(r, &wake);
    ns_bell_destroy(&bell);
    return NULL;
}

/* Whether the lane has completed `value` commands, after at most `timeout_ns`. */
bool ns_wait(ns_runtime *r, int64_t id, int64_t value, int64_t timeout_ns) {
    ns_bell bell;
    ns_wake wake = {0};
    bool done = true;
    pthread_mutex_lock(&r->mutex);
    ns_lane *lane = ns_find(r, id);
    if (lane != NULL && lane->counters[0] < value) {
        ns_bell_init(&bell);
        bell.value = value;
        done = ns_sleep_on(r, &lane->waiters, &bell, timeout_ns, &wake);
        ns_bell_destroy(&bell);
    }
    ns_unlock(r, &wake);
    return done;
}

/* Sleep until the lane's device has room for a command, or until the timeout. */
void ns_wait_for_room(ns_runtime *r, int64_t id, int64_t timeout_ns) {
    ns_bell bell;
    ns_wake wake = {0};
    ns_bell_init(&bell);
    pthread_mutex_lock(&r->mutex);
    ns_lane *lane = ns_find(r, id);
    ns_device *device = lane == NULL ? NULL : &r->devices[lane->device];
    if (device != NULL && device->moving && device->outstanding >= NS_OUTSTANDING && !r->closed)
        ns_sleep_on(r, &device->waiting_for_room, &bell, timeout_ns, &wake);
    ns_unlock(r, &wake);
    ns_bell_destroy(&bell);
}
