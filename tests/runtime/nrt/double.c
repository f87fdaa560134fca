/* A test double of libnrt: cores, units and queues played by threads of the CPU, strictly.
 *
 * What hardware would corrupt or forbid is written down as a violation, at the call that commits
 * it and whatever the timing: a request counts as in flight until its completion has been observed
 * by nrta_get_sequence or nrta_is_completed, however long ago it ended. Objects are never given
 * back to the allocator before double_reset, so that a stale pointer is recognised.
 *
 * One mutex guards everything and no thread runs a request inside it. Memory of the device is
 * memory of the process, so hazards between requests are overlaps of addresses.
 */
#define _GNU_SOURCE
#include "double.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum { CORES = 64, QUEUES = 3, MOST = 64, RECORDS = 1 << 14, SPANS = 2 * MOST };
enum { TENSOR = 0x7e115, SET, MODEL, TRACKER };
enum { NEW, OPEN, SHUT };
typedef struct { char *from, *to; } span_t;

typedef struct object {
    int kind;
    bool live;
    struct object *next;
} object_t;

typedef struct { char *bytes; size_t size; int users, vnc; } storage_t;

struct nrt_tensor { object_t object; storage_t *storage; size_t offset, size; int sets; };

typedef struct { char name[256]; nrt_tensor_t *tensor; } entry_t;
typedef struct { object_t object; entry_t *entries; int count; } set_t;

struct nrt_model {
    object_t object;
    int vnc, inputs, outputs, aliases;
    int alias[MOST][2]; /* the positions of an input, and of the output that is the same tensor */
    char kernel[32];
    int64_t number;
    uint64_t ns;
    nrt_tensor_info_t infos[MOST];
    uint32_t shapes[MOST][8];
};

#if NRT_ABI == 228
struct nrta_error_tracker { object_t object; nrta_error_t *errors; size_t count; };
typedef nrta_error_tracker_t outcome_t;
#else
typedef NRT_STATUS outcome_t;
#endif

typedef struct queue queue_t;
typedef struct request {
    struct request *next;
    queue_t *queue;
    uint64_t number;
    outcome_t *outcome;
    int before; /* what the status storage held when it was scheduled */
    char *to; const char *from; size_t size;
    nrt_model_t *model;
    set_t *in, *out;
    nrt_tensor_t *tensors[2];
    void *inputs[MOST], *outputs[MOST];
    size_t sizes[MOST];
    span_t reads[SPANS], writes[SPANS];
    int nreads, nwrites;
    bool ended;
    int fd, asked; /* to signal; how often it was registered */
    double scheduled;
} request_t;

struct queue {
    int lnc, xu, index;
    pthread_t thread;
    bool started, entered, dead;
    pthread_cond_t work;
    request_t *first, **last; /* those in flight, not observed */
    uint64_t given, ended, observed;
    int waiting, permits, fd, skip, fail, refuse, refusal;
    double free_at;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int state = NEW;
static bool closing;
static uint32_t cores = 2;
static int depth = 16;
static size_t memory = 1 << 28, used[CORES];
static uint64_t latency, jitter, major = 2, minor = NRT_ABI == 228 ? 30 : NRT_ABI == 229 ? 31 : 32;
static double_host_t host;
static double_keep_t keep;
static uint32_t family = 5;
static queue_t queues[CORES][NRTA_XU_TYPE_NUM][QUEUES];
static object_t *objects;
static char complaints[1 << 14];
static size_t complaint_count;
static double_record_t records[RECORDS];
static size_t record_count;
static int open_handles[1 << 12], open_count; /* write ends of completion handles */

enum { SCHEDULED, FULL, REGISTERED, HANDLES, LOOKS, ALLOCATED, SLICES, COUNTERS };
static const char *COUNTS[] = {"scheduled", "full", "registered", "handles", "looks",
                               "allocated", "slices"};
static int64_t counts[COUNTERS];

static void violate(const char *format, ...)
{
    char text[512];
    va_list rest;
    va_start(rest, format);
    vsnprintf(text, sizeof text, format, rest);
    va_end(rest);
    complaint_count++;
    size_t length = strlen(complaints);
    snprintf(complaints + length, sizeof complaints - length, "%s\n", text);
    fprintf(stderr, "nrt double: VIOLATION: %s\n", text);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void sleep_until(double moment)
{
    struct timespec t = {(time_t)moment, 0};
    t.tv_nsec = (long)((moment - t.tv_sec) * 1e9);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        continue;
}

/* -- objects --------------------------------------------------------------------------------- */

static NRT_STATUS enter(const char *what)
{
    pthread_mutex_lock(&lock);
    if (state == OPEN)
        return NRT_SUCCESS;
    violate("%s %s", what, state == NEW ? "before nrt_init" : "after nrt_close");
    return state == NEW ? NRT_UNINITIALIZED : NRT_CLOSED;
}

static NRT_STATUS leave(NRT_STATUS status)
{
    pthread_mutex_unlock(&lock);
    return status;
}

static void *make(int kind, size_t size)
{
    object_t *object = calloc(1, size);
    *object = (object_t){kind, true, objects};
    return objects = object;
}

static bool is_live(const void *object, int kind, const char *what)
{
    const object_t *found = object;
    if (found && found->kind == kind && found->live)
        return true;
    violate("%s: %s", what, found ? "an object that was freed, or is no such object" : "NULL");
    return false;
}

static request_t *in_flight(bool (*uses)(request_t *, const void *), const void *what)
{
    for (uint32_t c = 0; c < cores; c++)
        for (int x = 0; x < NRTA_XU_TYPE_NUM; x++)
            for (int q = 0; q < QUEUES; q++)
                for (request_t *r = queues[c][x][q].first; r; r = r->next)
                    if (uses(r, what))
                        return r;
    return NULL;
}

static bool uses_tensor(request_t *r, const void *tensor)
{
    if (r->tensors[0] == tensor || r->tensors[1] == tensor)
        return true;
    for (int s = 0; s < 2; s++) {
        set_t *set = s ? r->out : r->in;
        for (int i = 0; set && i < set->count; i++)
            if (set->entries[i].tensor == tensor)
                return true;
    }
    return false;
}
static bool uses_set(request_t *r, const void *set) { return r->in == set || r->out == set; }
static bool uses_model(request_t *r, const void *model) { return r->model == model; }
#if NRT_ABI == 228
static bool uses_tracker(request_t *r, const void *tracker) { return r->outcome == tracker; }
#else
static bool uses_status(request_t *r, const void *status) { return r->outcome == status; }
#endif

/* -- life ------------------------------------------------------------------------------------ */

static void *serve(void *argument);

static queue_t *prepare(int lnc, int xu, int index)
{
    queue_t *q = &queues[lnc][xu][index];
    if (!q->last) {
        q->last = &q->first;
        q->permits = q->fd = q->skip = -1;
        q->lnc = lnc;
        q->xu = xu;
        q->index = index;
    }
    return q;
}

NRT_STATUS nrt_init(nrt_framework_type_t framework, const char *fw, const char *fal)
{
    pthread_mutex_lock(&lock);
    if (!fw || !fal || framework == NRT_FRAMEWORK_TYPE_INVALID || state == OPEN) {
        violate("nrt_init: twice, or without its arguments");
        return leave(NRT_INVALID);
    }
    state = OPEN;
    for (int c = 0; c < CORES; c++)
        for (int x = 0; x < NRTA_XU_TYPE_NUM; x++)
            for (int q = 0; q < QUEUES; q++)
                prepare(c, x, q)->dead = false;
    return leave(NRT_SUCCESS);
}

static void join_threads(void)
{
    closing = true;
    for (int c = 0; c < CORES; c++)
        for (int x = 0; x < NRTA_XU_TYPE_NUM; x++)
            for (int q = 0; q < QUEUES; q++) {
                queue_t *queue = &queues[c][x][q];
                if (!queue->started)
                    continue;
                pthread_cond_broadcast(&queue->work);
                pthread_mutex_unlock(&lock);
                pthread_join(queue->thread, NULL);
                pthread_mutex_lock(&lock);
                queue->started = false;
            }
    closing = false;
}

static bool any(request_t *r, const void *nothing) { (void)r; return !nothing; }

void nrt_close(void)
{
    if (enter("nrt_close")) {
        leave(NRT_CLOSED);
        return;
    }
    if (in_flight(any, NULL))
        violate("nrt_close with requests in flight");
    for (object_t *o = objects; o; o = o->next)
        if (o->live)
            violate("nrt_close: %s is left", o->kind == TENSOR ? "a tensor"
                    : o->kind == SET ? "a tensor set" : o->kind == MODEL ? "a model" : "a tracker");
    for (int c = 0; c < CORES; c++)
        for (int x = 0; x < NRTA_XU_TYPE_NUM; x++)
            for (int q = 0; q < QUEUES; q++)
                if (queues[c][x][q].fd >= 0)
                    violate("nrt_close: an eventfd of unit %d queue %d is registered", x, q);
    for (int i = 0; i < open_count; i++) {
        struct pollfd end = {open_handles[i], 0, 0};
        if (poll(&end, 1, 0) != 1 || !(end.revents & POLLERR))
            violate("nrt_close: a completion handle was not closed");
        close(open_handles[i]);
    }
    open_count = 0;
    join_threads();
    state = SHUT;
    leave(NRT_SUCCESS);
}

NRT_STATUS nrt_get_total_vnc_count(uint32_t *count) { *count = cores; return NRT_SUCCESS; }
NRT_STATUS nrt_get_visible_vnc_count(uint32_t *count) { *count = cores; return NRT_SUCCESS; }

NRT_STATUS nrt_get_version(nrt_version_t *version, size_t size)
{
    if (size != sizeof *version) {
        pthread_mutex_lock(&lock);
        violate("nrt_get_version: a struct of %zu bytes, not %zu", size, sizeof *version);
        return leave(NRT_INVALID);
    }
    *version = (nrt_version_t){major, minor, 0, 0, "the double", "none"};
    return NRT_SUCCESS;
}

NRT_STATUS nrt_get_instance_info(nrt_instance_info_t *info, size_t size)
{
    if (size != sizeof *info) {
        pthread_mutex_lock(&lock);
        violate("nrt_get_instance_info: a struct of %zu bytes, not %zu", size, sizeof *info);
        return leave(NRT_INVALID);
    }
    *info = (nrt_instance_info_t){family, 1, "the double", "none"};
    return NRT_SUCCESS;
}

const char *nrt_get_status_as_str(NRT_STATUS status)
{
    return status ? "a status of the double" : "NRT_SUCCESS";
}

NRT_STATUS nrt_get_vnc_memory_stats(uint32_t vnc, nrt_vnc_memory_stats_t *stats, size_t in_size,
                                    size_t *out_size)
{
    NRT_STATUS status = enter("nrt_get_vnc_memory_stats");
    if (!status && in_size != sizeof *stats) {
        violate("nrt_get_vnc_memory_stats: a struct of %zu bytes", in_size);
        status = NRT_INVALID;
    }
    if (!status && vnc >= cores)
        status = NRT_INVALID;
    if (!status) {
        *stats = (nrt_vnc_memory_stats_t){used[vnc], memory};
        *out_size = sizeof *stats;
    }
    return leave(status);
}

/* -- tensors --------------------------------------------------------------------------------- */

NRT_STATUS nrt_tensor_allocate(nrt_tensor_placement_t placement, int vnc, size_t size,
                               const char *name, nrt_tensor_t **tensor)
{
    (void)name;
    NRT_STATUS status = enter("nrt_tensor_allocate");
    if (status || placement != NRT_TENSOR_PLACEMENT_DEVICE || (uint32_t)vnc >= cores || !size)
        return leave(status ? status : NRT_INVALID);
    if (used[vnc] + size > memory)
        return leave(NRT_RESOURCE);
    used[vnc] += size;
    counts[ALLOCATED]++;
    storage_t *storage = malloc(sizeof *storage);
    *storage = (storage_t){malloc(size), size, 1, vnc};
    memset(storage->bytes, 0xCB, size); /* fresh memory is garbage */
    *tensor = make(TENSOR, sizeof **tensor);
    (*tensor)->storage = storage;
    (*tensor)->size = size;
    return leave(NRT_SUCCESS);
}

NRT_STATUS nrt_tensor_allocate_slice(const nrt_tensor_t *source, size_t offset, size_t size,
                                     const char *name, nrt_tensor_t **slice)
{
    (void)name;
    NRT_STATUS status = enter("nrt_tensor_allocate_slice");
    if (!status && !is_live(source, TENSOR, "nrt_tensor_allocate_slice"))
        status = NRT_INVALID_HANDLE;
    if (!status && (offset > source->size || size > source->size - offset || !size))
        status = NRT_INVALID;
    if (status)
        return leave(status);
    counts[SLICES]++;
    *slice = make(TENSOR, sizeof **slice);
    (*slice)->storage = source->storage;
    (*slice)->offset = source->offset + offset;
    (*slice)->size = size;
    source->storage->users++;
    return leave(NRT_SUCCESS);
}

void nrt_tensor_free(nrt_tensor_t **tensor)
{
    if (!enter("nrt_tensor_free") && is_live(*tensor, TENSOR, "nrt_tensor_free")) {
        nrt_tensor_t *t = *tensor;
        if (in_flight(uses_tensor, t)) {
            violate("nrt_tensor_free: a tensor of a request in flight");
            t->storage->users++; /* never freed: hardware would corrupt memory, not this process */
        }
        if (t->sets)
            violate("nrt_tensor_free: a tensor of a tensor set that is still there");
        t->object.live = false;
        if (!--t->storage->users) {
            used[t->storage->vnc] -= t->storage->size;
            free(t->storage->bytes);
            free(t->storage);
        }
        *tensor = NULL;
    }
    leave(NRT_SUCCESS);
}

static bool fits(const nrt_tensor_t *tensor, uint64_t offset, uint64_t size)
{
    return offset <= tensor->size && size <= tensor->size - offset && size;
}

static char *address(const nrt_tensor_t *tensor, uint64_t offset)
{
    return tensor->storage->bytes + tensor->offset + offset;
}

static bool overlap(const span_t *a, int m, const span_t *b, int n)
{
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++)
            if (a[i].from < b[j].to && b[j].from < a[i].to)
                return true;
    return false;
}

static bool writes_to(request_t *r, const void *span) { return overlap(r->writes, r->nwrites, span, 1); }
static bool reads_from(request_t *r, const void *span) { return overlap(r->reads, r->nreads, span, 1); }

static NRT_STATUS touch(const nrt_tensor_t *tensor, size_t offset, size_t size, bool write)
{
    if (!is_live(tensor, TENSOR, "nrt_tensor_read or write"))
        return NRT_INVALID_HANDLE;
    if (!fits(tensor, offset, size))
        return NRT_INVALID;
    span_t span = {address(tensor, offset), address(tensor, offset) + size};
    if (in_flight(writes_to, &span) || (write && in_flight(reads_from, &span)))
        violate("nrt_tensor_%s: of memory that a request in flight uses", write ? "write" : "read");
    return NRT_SUCCESS;
}

NRT_STATUS nrt_tensor_read(const nrt_tensor_t *tensor, void *buf, size_t offset, size_t size)
{
    NRT_STATUS status = enter("nrt_tensor_read");
    if (!status && !(status = touch(tensor, offset, size, false)))
        memcpy(buf, address(tensor, offset), size);
    return leave(status);
}

NRT_STATUS nrt_tensor_write(nrt_tensor_t *tensor, const void *buf, size_t offset, size_t size)
{
    NRT_STATUS status = enter("nrt_tensor_write");
    if (!status && !(status = touch(tensor, offset, size, true)))
        memcpy(address(tensor, offset), buf, size);
    return leave(status);
}

size_t nrt_tensor_get_size(const nrt_tensor_t *tensor) { return tensor->size; }
void *nrt_tensor_get_va(const nrt_tensor_t *tensor) { return address(tensor, 0); }

NRT_STATUS nrt_allocate_tensor_set(nrt_tensor_set_t **set)
{
    NRT_STATUS status = enter("nrt_allocate_tensor_set");
    if (!status)
        *set = make(SET, sizeof(set_t));
    return leave(status);
}

void nrt_destroy_tensor_set(nrt_tensor_set_t **handle)
{
    if (!enter("nrt_destroy_tensor_set") && is_live(*handle, SET, "nrt_destroy_tensor_set")) {
        set_t *set = *handle;
        if (in_flight(uses_set, set))
            violate("nrt_destroy_tensor_set: a set of a request in flight");
        for (int i = 0; i < set->count; i++)
            set->entries[i].tensor->sets--;
        free(set->entries);
        set->entries = NULL;
        set->count = 0;
        set->object.live = false;
        *handle = NULL;
    }
    leave(NRT_SUCCESS);
}

NRT_STATUS nrt_add_tensor_to_tensor_set(nrt_tensor_set_t *handle, const char *name,
                                        nrt_tensor_t *tensor)
{
    set_t *set = handle;
    NRT_STATUS status = enter("nrt_add_tensor_to_tensor_set");
    if (!status && (!is_live(set, SET, "nrt_add_tensor_to_tensor_set")
                    || !is_live(tensor, TENSOR, "nrt_add_tensor_to_tensor_set")))
        status = NRT_INVALID_HANDLE;
    if (status)
        return leave(status);
    if (in_flight(uses_set, set))
        violate("nrt_add_tensor_to_tensor_set: a set of a request in flight");
    int i = 0;
    while (i < set->count && strcmp(set->entries[i].name, name))
        i++;
    if (i < set->count)
        set->entries[i].tensor->sets--;
    else
        set->entries = realloc(set->entries, ++set->count * sizeof(entry_t));
    snprintf(set->entries[i].name, sizeof set->entries[i].name, "%s", name);
    set->entries[i].tensor = tensor;
    tensor->sets++;
    return leave(NRT_SUCCESS);
}

/* -- models ---------------------------------------------------------------------------------- */

static bool parse_tensor(nrt_model_t *model, const char *line)
{
    char usage[8], shape[128] = "";
    int n = model->inputs + model->outputs, dtype, itemsize;
    if (n == MOST)
        return false;
    nrt_tensor_info_t *info = &model->infos[n];
    if (sscanf(line, "%7s %255s %d %d %127s", usage, info->name, &dtype, &itemsize, shape) < 4)
        return false;
    bool input = !strcmp(usage, "input");
    if ((!input && strcmp(usage, "output")) || (input && model->outputs))
        return false;
    info->usage = input ? NRT_TENSOR_USAGE_INPUT : NRT_TENSOR_USAGE_OUTPUT;
    info->dtype = dtype;
    info->size = itemsize;
    info->shape = model->shapes[n];
    for (char *at = shape; *at && info->ndim < 8; at += *at == ',') {
        info->shape[info->ndim] = strtoul(at, &at, 10);
        info->size *= info->shape[info->ndim++];
    }
    *(input ? &model->inputs : &model->outputs) += 1;
    return true;
}

static bool parse_alias(nrt_model_t *model, const char *line)
{
    int *pair = model->alias[model->aliases];
    if (model->aliases == MOST || sscanf(line, "alias %d %d", &pair[0], &pair[1]) != 2)
        return false;
    model->aliases++;
    return pair[0] >= 0 && pair[0] < model->inputs && pair[1] >= 0 && pair[1] < model->outputs;
}

/* A model is lines of text: "double-neff", "kernel NAME [NUMBER]", "time NS", and in this order
 * "input NAME DTYPE ITEMSIZE [SHAPE]", "output ..." of the same form, a shape being 2,3, and
 * "alias INPUT OUTPUT", by position. What follows an empty line is what the kernel "archive" runs. */
NRT_STATUS nrt_load(const void *neff, size_t size, int32_t vnc, int32_t vnc_count,
                    nrt_model_t **handle)
{
    NRT_STATUS status = enter("nrt_load");
    if (status || vnc_count != -1 || vnc < 0 || (uint32_t)vnc >= cores)
        return leave(status ? status : NRT_INVALID);
    const char *archive = memmem(neff, size, "\n\n", 2);
    archive = archive ? archive + 2 : (const char *)neff + size;
    char *text = strndup(neff, archive - (const char *)neff), *rest = text;
    char *line = strsep(&rest, "\n");
    nrt_model_t *model = make(MODEL, sizeof *model);
    model->vnc = vnc;
    bool good = !strcmp(line, "double-neff");
    while (good && rest && *(line = strsep(&rest, "\n"))) {
        if (!strncmp(line, "kernel ", 7))
            good = sscanf(line, "kernel %31s %ld", model->kernel, &model->number) >= 1;
        else if (!strncmp(line, "time ", 5))
            model->ns = strtoull(line + 5, NULL, 10);
        else
            good = !strncmp(line, "alias ", 6) ? parse_alias(model, line) : parse_tensor(model, line);
    }
    free(text);
    if (good && !strcmp(model->kernel, "archive")) {
        pthread_mutex_unlock(&lock); /* it may load a library */
        model->number = keep ? keep(archive, (const char *)neff + size - archive) : 0;
        pthread_mutex_lock(&lock);
        good = model->number;
    }
    model->object.live = good;
    *handle = model;
    return leave(good ? NRT_SUCCESS : NRT_UNSUPPORTED_NEFF_VERSION);
}

NRT_STATUS nrt_unload(nrt_model_t *model)
{
    NRT_STATUS status = enter("nrt_unload");
    if (!status && !is_live(model, MODEL, "nrt_unload"))
        status = NRT_INVALID_HANDLE;
    if (!status) {
        if (in_flight(uses_model, model))
            violate("nrt_unload: a model of a request in flight");
        model->object.live = false;
    }
    return leave(status);
}

NRT_STATUS nrt_get_model_tensor_info(nrt_model_t *model, nrt_tensor_info_array_t **info)
{
    NRT_STATUS status = enter("nrt_get_model_tensor_info");
    if (!status && !is_live(model, MODEL, "nrt_get_model_tensor_info"))
        status = NRT_INVALID_HANDLE;
    if (status)
        return leave(status);
    int n = model->inputs + model->outputs;
    *info = malloc(sizeof **info + n * sizeof(nrt_tensor_info_t));
    (*info)->tensor_count = n;
    memcpy((*info)->tensor_array, model->infos, n * sizeof(nrt_tensor_info_t));
    return leave(NRT_SUCCESS);
}

NRT_STATUS nrt_free_model_tensor_info(nrt_tensor_info_array_t *info)
{
    free(info);
    return NRT_SUCCESS;
}

static int run_kernel(request_t *r)
{
    nrt_model_t *model = r->model;
    if (!strcmp(model->kernel, "host") || !strcmp(model->kernel, "archive"))
        return host ? host(model->number, r->inputs, r->outputs) : NRT_FAILURE;
    if (!strcmp(model->kernel, "sum")) { /* of float32 inputs */
        size_t n = model->infos[model->inputs].size / sizeof(float);
        for (size_t k = 0; k < n; k++) {
            float sum = 0;
            for (int i = 0; i < model->inputs; i++)
                sum += ((float *)r->inputs[i])[k];
            ((float *)r->outputs[0])[k] = sum;
        }
        return NRT_SUCCESS;
    }
    for (int i = 0; i < model->outputs; i++) {
        size_t size = model->infos[model->inputs + i].size;
        if (!strcmp(model->kernel, "copy"))
            memmove(r->outputs[i], r->inputs[i], size);
        else if (!strcmp(model->kernel, "increment"))
            for (size_t k = 0; k < size / sizeof(float); k++)
                ((float *)r->outputs[i])[k] = ((float *)r->inputs[i])[k] + 1;
        else
            return NRT_FAILURE;
    }
    return NRT_SUCCESS;
}

/* -- queues ---------------------------------------------------------------------------------- */

static void store(request_t *r, int status)
{
    queue_t *q = r->queue;
#if NRT_ABI == 228
    nrta_error_tracker_t *tracker = r->outcome;
    if (!status)
        return;
    tracker->errors = realloc(tracker->errors, (tracker->count + 1) * sizeof(nrta_error_t));
    uint64_t id = (uint64_t)(q->lnc << 8 | q->index << 4 | q->xu) << 48;
    tracker->errors[tracker->count++] = (nrta_error_t){id | r->number, status};
#else
    if ((int)*r->outcome != r->before)
        violate("unit %d queue %d: the status storage of a request in flight was reused",
                q->xu, q->index);
    *r->outcome = status;
#endif
}

static void signal_fd(int fd)
{
    uint64_t one = 1;
    if (fd >= 0 && write(fd, &one, NRT_ABI == 228 ? 1 : sizeof one) < 0 && errno != EPIPE)
        violate("a file descriptor was closed before it was deregistered");
}

static int outcome_of(queue_t *q)
{
    if (q->dead)
        return NRT_EXEC_UNIT_UNRECOVERABLE;
    if (q->skip == 0) {
        q->skip = -1;
        return q->fail;
    }
    q->skip -= q->skip > 0;
    return -1; /* run it */
}

static void *serve(void *argument)
{
    queue_t *q = argument;
    unsigned seed = 1 + q->lnc * 100 + q->xu * 10 + q->index;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!closing && (!q->waiting || !q->permits))
            pthread_cond_wait(&q->work, &lock);
        if (!q->waiting)
            break;
        q->permits -= q->permits > 0;
        request_t *r = q->first;
        while (r->ended)
            r = r->next;
        double began = r->scheduled > q->free_at ? r->scheduled : q->free_at;
        double ns = latency + (r->model ? r->model->ns : 0);
        if (jitter)
            ns += rand_r(&seed) % jitter;
        int status = outcome_of(q);
        pthread_mutex_unlock(&lock);
        if (status < 0)
            status = r->model ? run_kernel(r) : (memmove(r->to, r->from, r->size), NRT_SUCCESS);
        if (ns > 0)
            sleep_until(began + ns * 1e-9);
        pthread_mutex_lock(&lock);
        q->free_at = now(); /* later than it should be where this thread was not woken in time */
        q->dead |= status == NRT_EXEC_UNIT_UNRECOVERABLE;
        records[record_count++ % RECORDS] = (double_record_t){
            q->lnc, q->xu, q->index, r->number, r->scheduled, began, q->free_at};
        store(r, status);
        r->ended = true;
        q->ended = r->number;
        q->waiting--;
        signal_fd(r->fd);
        signal_fd(q->fd);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void observe(queue_t *q, uint64_t number)
{
    if (number > q->observed)
        q->observed = number;
    while (q->first && q->first->number <= q->observed) {
        request_t *r = q->first;
        q->first = r->next;
        if (!q->first)
            q->last = &q->first;
        free(r);
    }
}

static void check_hazards(request_t *r)
{
    static const char *said = "unit %d queue %d: scheduled to %s what request %ld of unit %d queue"
                              " %d %s, before the completion of that was observed";
    for (uint32_t c = 0; c < cores; c++)
        for (int x = 0; x < NRTA_XU_TYPE_NUM; x++)
            for (int i = 0; i < QUEUES; i++) {
                queue_t *q = &queues[c][x][i], *mine = r->queue;
                for (request_t *p = q == mine ? NULL : q->first; p; p = p->next) {
                    if (overlap(p->writes, p->nwrites, r->reads, r->nreads))
                        violate(said, mine->xu, mine->index, "read", (long)p->number, x, i, "writes");
                    if (overlap(p->reads, p->nreads, r->writes, r->nwrites))
                        violate(said, mine->xu, mine->index, "write", (long)p->number, x, i, "reads");
                    if (overlap(p->writes, p->nwrites, r->writes, r->nwrites))
                        violate(said, mine->xu, mine->index, "write", (long)p->number, x, i, "writes");
                }
            }
}

static queue_t *queue_at(int lnc, int xu, int queue)
{
    static const int limits[] = {
#if NRT_ABI == 228
        [NRTA_XU_TENSOR_READ] = 2, [NRTA_XU_TENSOR_WRITE] = 2,
#endif
        [NRTA_XU_TENSOR_OP] = 2, [NRTA_XU_COMPUTE] = 1, [NRTA_XU_COLLECTIVES] = 3};
    bool there = lnc >= 0 && (uint32_t)lnc < cores && xu >= 0 && xu < NRTA_XU_TYPE_NUM;
    return there && queue >= 0 && queue < limits[xu] ? &queues[lnc][xu][queue] : NULL;
}

static nrta_seq_t sequence_of(queue_t *q, uint64_t number)
{
    return (uint64_t)(q->lnc << 8 | q->index << 4 | q->xu) << 48 | number;
}

static NRT_STATUS accept(queue_t *q, request_t *r, outcome_t *outcome, nrta_seq_t *sequence)
{
    if (__atomic_test_and_set(&q->entered, __ATOMIC_SEQ_CST))
        violate("unit %d queue %d: two threads schedule at once", q->xu, q->index);
    NRT_STATUS status = q->dead ? NRT_EXEC_UNIT_UNRECOVERABLE : NRT_SUCCESS;
    if (!status && q->refuse) {
        q->refuse--;
        status = q->refusal;
    }
    if (!status && q->waiting >= depth)
        status = NRT_QUEUE_FULL;
    counts[FULL] += status == NRT_QUEUE_FULL;
    if (!status) {
#if NRT_ABI == 228
        is_live(outcome, TRACKER, "a schedule call");
#else
        if (in_flight(uses_status, outcome))
            violate("two requests in flight have one status storage");
        r->before = *outcome;
#endif
        counts[SCHEDULED]++;
        r->outcome = outcome;
        r->queue = q;
        r->fd = -1;
        r->scheduled = now();
        check_hazards(r);
        *sequence = sequence_of(q, r->number = ++q->given);
        *q->last = r;
        q->last = &r->next;
        q->waiting++;
        if (!q->started) {
            pthread_create(&q->thread, NULL, serve, q);
            q->started = true;
        }
        if (q->permits)
            pthread_cond_signal(&q->work);
    }
    __atomic_clear(&q->entered, __ATOMIC_SEQ_CST);
    if (status)
        free(r);
    return status;
}

#if NRT_ABI == 228
#define LNC(tensor) (tensor)->storage->vnc
enum { READ = NRTA_XU_TENSOR_READ, WRITE = NRTA_XU_TENSOR_WRITE };
#else
#define LNC(tensor) lnc
enum { READ = NRTA_XU_TENSOR_OP, WRITE = NRTA_XU_TENSOR_OP };
#endif

static NRT_STATUS move(int xu, int lnc, int queue, nrt_tensor_t *a, nrt_tensor_t *b, char *to,
                       const char *from, uint64_t size, outcome_t *outcome, nrta_seq_t *sequence)
{
    queue_t *q = queue_at(lnc, xu, queue);
    if (!q || !to || !from || a->storage->vnc != lnc || (b && b->storage->vnc != lnc))
        return NRT_INVALID;
    request_t *r = calloc(1, sizeof *r);
    r->to = to;
    r->from = from;
    r->size = size;
    r->tensors[0] = a;
    r->tensors[1] = b;
    r->reads[r->nreads++] = (span_t){(char *)from, (char *)from + size};
    r->writes[r->nwrites++] = (span_t){to, to + size};
    return accept(q, r, outcome, sequence);
}

NRT_STATUS nrta_tensor_write(nrt_tensor_t *tensor, const void *buf, uint64_t offset, uint64_t size,
                             COPY_WHERE)
{
    NRT_STATUS status = enter("nrta_tensor_write");
    if (!status && !is_live(tensor, TENSOR, "nrta_tensor_write"))
        status = NRT_INVALID_HANDLE;
    if (!status && !fits(tensor, offset, size))
        status = NRT_INVALID;
    if (!status)
        status = move(WRITE, LNC(tensor), queue, tensor, NULL, address(tensor, offset), buf, size,
                      outcome, sequence);
    return leave(status);
}

NRT_STATUS nrta_tensor_read(void *buf, nrt_tensor_t *tensor, uint64_t offset, uint64_t size,
                            COPY_WHERE)
{
    NRT_STATUS status = enter("nrta_tensor_read");
    if (!status && !is_live(tensor, TENSOR, "nrta_tensor_read"))
        status = NRT_INVALID_HANDLE;
    if (!status && !fits(tensor, offset, size))
        status = NRT_INVALID;
    if (!status)
        status = move(READ, LNC(tensor), queue, tensor, NULL, buf, address(tensor, offset), size,
                      outcome, sequence);
    return leave(status);
}

NRT_STATUS nrta_tensor_copy(nrt_tensor_t *source, uint64_t source_offset, nrt_tensor_t *target,
                            uint64_t target_offset, uint64_t size, COPY_WHERE)
{
    NRT_STATUS status = enter("nrta_tensor_copy");
    if (!status && (!is_live(source, TENSOR, "nrta_tensor_copy")
                    || !is_live(target, TENSOR, "nrta_tensor_copy")))
        status = NRT_INVALID_HANDLE;
    if (!status && (!fits(source, source_offset, size) || !fits(target, target_offset, size)))
        status = NRT_INVALID;
    if (!status)
        status = move(NRTA_XU_TENSOR_OP, LNC(target), queue, source, target,
                      address(target, target_offset), address(source, source_offset), size,
                      outcome, sequence);
    return leave(status);
}

/* Finds the tensors that a model names in a set, and what it reads or writes. */
static bool gather(request_t *r, set_t *set, int first, int count, void **found, span_t *spans,
                   int *n)
{
    for (int i = 0; i < count; i++) {
        nrt_tensor_info_t *info = &r->model->infos[first + i];
        int e = 0;
        while (e < set->count && strcmp(set->entries[e].name, info->name))
            e++;
        if (e == set->count)
            return false;
        nrt_tensor_t *tensor = set->entries[e].tensor;
        if (!is_live(tensor, TENSOR, "nrta_execute_schedule") || tensor->size != info->size
            || tensor->storage->vnc != r->model->vnc)
            return false;
        found[i] = address(tensor, 0);
        spans[(*n)++] = (span_t){found[i], (char *)found[i] + tensor->size};
    }
    return true;
}

NRT_STATUS nrta_execute_schedule(nrt_model_t *model, const nrt_tensor_set_t *input,
                                 nrt_tensor_set_t *output, WHERE)
{
    NRT_STATUS status = enter("nrta_execute_schedule");
    const char *what = "nrta_execute_schedule";
    if (status)
        return leave(status);
    if (!is_live(model, MODEL, what) || !is_live(input, SET, what) || !is_live(output, SET, what))
        return leave(NRT_INVALID_HANDLE);
    queue_t *q = queue_at(model->vnc, NRTA_XU_COMPUTE, queue);
    if (!q)
        return leave(NRT_INVALID);
    request_t *r = calloc(1, sizeof *r);
    r->model = model;
    r->in = (set_t *)input;
    r->out = output;
    if (!gather(r, r->in, 0, model->inputs, r->inputs, r->reads, &r->nreads)
        || !gather(r, r->out, model->inputs, model->outputs, r->outputs, r->writes, &r->nwrites)) {
        free(r);
        return leave(NRT_INVALID);
    }
    for (int i = 0; i < model->aliases; i++)
        if (r->inputs[model->alias[i][0]] != r->outputs[model->alias[i][1]])
            violate("%s: the tensors of an aliased pair are two", what);
    return leave(accept(q, r, outcome, sequence));
}

/* -- completion ------------------------------------------------------------------------------ */

static queue_t *queue_of(nrta_seq_t sequence)
{
    int id = sequence >> 48;
    queue_t *q = queue_at(id >> 8, id & 15, id >> 4 & 15);
    uint64_t number = sequence & NRTA_SEQ_NUM_MASK;
    return q && number && number <= q->given ? q : NULL;
}

NRT_STATUS nrta_is_completed(nrta_seq_t sequence, bool *is_completed)
{
    NRT_STATUS status = enter("nrta_is_completed");
    queue_t *q = queue_of(sequence);
    if (status || !q)
        return leave(status ? status : NRT_INVALID);
    counts[LOOKS]++;
    uint64_t number = sequence & NRTA_SEQ_NUM_MASK;
    if ((*is_completed = q->ended >= number))
        observe(q, number);
    return leave(NRT_SUCCESS);
}

NRT_STATUS nrta_get_sequence(uint32_t lnc, nrta_xu_t xu, int queue, nrta_seq_t *sequence)
{
    NRT_STATUS status = enter("nrta_get_sequence");
    queue_t *q = queue_at(lnc, xu, queue);
    if (status || !q)
        return leave(status ? status : NRT_INVALID);
    counts[LOOKS]++;
    *sequence = sequence_of(q, q->ended);
    observe(q, q->ended);
    return leave(NRT_SUCCESS);
}

#if NRT_ABI == 228
NRT_STATUS nrta_get_completion_handle(nrta_seq_t sequence, int *fd)
{
    NRT_STATUS status = enter("nrta_get_completion_handle");
    queue_t *q = queue_of(sequence);
    int ends[2];
    if (status || !q || pipe2(ends, O_CLOEXEC | O_NONBLOCK))
        return leave(status ? status : NRT_INVALID);
    counts[HANDLES]++;
    *fd = ends[0];
    open_handles[open_count++ % 4096] = ends[1];
    open_count = open_count > 4096 ? 4096 : open_count;
    request_t *r = q->first;
    while (r && r->number != (sequence & NRTA_SEQ_NUM_MASK))
        r = r->next;
    if (r && r->asked++)
        violate("nrta_get_completion_handle: a sequence registered twice");
    if (r && !r->ended)
        r->fd = ends[1];
    else
        signal_fd(ends[1]);
    return leave(NRT_SUCCESS);
}

NRT_STATUS nrta_error_tracker_create(uint32_t lnc, nrta_error_tracker_t **tracker)
{
    NRT_STATUS status = enter("nrta_error_tracker_create");
    if (!status && lnc >= cores)
        status = NRT_INVALID;
    if (!status)
        *tracker = make(TRACKER, sizeof **tracker);
    return leave(status);
}

void nrta_error_tracker_destroy(nrta_error_tracker_t *tracker)
{
    const char *what = "nrta_error_tracker_destroy";
    if (!enter(what) && is_live(tracker, TRACKER, what)) {
        if (in_flight(uses_tracker, tracker))
            violate("%s: a tracker of a request in flight", what);
        tracker->object.live = false;
    }
    leave(NRT_SUCCESS);
}

NRT_STATUS nrta_error_tracker_get_list(nrta_error_tracker_t *tracker, const nrta_error_t **list,
                                       size_t *count)
{
    NRT_STATUS status = enter("nrta_error_tracker_get_list");
    if (!status && !is_live(tracker, TRACKER, "nrta_error_tracker_get_list"))
        status = NRT_INVALID_HANDLE;
    if (!status) {
        *list = tracker->errors;
        *count = tracker->count;
    }
    return leave(status);
}
#endif

#if NRT_ABI >= 230
NRT_STATUS nrta_event_register_seq_id_completion(nrta_seq_t sequence, int fd)
{
    NRT_STATUS status = enter("nrta_event_register_seq_id_completion");
    queue_t *q = queue_of(sequence);
    if (status || !q)
        return leave(status ? status : NRT_INVALID);
    request_t *r = q->first;
    while (r && r->number != (sequence & NRTA_SEQ_NUM_MASK))
        r = r->next;
    counts[REGISTERED] += fd >= 0;
    if (r && fd >= 0 && r->asked++)
        violate("nrta_event_register_seq_id_completion: a sequence registered twice");
    if (r && !r->ended)
        r->fd = fd;
    else
        signal_fd(fd);
    return leave(NRT_SUCCESS);
}

NRT_STATUS nrta_event_register_xu_completion(int lnc, nrta_xu_t xu, int queue, int fd)
{
    NRT_STATUS status = enter("nrta_event_register_xu_completion");
    queue_t *q = queue_at(lnc, xu, queue);
    if (status || !q)
        return leave(status ? status : NRT_INVALID);
    if (fd >= 0 && q->fd >= 0)
        violate("nrta_event_register_xu_completion: unit %d queue %d registered twice", xu, queue);
    if (fd >= 0 && q->first)
        violate("nrta_event_register_xu_completion: unit %d queue %d is in use already", xu, queue);
    counts[REGISTERED] += fd >= 0;
    q->fd = fd;
    return leave(NRT_SUCCESS);
}
#endif

/* -- the double's own ------------------------------------------------------------------------ */

void double_reset(void)
{
    pthread_mutex_lock(&lock);
    join_threads();
    for (int c = 0; c < CORES; c++)
        for (int x = 0; x < NRTA_XU_TYPE_NUM; x++)
            for (int q = 0; q < QUEUES; q++)
                observe(&queues[c][x][q], NRTA_SEQ_NUM_MASK);
    memset(queues, 0, sizeof queues);
    for (object_t *o = objects, *next; o; o = next) {
        next = o->next;
        if (o->kind == TENSOR && o->live && !--((nrt_tensor_t *)o)->storage->users) {
            free(((nrt_tensor_t *)o)->storage->bytes);
            free(((nrt_tensor_t *)o)->storage);
        }
        if (o->kind == SET)
            free(((set_t *)o)->entries);
#if NRT_ABI == 228
        if (o->kind == TRACKER)
            free(((nrta_error_tracker_t *)o)->errors);
#endif
        free(o);
    }
    while (open_count)
        close(open_handles[--open_count]);
    objects = NULL;
    state = NEW;
    cores = 2;
    depth = 16;
    memory = 1 << 28;
    family = 5;
    latency = jitter = complaint_count = record_count = 0;
    major = 2;
    minor = NRT_ABI == 228 ? 30 : NRT_ABI == 229 ? 31 : 32;
    complaints[0] = 0;
    memset(used, 0, sizeof used);
    memset(counts, 0, sizeof counts);
    leave(NRT_SUCCESS);
}

void double_set_host(double_host_t function, double_keep_t other) { host = function, keep = other; }
void double_set_family(uint32_t number) { family = number; }
void double_set_cores(uint32_t count) { cores = count; }
void double_set_memory(size_t bytes) { memory = bytes; }
void double_set_depth(int requests) { depth = requests; }
void double_set_version(uint64_t a, uint64_t b) { major = a; minor = b; }

void double_set_latency(uint64_t ns, uint64_t jitter_ns)
{
    latency = ns;
    jitter = jitter_ns;
}

static void knob(queue_t *q, int *what, int value, int *more, int value_of_more)
{
    pthread_mutex_lock(&lock);
    *what = value;
    if (more)
        *more = value_of_more;
    pthread_cond_signal(&q->work);
    leave(NRT_SUCCESS);
}

void double_hold(int lnc, int xu, int queue)
{
    queue_t *q = prepare(lnc, xu, queue);
    knob(q, &q->permits, 0, NULL, 0);
}

void double_release(int lnc, int xu, int queue, int count)
{
    queue_t *q = prepare(lnc, xu, queue);
    knob(q, &q->permits, count < 0 ? -1 : q->permits + count, NULL, 0);
}

void double_fail(int lnc, int xu, int queue, int skip, int status)
{
    queue_t *q = prepare(lnc, xu, queue);
    knob(q, &q->skip, skip, &q->fail, status);
}

void double_refuse(int lnc, int xu, int queue, int count, int status)
{
    queue_t *q = prepare(lnc, xu, queue);
    knob(q, &q->refuse, count, &q->refusal, status);
}

int64_t double_count(const char *what)
{
    for (int i = 0; i < COUNTERS; i++)
        if (!strcmp(COUNTS[i], what))
            return counts[i];
    return -1;
}

size_t double_violations(char *text, size_t size)
{
    pthread_mutex_lock(&lock);
    snprintf(text, size, "%s", complaints);
    size_t count = complaint_count;
    leave(NRT_SUCCESS);
    return count;
}

size_t double_history(double_record_t *out, size_t room)
{
    pthread_mutex_lock(&lock);
    size_t n = record_count < RECORDS ? record_count : RECORDS;
    n = n < room ? n : room;
    for (size_t i = 0; i < n; i++)
        out[i] = records[(record_count - n + i) % RECORDS];
    leave(NRT_SUCCESS);
    return n;
}

#define SIZE(type) {#type, sizeof(type)}
#define AT(type, field) {#type "." #field, offsetof(type, field)}

bool double_layout(size_t index, const char **name, size_t *value)
{
    static const struct { const char *name; size_t value; } layout[] = {
        SIZE(NRT_STATUS), SIZE(nrta_xu_t), SIZE(nrta_seq_t),
        SIZE(nrt_tensor_info_t), AT(nrt_tensor_info_t, name), AT(nrt_tensor_info_t, usage),
        AT(nrt_tensor_info_t, size), AT(nrt_tensor_info_t, dtype), AT(nrt_tensor_info_t, shape),
        AT(nrt_tensor_info_t, ndim),
        SIZE(nrt_tensor_info_array_t), AT(nrt_tensor_info_array_t, tensor_count),
        AT(nrt_tensor_info_array_t, tensor_array),
        SIZE(nrt_instance_info_t), AT(nrt_instance_info_t, family), AT(nrt_instance_info_t, size),
        AT(nrt_instance_info_t, arch_name), AT(nrt_instance_info_t, device_revision),
        SIZE(nrt_vnc_memory_stats_t), AT(nrt_vnc_memory_stats_t, bytes_used),
        AT(nrt_vnc_memory_stats_t, bytes_limit),
        SIZE(nrt_version_t), AT(nrt_version_t, rt_major), AT(nrt_version_t, rt_minor),
        AT(nrt_version_t, rt_patch), AT(nrt_version_t, rt_maintenance),
        AT(nrt_version_t, rt_detail), AT(nrt_version_t, git_hash),
#if NRT_ABI == 228
        SIZE(nrta_error_t), AT(nrta_error_t, seq_id), AT(nrta_error_t, error_code),
#endif
    };
    if (index >= sizeof layout / sizeof *layout)
        return false;
    *name = layout[index].name;
    *value = layout[index].value;
    return true;
}
