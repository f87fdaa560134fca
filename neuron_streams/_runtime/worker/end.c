/* How a runtime begins and ends. See worker.h.
 *
 * The end has steps, because the failures are the owner's: `ns_drain` waits for what can still run,
 * `ns_cancel` names what will not, `ns_stop` completes that and wakes every waiter, `ns_join` waits
 * for what is in flight, and `ns_free` comes when no thread can call any more.
 */
#include "worker.h"

#include <stdlib.h>
#include <string.h>

static void *zeroed(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (memory == NULL) abort();
    return memory;
}

ns_runtime *ns_new(int64_t devices, const ns_calls *calls) {
    ns_runtime *r = zeroed(1, sizeof *r);
    pthread_mutex_init(&r->mutex, NULL);
    ns_condition_init(&r->ended);
    r->device_count = (int)devices;
    r->devices = zeroed((size_t)devices, sizeof *r->devices);
    r->threads = zeroed((size_t)devices * NS_MOST_THREADS, sizeof *r->threads);
    r->intervals = zeroed(NS_INTERVALS, sizeof *r->intervals);
    r->calls = *calls;
    return r;
}

/* Whether nothing moves, after at most `timeout_ns`. */
bool ns_drain(ns_runtime *r, int64_t timeout_ns) {
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
}

/* Take no more commands, and name those that have not completed. They complete at `ns_stop`. */
void ns_cancel(ns_runtime *r, ns_on_cancel on_cancel, void *context) {
    pthread_mutex_lock(&r->mutex);
    if (!r->closed) empty_queues(r);
    r->closed = true;
    for (int64_t i = 0; i < r->slot_count; i++) {
        ns_lane *lane = r->slots[i];
        for (ns_entry *entry = lane == NULL ? NULL : lane->head; entry; entry = entry->next) {
            if (entry->cancelled) continue;
            entry->cancelled = true;
            on_cancel(context, &entry->command, (ns_ticket){lane->id, entry->value},
                      entry->started);
        }
    }
    pthread_mutex_unlock(&r->mutex);
}

/* Complete what was cancelled and wake everybody. */
void ns_stop(ns_runtime *r) {
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
    pthread_cond_broadcast(&r->ended);
    ns_unlock(r, &wake);
}

/* How many commands are still in flight after at most `timeout_ns`; with none, no thread is left. */
int64_t ns_join(ns_runtime *r, int64_t timeout_ns) {
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

static void free_lane(ns_runtime *r, ns_lane *lane) {
    if (lane == NULL) return;
    ns_free_entries(r, lane->head);
    free(lane->dependents.items);
    free(lane);
}

void ns_free(ns_runtime *r) {
    for (int64_t i = 0; i < r->slot_count; i++) free_lane(r, r->slots[i]);
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
int64_t ns_intervals(ns_runtime *r, ns_interval *told) {
    pthread_mutex_lock(&r->mutex);
    uint64_t count = r->interval_count < NS_INTERVALS ? r->interval_count : NS_INTERVALS;
    for (uint64_t i = 0; i < count; i++)
        told[i] = r->intervals[(r->interval_count - count + i) % NS_INTERVALS];
    pthread_mutex_unlock(&r->mutex);
    return (int64_t)count;
}

/* The head of a lane and the ticket that it waits for (lane 0: none); false for an empty lane. */
bool ns_head(ns_runtime *r, int64_t id, ns_command *command, ns_ticket *ticket,
             ns_ticket *awaited) {
    *awaited = (ns_ticket){0, 0};
    pthread_mutex_lock(&r->mutex);
    ns_lane *lane = ns_find(r, id);
    ns_entry *head = lane == NULL ? NULL : lane->head;
    if (head != NULL) {
        *command = head->command;
        *ticket = (ns_ticket){id, head->value};
        for (int64_t i = 0; i < r->slot_count; i++)
            for (int k = 0; r->slots[i] != NULL && k < r->slots[i]->dependents.count; k++)
                if (r->slots[i]->dependents.items[k].entry == head)
                    *awaited = (ns_ticket){r->slots[i]->id, r->slots[i]->dependents.items[k].rank};
    }
    pthread_mutex_unlock(&r->mutex);
    return head != NULL;
}
