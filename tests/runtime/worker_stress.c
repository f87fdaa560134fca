/* Many threads at once on the native worker, for -fsanitize=thread and -fsanitize=address.
 *
 * Submitters send every kind of command to random lanes of two devices, with random tickets to wait
 * for, some that fail, and now and then close a lane and open another; servers stand for threads of
 * Python. Checked: values count up by one per lane, a command that reads what another wrote finds
 * it, units are never over their capacity, everything submitted completes, nothing is lost at the
 * end. Usage: worker_stress COMMANDS [cancel]
 */
#include "worker.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUBMITTERS = 16, SERVERS = 3, LANES = 64, DEVICES = 2, RECENT = 256 };

/* The functions that end.c and the others export; worker.h keeps what is theirs alone. */
ns_runtime *ns_new(int64_t);
int64_t ns_open_lane(ns_runtime *, int64_t, int64_t, int64_t, int64_t *);
void ns_close_lane(ns_runtime *, int64_t);
int64_t ns_submit(ns_runtime *, int64_t, const int64_t *, int64_t);
void ns_complete(ns_runtime *, int64_t, int64_t);
ns_entry *ns_next(ns_runtime *, ns_entry *, int64_t *);
int64_t ns_wait(ns_runtime *, int64_t, int64_t, int64_t);
void ns_wait_for_room(ns_runtime *, int64_t, int64_t);
int64_t ns_drain(ns_runtime *, int64_t);
int64_t ns_cancel(ns_runtime *, int64_t *, int64_t);
void ns_stop(ns_runtime *);
int64_t ns_join(ns_runtime *, int64_t);
void ns_free(ns_runtime *);
void ns_use_torch(const void *);
int64_t ns_intervals(ns_runtime *, ns_interval *);

typedef struct tensor {
    int references;
    char *data;
} tensor;

/* A libtorch of handles and bytes. */
static int32_t retain(void *owner, void **made) {
    __atomic_add_fetch(&((tensor *)owner)->references, 1, __ATOMIC_ACQ_REL);
    *made = owner;
    return 0;
}

static int32_t release(void *handle) {
    tensor *owner = handle;
    if (__atomic_sub_fetch(&owner->references, 1, __ATOMIC_ACQ_REL) == 0) {
        free(owner->data);
        free(owner);
    }
    return 0;
}

static int32_t empty(int64_t rank, const int64_t *sizes, const int64_t *strides, int32_t dtype,
                     int32_t type, int32_t index, void **made) {
    (void)rank, (void)strides, (void)dtype, (void)type, (void)index;
    tensor *fresh = malloc(sizeof *fresh);
    *fresh = (tensor){1, calloc(1, (size_t)sizes[0])};
    *made = fresh;
    return 0;
}

static int32_t data_of(void *handle, void **data) {
    *data = ((tensor *)handle)->data;
    return 0;
}

static void set_grad_mode(bool enabled) { (void)enabled; }

static const struct {
    int32_t (*empty)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t,
                     void **);
    int32_t (*data)(void *, void **);
    int32_t (*retain)(void *, void **);
    int32_t (*release)(void *);
    void (*set_grad_mode)(bool);
    int64_t uint8;
} torch = {empty, data_of, retain, release, set_grad_mode, 0};

/* A program: adds one to an eight byte number, keeps its device to itself, or fails. */
typedef struct program {
    int inside;
    bool fails;
} program;

int64_t ns_run(const void *which, void *const *inputs, void **results) {
    program *p = (program *)which;
    const int64_t size = 8, one = 1;
    int inside = __atomic_add_fetch(&p->inside, 1, __ATOMIC_ACQ_REL);
    if (!p->fails) {
        if (inside != 1) abort(); /* COMPUTE is one queue */
        empty(1, &size, &one, 0, 0, 0, &results[0]);
        *(int64_t *)((tensor *)results[0])->data = *(int64_t *)inputs[0] + 1;
    }
    __atomic_sub_fetch(&p->inside, 1, __ATOMIC_ACQ_REL);
    return p->fails;
}

const char *ns_complaint(void) { return "it fails by design"; }

/* What a lane of the test is: a chain of numbers, each one more than the one before. */
typedef struct chain {
    pthread_mutex_t mutex;
    int64_t id, device, *counters;
    ns_buffer *buffers; /* the numbers, in the order of the commands */
    int64_t length, room;
    bool broken;
} chain;

static ns_runtime *runtime;
static chain chains[LANES];
static program programs[DEVICES], failing = {0, true};
static int64_t recent[RECENT][2];
static int64_t sent, closed_lanes, failures, served;
static bool cancelling; /* then a lane may be completed while its last command still runs */
static pthread_mutex_t recent_mutex = PTHREAD_MUTEX_INITIALIZER;

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static void open_chain(chain *c, int64_t device) {
    c->device = device;
    c->counters = calloc(2, sizeof *c->counters);
    c->room = 4096;
    c->buffers = calloc((size_t)c->room, sizeof *c->buffers);
    for (int64_t i = 0; i < c->room; i++) c->buffers[i].nbytes = 8;
    c->length = 1; /* the first is zero: made when it is first read */
    c->broken = false;
    c->id = ns_open_lane(runtime, device, -(int64_t)(device % 3), 0, c->counters);
    if (c->id <= 0) abort();
}

static void check_chain(const chain *c) {
    for (int64_t i = 1; i < c->length && !c->broken; i++)
        if (c->buffers[i].data == NULL || *(int64_t *)c->buffers[i].data != i) abort();
}

static void free_chain(chain *c) {
    for (int64_t i = 0; i < c->length; i++)
        if (c->buffers[i].owner != NULL) release(c->buffers[i].owner);
    free(c->buffers);
    free(c->counters);
}

/* With the chain's lock held: wait for it, look at what it made, and start another. */
static void renew_chain(chain *c) {
    int64_t last = __atomic_load_n(&c->counters[1], __ATOMIC_ACQUIRE);
    while (!ns_wait(runtime, c->id, last, 1000000000)) continue;
    ns_close_lane(runtime, c->id);
    check_chain(c);
    int64_t device = c->device;
    free_chain(c);
    open_chain(c, (device + 1) % DEVICES);
    __atomic_add_fetch(&closed_lanes, 1, __ATOMIC_RELAXED);
}

/* Words of the next command of a chain, behind `header`; returns their number. */
static int64_t write_command(chain *c, int64_t *header, uint64_t choice) {
    int64_t *words = header + 6 + 2 * header[5], n = c->length;
    int64_t before = (intptr_t)&c->buffers[n - 1], fresh = (intptr_t)&c->buffers[n];
    switch (choice % 16) {
    case 0: case 1:
        header[0] = NS_MARKER, words[0] = 0;
        return 1;
    case 2:
        header[0] = NS_SLEEP, words[0] = 1000;
        return 1;
    case 3: case 4: case 5:
        header[0] = NS_PYTHON, header[1] = choice / 16 % NS_UNITS;
        return 0;
    case 6:
        if (choice / 16 % 64) break;
        header[0] = NS_EXECUTE, c->broken = true;
        memcpy(words, (int64_t[]){(intptr_t)&failing, 1, 1, before, fresh}, 5 * sizeof *words);
        c->length++;
        return 5;
    case 7: case 8: case 9: /* a copy makes the number one less than it should be: not used */
        header[0] = NS_COPY, header[1] = NS_TENSOR_OP, header[2] = choice / 16 % 2;
        memcpy(words, (int64_t[]){before, 0, (intptr_t)&c->buffers[0], 0, 0}, 5 * sizeof *words);
        return 5;
    }
    header[0] = NS_EXECUTE, header[2] = choice / 16 % 2 * 4; /* half of them say the offset, 0 */
    memcpy(words,
           (int64_t[]){(intptr_t)&programs[c->device], 1, 1, before, fresh, 0},
           6 * sizeof *words);
    c->length++;
    return header[2] ? 6 : 5;
}

static int64_t add_tickets(int64_t *header, uint64_t *random) {
    int64_t count = next_random(random) % 3;
    pthread_mutex_lock(&recent_mutex);
    for (int64_t i = 0; i < count; i++)
        memcpy(header + 6 + 2 * i, recent[next_random(random) % RECENT], 2 * sizeof *header);
    pthread_mutex_unlock(&recent_mutex);
    return count;
}

static int64_t submit(chain *c, const int64_t *message, int64_t length) {
    int64_t value;
    while ((value = ns_submit(runtime, c->id, message, length)) == NS_FULL)
        ns_wait_for_room(runtime, c->id, 1000000000);
    return value;
}

static bool send_one(uint64_t *random) {
    int64_t message[32] = {0};
    chain *c = &chains[next_random(random) % LANES];
    message[5] = add_tickets(message, random);
    pthread_mutex_lock(&c->mutex);
    bool full = c->length + 1 == c->room || next_random(random) % 4096 == 0;
    if (full && !cancelling) renew_chain(c);
    if (c->length + 1 == c->room) c->length--;
    int64_t length = 6 + 2 * message[5];
    length += write_command(c, message, next_random(random));
    int64_t expected = __atomic_load_n(&c->counters[1], __ATOMIC_ACQUIRE) + 1;
    int64_t value = submit(c, message, length), id = c->id;
    if (value != expected && value != NS_CLOSED) abort();
    pthread_mutex_unlock(&c->mutex);
    pthread_mutex_lock(&recent_mutex);
    memcpy(recent[next_random(random) % RECENT], (int64_t[]){id, value}, sizeof recent[0]);
    pthread_mutex_unlock(&recent_mutex);
    if (value > 0 && next_random(random) % 64 == 0) ns_wait(runtime, id, value, 1000000);
    __atomic_add_fetch(&sent, 1, __ATOMIC_RELAXED);
    return value > 0;
}

typedef struct job {
    uint64_t random;
    int64_t commands;
} job;

static void *submitter(void *argument) {
    job *work = argument;
    while (work->commands-- > 0 && send_one(&work->random)) continue;
    return NULL;
}

static void *server(void *argument) {
    int64_t told[6];
    ns_entry *entry = NULL;
    (void)argument;
    while ((entry = ns_next(runtime, entry, told)) != NULL) {
        if (entry->kind == NS_EXECUTE && !told[4] && !ns_is_poisoned(entry)) abort();
        if (entry->kind == NS_EXECUTE) ((ns_buffer *)(intptr_t)entry->words[4])->poisoned = 1;
        __atomic_add_fetch(told[4] || entry->kind == NS_EXECUTE ? &failures : &served, 1,
                           __ATOMIC_RELAXED);
    }
    return NULL;
}

static int64_t end(bool cancel) {
    int64_t told[4 * 64], cancelled = 0, count;
    while (!cancel && !ns_drain(runtime, 1000000000)) continue;
    while ((count = ns_cancel(runtime, told, 64)) > 0) cancelled += count;
    ns_stop(runtime);
    while (ns_join(runtime, 1000000000)) continue;
    return cancelled;
}

int main(int count, char **arguments) {
    int64_t commands = count > 1 ? atoll(arguments[1]) : 100000;
    bool cancel = cancelling = count > 2;
    pthread_t submitters[SUBMITTERS], servers[SERVERS];
    job jobs[SUBMITTERS];
    ns_use_torch(&torch);
    runtime = ns_new(DEVICES);
    for (int i = 0; i < LANES; i++) {
        pthread_mutex_init(&chains[i].mutex, NULL);
        open_chain(&chains[i], i % DEVICES);
    }
    for (int i = 0; i < SERVERS; i++) pthread_create(&servers[i], NULL, server, NULL);
    for (int i = 0; i < SUBMITTERS; i++) {
        jobs[i] = (job){0x9E3779B97F4A7C15u * (uint64_t)(i + 1), commands / SUBMITTERS};
        pthread_create(&submitters[i], NULL, submitter, &jobs[i]);
    }
    int64_t cancelled = 0;
    while (cancel && __atomic_load_n(&sent, __ATOMIC_RELAXED) < commands / 2) sched_yield();
    if (cancel) cancelled = end(true);
    for (int i = 0; i < SUBMITTERS; i++) pthread_join(submitters[i], NULL);
    if (!cancel) cancelled = end(false);
    for (int i = 0; i < SERVERS; i++) pthread_join(servers[i], NULL);
    if (!cancel && cancelled) abort();
    for (int i = 0; i < LANES; i++) {
        if (chains[i].counters[0] != chains[i].counters[1]) abort();
        if (!cancel) check_chain(&chains[i]);
        free_chain(&chains[i]);
    }
    ns_free(runtime);
    printf("%ld lanes closed, %ld served, %ld failed, %ld cancelled\n", (long)closed_lanes,
           (long)served, (long)failures, (long)cancelled);
    return 0;
}
