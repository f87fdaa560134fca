/* How a runtime begins and ends. See worker.h.
 *
 * The end has steps, because the failures are Python's: `ns_drain` waits for what can still run,
 * `ns_cancel` tells what will not, `ns_stop` completes that and wakes everybody, `ns_join` waits
 * for what is in flight, and `ns_free` comes when nobody can call any more.
 */
#include "worker.h"

#include <stdlib.h>
#include <string.h>

static void *zeroed(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (memory == NULL) abort();
    return memory;
}

NS_EXPORT ns_runtime *ns_new(int64_t devices) {
    ns_runtime *r = zeroed(1, sizeof *r);
    pthread_mutex_init(&r->mutex, NULL);
    ns_condition_init(&r->ended);
    r->device_count = (int)devices;
    r->devices = zeroed((size_t)devices, sizeof *r->devices);
    r->threads = zeroed((size_t)devices * NS_MOST_THREADS, sizeof *r->threads);
    r->intervals = zeroed(NS_INTERVALS, sizeof *r->intervals);
    r->for_python_end = &r->for_python;
    return r;
}

/* Whether nothing moves, after at most `timeout_ns`. */
NS_EXPORT int64_t ns_drain(ns_runtime *r, int64_t timeout_ns) {
    ns_bell bell;
    ns_wake wake = {0};
    ns_bell_init(&bell);
    pthread_mutex_lock(&r->mutex);
    if (r->moving) ns_sleep_on(r, &r->drainers, &bell, timeout_ns, &wake);
    bool still = r->moving == 0;
    ns_unlock(r, &wake);
    ns_bell_destroy(&bell);
    return still;
}

static void withdraw(ns_runtime *r, ns_device *device, int count) {
    device->moving -= count;
    r->moving -= count;
}

static void empty_queues(ns_runtime *r) {
    for (int i = 0; i < r->device_count; i++)
        for (int unit = 0; unit < NS_UNITS; unit++) {
            withdraw(r, &r->devices[i], r->devices[i].ready[unit].count);
            r->devices[i].ready[unit].count = 0;
        }
    ns_entry **link = &r->for_python;
    for (ns_entry *entry; (entry = *link) != NULL;) {
        if (entry->started) {
            link = &entry->next_for_python;
            continue;
        }
        ns_device *device = &r->devices[entry->lane->device];
        *link = entry->next_for_python;
        device->running[entry->unit]--;
        r->running--;
        r->for_python_count--;
        withdraw(r, device, 1);
    }
    r->for_python_end = link;
}

/* Take no more commands, and tell of those that have not completed, as key, lane, value and
 * whether they run; 0 when all are told. They complete at `ns_stop`. */
NS_EXPORT int64_t ns_cancel(ns_runtime *r, int64_t *told, int64_t room) {
    int64_t count = 0;
    pthread_mutex_lock(&r->mutex);
    if (!r->closed) empty_queues(r);
    r->closed = true;
    for (int64_t i = 0; i < r->slot_count && count < room; i++) {
        ns_lane *lane = r->slots[i];
        ns_entry *entry = lane == NULL ? NULL : lane->head;
        for (; entry != NULL && count < room; entry = entry->next) {
            if (entry->reported || entry->cancelled) continue;
            entry->cancelled = true;
            int64_t words[] = {entry->key, lane->id, entry->value, entry->started};
            memcpy(told + 4 * count++, words, sizeof words);
        }
    }
    pthread_mutex_unlock(&r->mutex);
    return count;
}

/* Complete what was cancelled and wake everybody. */
NS_EXPORT void ns_stop(ns_runtime *r) {
    ns_wake wake = {0};
    pthread_mutex_lock(&r->mutex);
    r->closed = r->cancelled = true;
    for (int64_t i = 0; i < r->slot_count; i++) {
        if (r->slots[i] == NULL) continue;
        r->slots[i]->dependents.count = 0;
        ns_moved(r, r->slots[i]);
    }
    ns_advance(r, &wake);
    for (int i = 0; i < r->device_count; i++) {
        ns_ring(&wake, &r->devices[i].idle);
        ns_ring(&wake, &r->devices[i].waiting_for_room);
    }
    ns_ring(&wake, &r->python_idle);
    pthread_cond_broadcast(&r->ended);
    ns_unlock(r, &wake);
}

/* How many commands are still in flight after at most `timeout_ns`; with none, no thread is left
 * but those of Python. */
NS_EXPORT int64_t ns_join(ns_runtime *r, int64_t timeout_ns) {
    ns_bell bell;
    ns_wake wake = {0};
    ns_bell_init(&bell);
    pthread_mutex_lock(&r->mutex);
    if (r->alive) ns_sleep_on(r, &r->drainers, &bell, timeout_ns, &wake);
    int64_t left = r->alive ? r->running + 1 : 0;
    int count = left ? 0 : r->thread_count;
    if (!left) r->thread_count = 0;
    ns_unlock(r, &wake);
    for (int i = 0; i < count; i++) pthread_join(r->threads[i], NULL);
    ns_bell_destroy(&bell);
    return left;
}

static void free_lane(ns_lane *lane) {
    if (lane == NULL) return;
    for (ns_entry *entry = lane->head, *next; entry != NULL; entry = next) {
        next = entry->next;
        ns_free_entry(entry);
    }
    free(lane->dependents.items);
    free(lane);
}

NS_EXPORT void ns_free(ns_runtime *r) {
    for (int64_t i = 0; i < r->slot_count; i++) free_lane(r->slots[i]);
    for (int i = 0; i < r->device_count; i++)
        for (int unit = 0; unit < NS_UNITS; unit++) free(r->devices[i].ready[unit].items);
    free(r->slots);
    free(r->free_slots);
    free(r->devices);
    free(r->threads);
    free(r->intervals);
    pthread_cond_destroy(&r->ended);
    pthread_mutex_destroy(&r->mutex);
    free(r);
}

/* The newest busy intervals, oldest first; `told` has room for NS_INTERVALS. */
NS_EXPORT int64_t ns_intervals(ns_runtime *r, ns_interval *told) {
    pthread_mutex_lock(&r->mutex);
    uint64_t count = r->interval_count < NS_INTERVALS ? r->interval_count : NS_INTERVALS;
    for (uint64_t i = 0; i < count; i++)
        told[i] = r->intervals[(r->interval_count - count + i) % NS_INTERVALS];
    pthread_mutex_unlock(&r->mutex);
    return (int64_t)count;
}

/* The head of a lane: its key, its value, and the lane and value that it waits for (0: none). */
NS_EXPORT int64_t ns_head(ns_runtime *r, int64_t id, int64_t *told) {
    memset(told, 0, 4 * sizeof *told);
    pthread_mutex_lock(&r->mutex);
    ns_lane *lane = ns_find(r, id);
    ns_entry *head = lane == NULL ? NULL : lane->head;
    if (head != NULL) {
        told[0] = head->key;
        told[1] = head->value;
        for (int64_t i = 0; i < r->slot_count; i++)
            for (int k = 0; r->slots[i] != NULL && k < r->slots[i]->dependents.count; k++)
                if (r->slots[i]->dependents.items[k].entry == head) {
                    told[2] = r->slots[i]->id;
                    told[3] = r->slots[i]->dependents.items[k].rank;
                }
    }
    pthread_mutex_unlock(&r->mutex);
    return head != NULL;
}
