/* Many threads at once on the native worker, for -fsanitize=thread and -fsanitize=address.
 *
 * Submitters send every kind of command to random lanes of two devices, with random tickets to wait
 * for, some that fail, and now and then close a lane and open another. Checked: values count up by
 * one per lane, a call that reads what another wrote finds it, units are never over their capacity,
 * everything submitted completes, each call is dropped once, nothing is lost at the end.
 * Usage: worker_stress COMMANDS [cancel]
 */
#include "worker.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUBMITTERS = 16, LANES = 64, DEVICES = 2, RECENT = 256, READS = 2, LENGTH = 4096 };

/* A number that a call writes; kept by the calls that name it and by lists. */
typedef struct cell {
    int references;
    bool written, broken;
    int64_t number;
} cell;

static cell *new_cell(void) {
    cell *made = calloc(1, sizeof *made);
    made->references = 1;
    return made;
}

static cell *keep(cell *c) {
    if (c != NULL) __atomic_add_fetch(&c->references, 1, __ATOMIC_RELAXED);
    return c;
}

static void let_go(cell *c) {
    if (c != NULL && __atomic_sub_fetch(&c->references, 1, __ATOMIC_ACQ_REL) == 0) free(c);
}

/* Writes one more than `before` into `fresh`, unless it fails; `others` were written before. */
typedef struct call {
    cell *before, *fresh, *others[READS];
    int64_t lane, value;
    int device, unit;
    bool fails;
} call;

/* What a lane of the test is: a chain of numbers, each one more than the one before. */
typedef struct chain {
    pthread_mutex_t mutex;
    int64_t id, device, *counters, length;
    cell *newest;
} chain;

typedef struct recent {
    ns_ticket ticket;
    cell *written;
} recent;

static ns_runtime *runtime;
static chain chains[LANES];
static recent recents[RECENT];
static pthread_mutex_t recent_mutex = PTHREAD_MUTEX_INITIALIZER;
static int inside[DEVICES][NS_UNITS];
static int64_t sent, made, dropped, closed_lanes, failures, threads;
static bool cancelling; /* then a lane may be completed while its last command still runs */

static void count(int64_t *what) { __atomic_add_fetch(what, 1, __ATOMIC_RELAXED); }

static void run(void *pointer, int64_t lane, int64_t value) {
    call *c = pointer;
    int *busy = &inside[c->device][c->unit];
    if (__atomic_add_fetch(busy, 1, __ATOMIC_ACQ_REL) > ns_queues[c->unit] && !cancelling) abort();
    if (lane != c->lane || value != c->value) abort();
    for (int i = 0; i < READS; i++)
        if (c->others[i] != NULL && !c->others[i]->written) abort();
    if (!c->before->written || c->fresh->written) abort();
    c->fresh->broken = c->before->broken || c->fails;
    c->fresh->number = c->before->number + 1;
    c->fresh->written = true;
    if (c->fails) count(&failures);
    __atomic_sub_fetch(busy, 1, __ATOMIC_ACQ_REL);
}

static void drop(void *pointer) {
    call *c = pointer;
    let_go(c->before);
    let_go(c->fresh);
    for (int i = 0; i < READS; i++) let_go(c->others[i]);
    free(c);
    count(&dropped);
}

static void enter_thread(void) { count(&threads); }

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static void open_chain(chain *c, int64_t device) {
    c->device = device;
    c->counters = calloc(2, sizeof *c->counters);
    c->length = 0;
    c->newest = new_cell();
    c->newest->written = true;
    c->id = ns_open_lane(runtime, device, -(int64_t)(device % 3), false, c->counters);
    if (c->id <= 0) abort();
}

static void check_chain(const chain *c) {
    if (!c->newest->written || c->newest->number != c->length) abort();
}

static void free_chain(chain *c) {
    let_go(c->newest);
    free(c->counters);
}

/* With the chain's lock held: wait for it, look at what it made, and start another. Half of the
 * lanes are closed with work pending. */
static void renew_chain(chain *c, bool early) {
    int64_t last = __atomic_load_n(&c->counters[1], __ATOMIC_ACQUIRE);
    if (early) ns_close_lane(runtime, c->id);
    while (!ns_wait(runtime, c->id, last, 1000000000)) continue;
    if (!early) ns_close_lane(runtime, c->id);
    check_chain(c);
    int64_t device = c->device;
    free_chain(c);
    open_chain(c, (device + 1) % DEVICES);
    count(&closed_lanes);
}

/* Tickets to wait for, and what was written at them. */
static int64_t take_recents(ns_ticket *after, cell **written, uint64_t *random) {
    int64_t wanted = (int64_t)(next_random(random) % (READS + 1));
    pthread_mutex_lock(&recent_mutex);
    for (int64_t i = 0; i < wanted; i++) {
        recent *r = &recents[next_random(random) % RECENT];
        after[i] = r->ticket;
        written[i] = keep(r->written);
    }
    pthread_mutex_unlock(&recent_mutex);
    return wanted;
}

static void note_recent(ns_ticket ticket, cell *written, uint64_t *random) {
    pthread_mutex_lock(&recent_mutex);
    recent *r = &recents[next_random(random) % RECENT];
    cell *before = r->written;
    *r = (recent){ticket, keep(written)};
    pthread_mutex_unlock(&recent_mutex);
    let_go(before);
}

/* The next command of a chain; a call takes over the references in `others`. */
static ns_command command_of(chain *c, cell **others, double *stamp, uint64_t choice) {
    ns_command made_command = {.name = "stress"};
    switch (choice % 8) {
    case 0:
        made_command.kind = NS_MARKER;
        made_command.stamp = stamp;
        return made_command;
    case 1:
        made_command.kind = NS_SLEEP;
        made_command.unit = NS_COMPUTE;
        made_command.nanoseconds = 1000;
        return made_command;
    }
    call *fresh = calloc(1, sizeof *fresh);
    *fresh = (call){keep(c->newest), new_cell(), {others[0], others[1]}, c->id, 0,
                    (int)c->device, (int)(choice / 8 % NS_UNITS), choice / 32 % 64 == 0};
    others[0] = others[1] = NULL;
    made_command.kind = NS_CALL;
    made_command.unit = fresh->unit;
    made_command.quick = choice / 4096 % 2;
    made_command.call = fresh;
    return made_command;
}

static int64_t submit(chain *c, const ns_command *command, const ns_ticket *after, int64_t length) {
    int64_t value;
    while ((value = ns_submit(runtime, c->id, command, after, length)) == NS_FULL)
        ns_wait_for_room(runtime, c->id, 1000000000);
    return value;
}

/* With the chain's lock held; false where the runtime takes no more. */
static bool send_to(chain *c, uint64_t *random) {
    static double stamp; /* written under the runtime's lock */
    ns_ticket after[READS];
    cell *others[READS] = {NULL, NULL};
    int64_t length = take_recents(after, others, random);
    ns_command command = command_of(c, others, &stamp, next_random(random));
    call *sending = command.call;
    cell *written = sending == NULL ? NULL : keep(sending->fresh);
    int64_t expected = __atomic_load_n(&c->counters[1], __ATOMIC_ACQUIRE) + 1;
    if (sending != NULL) sending->value = expected, count(&made);
    int64_t value = submit(c, &command, after, length);
    if (value != expected && value != NS_CLOSED) abort();
    if (value == NS_CLOSED && sending != NULL) drop(sending);
    if (value > 0 && sending != NULL) {
        let_go(c->newest);
        c->newest = keep(written);
        c->length++;
    }
    if (value > 0) note_recent((ns_ticket){c->id, value}, written, random);
    let_go(written);
    for (int i = 0; i < READS; i++) let_go(others[i]);
    if (value > 0 && next_random(random) % 64 == 0) ns_wait(runtime, c->id, value, 1000000);
    return value > 0;
}

typedef struct job {
    uint64_t random;
    int64_t commands, host_lane, counters[2];
    ns_interval *intervals;
} job;

/* Some wait for what only the host completes: a pledge, kept until this thread's next command. */
static void open_and_shut(job *work) {
    ns_complete(runtime, work->host_lane, work->counters[1]);
    if (next_random(&work->random) % 64) return;
    ns_command pledge = {.kind = NS_PLEDGE, .name = "pledge"};
    int64_t value = ns_submit(runtime, work->host_lane, &pledge, NULL, 0);
    if (value > 0) note_recent((ns_ticket){work->host_lane, value}, NULL, &work->random);
}

static void look_around(job *work) {
    ns_command head;
    ns_ticket ticket, awaited;
    if (next_random(&work->random) % 256 == 0)
        ns_head(runtime, chains[next_random(&work->random) % LANES].id, &head, &ticket, &awaited);
    if (next_random(&work->random) % 4096 == 0) ns_intervals(runtime, work->intervals);
}

static bool send_one(job *work) {
    chain *c = &chains[next_random(&work->random) % LANES];
    ns_complete(runtime, work->host_lane, work->counters[1]); /* before this thread may wait */
    pthread_mutex_lock(&c->mutex);
    bool full = c->length == LENGTH || next_random(&work->random) % 128 == 0;
    if (full && !cancelling) renew_chain(c, next_random(&work->random) % 2);
    bool taken = send_to(c, &work->random);
    pthread_mutex_unlock(&c->mutex);
    open_and_shut(work);
    count(&sent);
    return taken;
}

static void *submitter(void *argument) {
    job *work = argument;
    while (work->commands-- > 0 && send_one(work)) look_around(work);
    ns_complete(runtime, work->host_lane, work->counters[1]);
    return NULL;
}

static void note_cancelled(void *context, const ns_command *command, ns_ticket ticket,
                           bool running) {
    (void)command, (void)ticket, (void)running;
    ++*(int64_t *)context;
}

static int64_t end(bool cancel) {
    int64_t cancelled = 0;
    while (!cancel && !ns_drain(runtime, 1000000000)) continue;
    ns_cancel(runtime, note_cancelled, &cancelled);
    ns_stop(runtime);
    while (ns_join(runtime, 1000000000)) continue;
    return cancelled;
}

static void start_job(job *work, int number, int64_t commands) {
    *work = (job){.random = 0x9E3779B97F4A7C15u * (uint64_t)(number + 1), .commands = commands};
    work->intervals = calloc(NS_INTERVALS, sizeof *work->intervals);
    work->host_lane = ns_open_lane(runtime, number % DEVICES, 0, true, work->counters);
}

int main(int argument_count, char **arguments) {
    int64_t commands = argument_count > 1 ? atoll(arguments[1]) : 100000, cancelled = 0;
    bool cancel = cancelling = argument_count > 2;
    pthread_t submitters[SUBMITTERS];
    static job jobs[SUBMITTERS];
    const ns_calls calls = {run, drop, enter_thread};
    runtime = ns_new(DEVICES, &calls);
    for (int i = 0; i < LANES; i++) {
        pthread_mutex_init(&chains[i].mutex, NULL);
        open_chain(&chains[i], i % DEVICES);
    }
    for (int i = 0; i < SUBMITTERS; i++) {
        start_job(&jobs[i], i, commands / SUBMITTERS);
        pthread_create(&submitters[i], NULL, submitter, &jobs[i]);
    }
    while (cancel && __atomic_load_n(&sent, __ATOMIC_RELAXED) < commands / 2) sched_yield();
    if (cancel) cancelled = end(true);
    for (int i = 0; i < SUBMITTERS; i++) pthread_join(submitters[i], NULL);
    if (!cancel) cancelled = end(false);
    if (!cancel && cancelled) abort();
    for (int i = 0; i < LANES; i++) {
        if (chains[i].counters[0] != chains[i].counters[1]) abort();
        if (!cancel) check_chain(&chains[i]);
        free_chain(&chains[i]);
    }
    for (int i = 0; i < RECENT; i++) let_go(recents[i].written);
    for (int i = 0; i < SUBMITTERS; i++) free(jobs[i].intervals);
    ns_free(runtime);
    if (made != dropped || !threads) abort();
    printf("%ld lanes closed, %ld failed, %ld cancelled\n", (long)closed_lanes, (long)failures,
           (long)cancelled);
    return 0;
}
