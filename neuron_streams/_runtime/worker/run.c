/* How a command runs. See worker.h. */
#include "worker.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* libtorch's C ABI, handed over once by library.py, so that this file links to nothing. */
typedef struct ns_torch {
    int32_t (*empty)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t,
                     void **);
    int32_t (*data)(void *, void **);
    int32_t (*retain)(void *, void **);
    int32_t (*release)(void *);
    void (*set_grad_mode)(bool);
    int64_t uint8; /* the code of the dtype */
} ns_torch;

/* ../native.c */
extern int64_t ns_run(const void *program, void *const *inputs, void **results);
extern const char *ns_complaint(void);

static ns_torch torch;
/* Who makes the memory of a buffer: two commands that race for it are the user's error, and may
 * read anything, but not freed memory. */
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

NS_EXPORT void ns_use_torch(const ns_torch *table) { torch = *table; }

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

/* Autograd is off for what a thread of ours runs: it lies below it. */
void ns_enter_thread(void) {
    if (torch.set_grad_mode) torch.set_grad_mode(false);
}

static int32_t make_memory(ns_buffer *buffer) {
    const int64_t one = 1;
    if (buffer->data != NULL || buffer->nbytes == 0) return 0;
    void *owner;
    if (torch.empty(1, &buffer->nbytes, &one, (int32_t)torch.uint8, 0, 0, &owner)) return 1;
    buffer->owner = owner;
    return torch.data(owner, &buffer->data);
}

static int32_t ensure_memory(ns_buffer *buffer) {
    pthread_mutex_lock(&making);
    int32_t failed = make_memory(buffer);
    pthread_mutex_unlock(&making);
    return failed;
}

/* The buffer's memory is that of a tensor from now on. Steals the handle. */
static int32_t adopt(ns_buffer *buffer, void *tensor) {
    void *data;
    if (torch.data(tensor, &data)) return 1;
    pthread_mutex_lock(&making);
    void *before = buffer->owner;
    buffer->owner = tensor;
    buffer->data = data;
    pthread_mutex_unlock(&making);
    buffer->poisoned = 0;
    return before != NULL && torch.release(before);
}

/* A new handle of the tensor that owns the buffer's memory; NULL where the caller owns it. */
NS_EXPORT void *ns_share(ns_buffer *buffer) {
    void *shared = NULL;
    pthread_mutex_lock(&making);
    if (buffer->owner != NULL && torch.retain(buffer->owner, &shared)) shared = NULL;
    pthread_mutex_unlock(&making);
    return shared;
}

/* The buffer's memory is the caller's from now on. */
NS_EXPORT void ns_point(ns_buffer *buffer, void *data) {
    pthread_mutex_lock(&making);
    void *before = buffer->owner;
    buffer->owner = NULL;
    buffer->data = data;
    pthread_mutex_unlock(&making);
    if (before != NULL) torch.release(before);
}

NS_EXPORT void ns_release(void *owner) { torch.release(owner); }

/* Fresh memory for a buffer that no command has named, filled from the host. */
NS_EXPORT int32_t ns_fill(ns_buffer *buffer, const void *source) {
    if (ensure_memory(buffer)) return 1;
    if (buffer->nbytes) memcpy(buffer->data, source, (size_t)buffer->nbytes);
    return 0;
}

static ns_buffer *buffer_at(int64_t word) { return (ns_buffer *)(intptr_t)word; }

bool ns_is_poisoned(const ns_entry *entry) {
    const int64_t *words = entry->words;
    if (entry->kind == NS_COPY) return words[0] && buffer_at(words[0])->poisoned;
    if (entry->kind != NS_EXECUTE) return false;
    for (int64_t i = 0; i < words[1]; i++)
        if (buffer_at(words[3 + i])->poisoned) return true;
    return false;
}

/* An address: in a buffer, or as it is. */
static char *at(int64_t buffer, int64_t offset) {
    if (!buffer) return (char *)(intptr_t)offset;
    return ensure_memory(buffer_at(buffer)) ? NULL : (char *)buffer_at(buffer)->data + offset;
}

void ns_run_copy(ns_entry *entry) {
    const int64_t *words = entry->words;
    entry->failed = 0;
    entry->began = ns_now();
    char *source = at(words[0], words[1]), *target = at(words[2], words[3]);
    if (words[4] && source && target) memmove(target, source, (size_t)words[4]);
    else if (words[4]) entry->failed = -1;
    if (!entry->failed && words[2] && entry->overwrites) buffer_at(words[2])->poisoned = 0;
    entry->ended = ns_now();
}

static void run_execute(ns_entry *entry) {
    int64_t *words = entry->words, inputs = words[1], outputs = words[2];
    const int64_t *given = words + 3, *made = given + inputs, *offsets = made + outputs;
    void **data = (void **)(offsets + (entry->offsets ? inputs : 0)), **results = data + inputs;
    for (int64_t i = 0; i < inputs; i++) data[i] = at(given[i], entry->offsets ? offsets[i] : 0);
    entry->began = ns_now();
    entry->failed = ns_run((const void *)(intptr_t)words[0], data, results);
    if (entry->failed > 0) entry->message = strdup(ns_complaint());
    entry->ended = ns_now();
    for (int64_t i = 0; i < outputs && !entry->failed; i++)
        if (adopt(buffer_at(made[i]), results[i])) entry->failed = -1;
}

static void run_sleep(ns_runtime *r, ns_entry *entry) {
    struct timespec until;
    entry->began = ns_now();
    double end = entry->began + 1e-9 * (double)entry->words[0];
    until.tv_sec = (time_t)end;
    until.tv_nsec = (long)((end - (double)until.tv_sec) * 1e9);
    pthread_mutex_lock(&r->mutex);
    while (!r->closed && ns_now() < end) ns_timed_wait(&r->ended, &r->mutex, &until);
    pthread_mutex_unlock(&r->mutex);
    entry->ended = ns_now();
}

void ns_run_entry(ns_runtime *r, ns_entry *entry) {
    entry->poisoned = ns_is_poisoned(entry);
    if (entry->poisoned) entry->began = entry->ended = ns_now();
    else if (entry->kind == NS_SLEEP) run_sleep(r, entry);
    else if (entry->kind == NS_COPY) ns_run_copy(entry);
    else run_execute(entry);
}
