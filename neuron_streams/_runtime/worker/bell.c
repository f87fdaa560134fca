/* Sleeping and waking. See worker.h.
 *
 * A wake-up costs the waker some 20 us, so it is never done under the lock: a bell moves from its
 * list to a `wake`, and is rung behind the unlock.
 */
#include "worker.h"

#include <errno.h>
#include <string.h>

/* Seconds, on the scale of time.perf_counter(). */
double ns_now(void) {
#ifdef __APPLE__
    clockid_t clock = CLOCK_UPTIME_RAW;
#else
    clockid_t clock = CLOCK_MONOTONIC;
#endif
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

#ifdef __APPLE__
void ns_condition_init(pthread_cond_t *cond) { pthread_cond_init(cond, NULL); }
int ns_timed_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    double left = (double)until->tv_sec + 1e-9 * (double)until->tv_nsec - ns_now();
    struct timespec span = {(time_t)left, (long)((left - (double)(time_t)left) * 1e9)};
    return left <= 0 ? ETIMEDOUT : pthread_cond_timedwait_relative_np(cond, mutex, &span);
}
#else
void ns_condition_init(pthread_cond_t *cond) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}


int ns_timed_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    return pthread_cond_timedwait(cond, mutex, until);
}
#endif

void ns_bell_init(ns_bell *bell) {
    memset(bell, 0, sizeof *bell);
    pthread_mutex_init(&bell->mutex, NULL);
    ns_condition_init(&bell->cond);
}

void ns_bell_destroy(ns_bell *bell) {
    pthread_cond_destroy(&bell->cond);
    pthread_mutex_destroy(&bell->mutex);
}

/* Sleep until the bell is rung; false if `timeout_ns` (negative: none) passed first. */
static bool wait_for(ns_bell *bell, int64_t timeout_ns) {
    double end = ns_now() + 1e-9 * (double)timeout_ns;
    struct timespec until = {(time_t)end, (long)((end - (double)(time_t)end) * 1e9)};
    int failed = 0;
    pthread_mutex_lock(&bell->mutex);
    while (!bell->rung && !failed)
        failed = timeout_ns < 0 ? pthread_cond_wait(&bell->cond, &bell->mutex)
                                : ns_timed_wait(&bell->cond, &bell->mutex, &until);
    bool rung = bell->rung;
    bell->rung = false;
    pthread_mutex_unlock(&bell->mutex);
    return rung;
}

static void list(ns_bell **bells, ns_bell *bell) {
    while (*bells != NULL && (*bells)->value < bell->value) bells = &(*bells)->next;
    bell->listed = true;
    bell->next = *bells;
    *bells = bell;
}

void ns_ring_first(ns_wake *wake, ns_bell **bells) {
    ns_bell *bell = *bells;
    *bells = bell->next;
    bell->listed = false;
    bell->next = wake->bells;
    wake->bells = bell;
}

void ns_ring(ns_wake *wake, ns_bell **bells) {
    while (*bells != NULL) ns_ring_first(wake, bells);
}

void ns_unlock(ns_runtime *r, ns_wake *wake) {
    pthread_mutex_unlock(&r->mutex);
    while (wake->bells != NULL) {
        ns_bell *bell = wake->bells;
        wake->bells = bell->next; /* the sleeper may be gone once it is rung */
        pthread_mutex_lock(&bell->mutex);
        bell->rung = true;
        pthread_cond_signal(&bell->cond);
        pthread_mutex_unlock(&bell->mutex);
    }
    ns_entry *done = wake->done;
    wake->done = NULL;
    ns_free_entries(r, done);
}

/* Sleep on one of the runtime's lists of bells (ascending by value, then the newest first), with
 * the lock held before and after; false if the timeout passed first. */
bool ns_sleep_on(ns_runtime *r, ns_bell **bells, ns_bell *bell, int64_t timeout_ns,
                 ns_wake *wake) {
    list(bells, bell);
    ns_unlock(r, wake);
    bool rung = wait_for(bell, timeout_ns);
    pthread_mutex_lock(&r->mutex);
    if (rung) return true;
    if (!bell->listed) { /* somebody has decided to ring: they hold the bell until they have */
        pthread_mutex_unlock(&r->mutex);
        wait_for(bell, -1);
        pthread_mutex_lock(&r->mutex);
        return true;
    }
    while (*bells != bell) bells = &(*bells)->next;
    *bells = bell->next;
    return false;
}
