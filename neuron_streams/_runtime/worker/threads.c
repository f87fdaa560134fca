/* Who runs a command: threads, the hand-over to Python, waiting. See worker.h.
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

/* Signals are for the threads of Python, which must notice them. */
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
    return true;
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
        if (device->idle != NULL) ns_ring_first(wake, &device->idle);
        else if (device->threads == NS_MOST_THREADS || !start_thread(r, number)) return;
        else device->threads++;
        device->called++;
    }
}

static void give_to_python(ns_runtime *r, ns_entry *entry) {
    entry->next_for_python = NULL;
    *r->for_python_end = entry;
    r->for_python_end = &entry->next_for_python;
    r->for_python_count++;
}

static ns_entry *start(ns_runtime *r, ns_device *device, int unit) {
    device->running[unit]++;
    r->running++;
    return ns_pop(&device->ready[unit]);
}

/* Ready commands that only Python can run take their unit and wait for a thread of Python. */
static void hand_over(ns_runtime *r, ns_device *device) {
    for (int unit = 0; unit < NS_UNITS; unit++) {
        ns_heap *ready = &device->ready[unit];
        while (ready->count && device->running[unit] < ns_queues[unit] &&
               ready->items[0].entry->kind == NS_PYTHON)
            give_to_python(r, start(r, device, unit));
    }
}

static void hand_over_all(ns_runtime *r, const ns_wake *wake) {
    for (int i = 0; i < r->device_count; i++)
        if (wake->devices >> i & 1) hand_over(r, &r->devices[i]);
}

/* Find somebody for all that may start on the devices where something became ready. */
void ns_call(ns_runtime *r, ns_wake *wake) {
    hand_over_all(r, wake);
    for (int i = 0; wake->devices; i++, wake->devices >>= 1)
        if (wake->devices & 1) call_threads(r, i, wake);
    for (int wanted = r->for_python_count - r->python_called; wanted > 0; wanted--) {
        if (r->python_idle == NULL) break;
        ns_ring_first(wake, &r->python_idle);
        r->python_idle_count--;
        r->python_called++;
    }
    if (!r->moving) ns_ring(wake, &r->drainers);
}

/* The most urgent ready command of a device whose unit is free. */
static ns_entry *take(ns_runtime *r, ns_device *device) {
    int best = -1;
    hand_over(r, device);
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

/* What failed goes to Python, which knows what to tell whom; its unit stays taken until then. */
static void bring_back(ns_runtime *r, ns_entry *entry, ns_wake *wake) {
    entry->reported = (entry->poisoned || entry->failed) && !entry->cancelled;
    if (entry->reported) give_to_python(r, entry);
    else ns_finish(r, entry, wake);
}

static void *work(void *argument) {
    ns_start begin = *(ns_start *)argument;
    free(argument);
    ns_runtime *r = begin.runtime;
    ns_device *device = &r->devices[begin.device];
    ns_bell bell;
    ns_wake wake = {0};
    ns_bell_init(&bell);
    ns_enter_thread();
    pthread_mutex_lock(&r->mutex);
    device->called--;
    while (!r->closed) {
        ns_entry *entry = take(r, device);
        ns_call(r, &wake);
        if (entry == NULL) {
            ns_sleep_on(r, &device->idle, &bell, -1, &wake);
            device->called--;
            continue;
        }
        ns_unlock(r, &wake);
        ns_run_entry(r, entry);
        pthread_mutex_lock(&r->mutex);
        bring_back(r, entry, &wake);
    }
    ns_call(r, &wake);
    if (--r->alive == 0) ns_ring(&wake, &r->drainers);
    if (!r->running) ns_ring(&wake, &r->python_idle);
    ns_unlock(r, &wake);
    ns_bell_destroy(&bell);
    return NULL;
}

/* The next command for Python, with what a thread of Python must know of it. */
static ns_entry *take_for_python(ns_runtime *r, int64_t *told) {
    ns_entry *entry = r->for_python;
    if (entry == NULL) return NULL;
    r->for_python = entry->next_for_python;
    if (r->for_python == NULL) r->for_python_end = &r->for_python;
    r->for_python_count--;
    entry->started = true;
    if (!entry->began) entry->began = ns_now();
    int64_t words[] = {entry->key,    entry->lane->id, entry->value, r->python_idle_count,
                       entry->failed, (intptr_t)entry->message};
    memcpy(told, words, sizeof words);
    return entry;
}

/* For a thread of Python: report `done` (or NULL) and sleep until there is another command. Fills
 * `told` with its key, lane, value, how many threads of Python still wait for the next, and, if it
 * ran and failed, what ns_run returned and the message. NULL at the end. */
NS_EXPORT ns_entry *ns_next(ns_runtime *r, ns_entry *done, int64_t *told) {
    ns_bell bell;
    ns_wake wake = {0};
    ns_bell_init(&bell);
    pthread_mutex_lock(&r->mutex);
    if (done != NULL) {
        if (!done->ended) done->ended = ns_now();
        ns_finish(r, done, &wake);
        hand_over_all(r, &wake);
    }
    ns_entry *entry;
    while ((entry = take_for_python(r, told)) == NULL && !(r->closed && !r->running)) {
        ns_call(r, &wake);
        r->python_idle_count++;
        ns_sleep_on(r, &r->python_idle, &bell, -1, &wake);
        if (r->python_called) r->python_called--;
    }
    if (entry == NULL) ns_ring(&wake, &r->python_idle);
    ns_call(r, &wake);
    ns_unlock(r, &wake);
    ns_bell_destroy(&bell);
    return entry;
}

/* Whether the lane has completed `value` commands, after at most `timeout_ns`. */
NS_EXPORT int64_t ns_wait(ns_runtime *r, int64_t id, int64_t value, int64_t timeout_ns) {
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
NS_EXPORT void ns_wait_for_room(ns_runtime *r, int64_t id, int64_t timeout_ns) {
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
