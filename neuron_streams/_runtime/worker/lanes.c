/* Lanes, tickets and the ready queues of the units. See worker.h. */
#include "worker.h"

#include <stdlib.h>
#include <string.h>

const int ns_queues[NS_UNITS] = {1, 2, 3, 58};

/* An emulated device that has no memory for a few words cannot go on. */
void *ns_room_for(void *memory, size_t size) {
    void *found = realloc(memory, size ? size : 1);
    if (found == NULL) abort();
    return found;
}

static bool before(const ns_item *a, const ns_item *b) {
    return a->rank != b->rank ? a->rank < b->rank : a->order < b->order;
}

static void push(ns_heap *heap, ns_item item) {
    if (heap->count == heap->room) {
        heap->room = heap->room ? 2 * heap->room : 8;
        heap->items = ns_room_for(heap->items, (size_t)heap->room * sizeof item);
    }
    int at = heap->count++;
    for (int up; at > 0 && before(&item, &heap->items[up = (at - 1) / 2]); at = up)
        heap->items[at] = heap->items[up];
    heap->items[at] = item;
}

ns_entry *ns_pop(ns_heap *heap) {
    ns_entry *first = heap->items[0].entry;
    ns_item last = heap->items[--heap->count];
    int at = 0;
    for (int down; (down = 2 * at + 1) < heap->count; at = down) {
        if (down + 1 < heap->count && before(&heap->items[down + 1], &heap->items[down])) down++;
        if (!before(&heap->items[down], &last)) break;
        heap->items[at] = heap->items[down];
    }
    heap->items[at] = last;
    return first;
}

/* Lane numbers: the slot in the low bits, above it how many lanes there were before, so that a
 * number is never given out twice and one look tells whether it is still open. */
enum { SLOT_BITS = 24 };
#define SLOT_MASK ((1 << SLOT_BITS) - 1)

ns_lane *ns_find(ns_runtime *r, int64_t id) {
    int64_t slot = (id & SLOT_MASK) - 1;
    if (slot < 0 || slot >= r->slot_count || r->slots[slot] == NULL) return NULL;
    return r->slots[slot]->id == id ? r->slots[slot] : NULL;
}

static int64_t free_slot(ns_runtime *r) {
    int64_t slot = r->free_count ? r->free_slots[--r->free_count] : r->slot_count++;
    if (slot == r->slot_room) {
        r->slot_room = r->slot_room ? 2 * r->slot_room : 64;
        r->slots = ns_room_for(r->slots, (size_t)r->slot_room * sizeof *r->slots);
        r->free_slots = ns_room_for(r->free_slots, (size_t)r->slot_room * sizeof *r->free_slots);
    }
    return slot;
}

/* `counters`: two words, completed and submitted, kept by the caller until they are equal and the
 * lane was closed. */
int64_t ns_open_lane(ns_runtime *r, int64_t device, int64_t priority, bool host,
                     int64_t *counters) {
    ns_lane *lane = calloc(1, sizeof *lane);
    if (lane == NULL) abort();
    lane->device = (int)device;
    lane->priority = priority;
    lane->host = host;
    lane->counters = counters;
    pthread_mutex_lock(&r->mutex);
    int64_t slot = r->closed ? -1 : free_slot(r);
    if (slot >= 0) {
        lane->id = r->generation++ << SLOT_BITS | (slot + 1);
        r->slots[slot] = lane;
    }
    int64_t id = slot >= 0 ? lane->id : NS_CLOSED;
    pthread_mutex_unlock(&r->mutex);
    if (slot < 0) free(lane);
    return id;
}

static void forget(ns_runtime *r, ns_lane *lane, ns_wake *wake) {
    int64_t slot = (lane->id & SLOT_MASK) - 1;
    r->slots[slot] = NULL;
    r->free_slots[r->free_count++] = slot;
    ns_ring(wake, &lane->waiters);
    free(lane->dependents.items);
    free(lane);
}

void ns_close_lane(ns_runtime *r, int64_t id) {
    ns_wake wake = {0};
    pthread_mutex_lock(&r->mutex);
    ns_lane *lane = ns_find(r, id);
    if (lane != NULL) {
        lane->closing = true;
        if (lane->head == NULL) forget(r, lane, &wake);
    }
    ns_unlock(r, &wake);
}

static void block(ns_runtime *r, ns_entry *entry, int64_t id, int64_t value) {
    ns_lane *upstream = ns_find(r, id);
    if (upstream == NULL || upstream->counters[0] >= value) return;
    entry->blocked++;
    push(&upstream->dependents, (ns_item){value, r->order++, entry});
}

static bool counts(const ns_entry *entry) {
    return entry->command.kind != NS_MARKER && entry->command.kind != NS_PLEDGE;
}

static int64_t append(ns_runtime *r, ns_lane *lane, ns_entry *entry, const ns_ticket *after,
                      int64_t count) {
    for (int64_t i = 0; i < count; i++) block(r, entry, after[i].lane, after[i].value);
    entry->lane = lane;
    entry->value = lane->counters[1] + 1;
    __atomic_store_n(&lane->counters[1], entry->value, __ATOMIC_RELEASE);
    if (counts(entry)) r->devices[lane->device].outstanding++;
    if (lane->head == NULL) lane->head = entry;
    else lane->tail->next = entry;
    lane->tail = entry;
    if (lane->head == entry) ns_moved(r, lane);
    return entry->value;
}

/* The command's value in its lane, or why it was not taken, and the call is still the caller's:
 * NS_FULL (wait for room, then again), NS_CLOSED, NS_UNKNOWN_LANE, NS_NO_THREAD (the system gives the
 * device not even one: a command that becomes ready later could not be refused any more). */
int64_t ns_submit(ns_runtime *r, int64_t id, const ns_command *command, const ns_ticket *after,
                  int64_t count) {
    ns_wake wake = {0};
    ns_entry *entry = ns_room_for(NULL, sizeof *entry);
    memset(entry, 0, sizeof *entry);
    entry->command = *command;
    pthread_mutex_lock(&r->mutex);
    ns_lane *lane = ns_find(r, id);
    ns_device *device = lane == NULL ? NULL : &r->devices[lane->device];
    int64_t value;
    if (r->closed) value = NS_CLOSED;
    else if (lane == NULL) value = NS_UNKNOWN_LANE;
    /* A device that does not move waits for the host: holding it up would be a deadlock. */
    else if (counts(entry) && device->outstanding >= NS_OUTSTANDING && device->moving)
        value = NS_FULL;
    else if (counts(entry) && !ns_has_thread(r, lane->device)) value = NS_NO_THREAD;
    else value = append(r, lane, entry, after, count);
    if (value > 0) {
        ns_advance(r, &wake);
        ns_start_threads(r, &wake);
    }
    ns_unlock(r, &wake);
    if (value < 0) free(entry);
    return value;
}

void ns_moved(ns_runtime *r, ns_lane *lane) {
    if (lane->listed) return;
    lane->listed = true;
    lane->next = r->moved;
    r->moved = lane;
}

static void unblock_dependents(ns_runtime *r, ns_lane *lane, int64_t value) {
    ns_heap *heap = &lane->dependents;
    while (heap->count && heap->items[0].rank <= value) {
        ns_entry *entry = ns_pop(heap);
        if (--entry->blocked == 0 && entry->lane->head == entry) ns_moved(r, entry->lane);
    }
}

/* Free a list of entries and let go of their calls; without the lock. */
void ns_free_entries(ns_runtime *r, ns_entry *entry) {
    for (ns_entry *next; entry != NULL; entry = next) {
        next = entry->next;
        if (entry->command.call != NULL) r->calls.drop(entry->command.call);
        free(entry);
    }
}

static void free_later(ns_entry *entry, ns_wake *wake) {
    entry->next = wake->done;
    wake->done = entry;
}

/* Count the head of its lane as completed. */
static void complete(ns_runtime *r, ns_entry *entry, ns_wake *wake) {
    ns_lane *lane = entry->lane;
    double *stamp = entry->command.stamp;
    lane->head = entry->next;
    if (lane->head == NULL) lane->tail = NULL;
    if (stamp != NULL) __atomic_store(stamp, &(double){ns_now()}, __ATOMIC_RELEASE);
    __atomic_store_n(&lane->counters[0], entry->value, __ATOMIC_RELEASE);
    while (lane->waiters != NULL && lane->waiters->value <= entry->value)
        ns_ring_first(wake, &lane->waiters);
    unblock_dependents(r, lane, entry->value);
    ns_moved(r, lane);
    if (entry->started && entry->cancelled) entry->lane = NULL; /* given up: it still runs */
    else free_later(entry, wake);
}

static void note_interval(ns_runtime *r, const ns_entry *entry) {
    r->intervals[r->interval_count++ % NS_INTERVALS] = (ns_interval){
        entry->lane->device, entry->command.unit, entry->command.name, entry->began, entry->ended};
}

static void leave_device(ns_device *device, ns_wake *wake) {
    device->outstanding--;
    if (device->waiting_for_room && (device->outstanding <= NS_ROOM_AGAIN || !device->moving))
        ns_ring(wake, &device->waiting_for_room);
}

/* Calls that are quicker than waking a thread for them run under the lock, if a unit is free. */
static bool ran_in_place(ns_runtime *r, ns_entry *entry, ns_wake *wake) {
    ns_device *device = &r->devices[entry->lane->device];
    if (!entry->command.quick || device->running[entry->command.unit] >=
                                     ns_queues[entry->command.unit])
        return false;
    entry->began = ns_now();
    r->calls.run(entry->command.call, entry->lane->id, entry->value);
    entry->ended = ns_now();
    note_interval(r, entry);
    leave_device(device, wake);
    return true;
}

static void make_ready(ns_runtime *r, ns_entry *entry, ns_wake *wake) {
    ns_device *device = &r->devices[entry->lane->device];
    entry->queued = true;
    device->moving++;
    r->moving++;
    push(&device->ready[entry->command.unit], (ns_item){entry->lane->priority, r->order++, entry});
    wake->devices |= (uint64_t)1 << entry->lane->device;
}

/* Whether the head of a lane completes here and now; one that needs a thread becomes ready. */
static bool completes_here(ns_runtime *r, ns_lane *lane, ns_wake *wake) {
    ns_entry *head = lane->head;
    if (head == NULL) return false;
    if (head->cancelled && r->cancelled) return true;
    if (head->blocked || head->queued || head->command.kind == NS_PLEDGE) return false;
    if (head->command.kind == NS_MARKER || ran_in_place(r, head, wake)) return true;
    make_ready(r, head, wake);
    return false;
}

/* A completion may move other lanes on: a work list, not recursion. A lane counts as listed until
 * it has gone as far as it can, so that one that is forgotten here is not in the list again. */
void ns_advance(ns_runtime *r, ns_wake *wake) {
    for (ns_lane *lane; (lane = r->moved) != NULL;) {
        r->moved = lane->next;
        while (completes_here(r, lane, wake)) complete(r, lane->head, wake);
        lane->listed = false;
        if (lane->closing && lane->head == NULL) forget(r, lane, wake);
    }
}

/* A command that the end gave up while it ran: `ns_stop` completes it, or has. */
static void finish_cancelled(ns_runtime *r, ns_entry *entry, ns_wake *wake) {
    r->moving--;
    r->running--;
    entry->started = false;
    if (entry->lane == NULL) free_later(entry, wake);
}

/* Bring back a command that has run: free its unit, move lanes on. */
void ns_finish(ns_runtime *r, ns_entry *entry, ns_wake *wake) {
    if (entry->cancelled) {
        finish_cancelled(r, entry, wake);
        return;
    }
    ns_device *device = &r->devices[entry->lane->device];
    device->running[entry->command.unit]--;
    device->moving--;
    r->moving--;
    r->running--;
    wake->devices |= (uint64_t)1 << entry->lane->device;
    note_interval(r, entry);
    leave_device(device, wake);
    complete(r, entry, wake);
    ns_advance(r, wake);
}

/* Complete the pledges of a host lane up to a value. */
void ns_complete(ns_runtime *r, int64_t id, int64_t value) {
    ns_wake wake = {0};
    pthread_mutex_lock(&r->mutex);
    ns_lane *lane = ns_find(r, id);
    while (lane != NULL && lane->head != NULL && lane->head->value <= value)
        complete(r, lane->head, &wake);
    ns_advance(r, &wake);
    ns_start_threads(r, &wake);
    ns_unlock(r, &wake);
}
