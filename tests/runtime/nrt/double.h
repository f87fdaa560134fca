/* The part of libnrt's public ABI that neuron_streams uses, as a test double declares it.
 *
 * NRT_ABI says whose asynchronous calls these are: 228 (SDK 2.28: error trackers and completion
 * handles), 229 (status pointers and lnc_idx, polling only) or 230 (and eventfds). Names, argument
 * orders, values and layouts are those of the public headers and documentation; no text is.
 * What begins with double_ belongs to the double: its knobs, and what it has seen.
 */
#ifndef NRT_DOUBLE_H
#define NRT_DOUBLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef NRT_ABI
#define NRT_ABI 230
#endif

typedef enum {
    NRT_SUCCESS = 0, NRT_FAILURE = 1, NRT_INVALID = 2, NRT_INVALID_HANDLE = 3, NRT_RESOURCE = 4,
    NRT_TIMEOUT = 5, NRT_HW_ERROR = 6, NRT_QUEUE_FULL = 7, NRT_LOAD_NOT_ENOUGH_NC = 9,
    NRT_UNSUPPORTED_NEFF_VERSION = 10, NRT_FAIL_HOST_MEM_ALLOC = 11, NRT_UNINITIALIZED = 13,
    NRT_CLOSED = 14, NRT_EXEC_UNIT_UNRECOVERABLE = 101, NRT_EXEC_COMPLETED_WITH_ERR = 1004,
} NRT_STATUS;

typedef enum { NRT_TENSOR_PLACEMENT_DEVICE, NRT_TENSOR_PLACEMENT_HOST } nrt_tensor_placement_t;
typedef enum { NRT_FRAMEWORK_TYPE_INVALID, NRT_FRAMEWORK_TYPE_NO_FW } nrt_framework_type_t;
typedef enum { NRT_TENSOR_USAGE_INPUT, NRT_TENSOR_USAGE_OUTPUT } nrt_tensor_usage_t;
typedef int nrt_dtype_t;

typedef struct nrt_model nrt_model_t;
typedef struct nrt_tensor nrt_tensor_t;
typedef void nrt_tensor_set_t;

typedef struct {
    char name[256];
    nrt_tensor_usage_t usage;
    size_t size;
    nrt_dtype_t dtype;
    uint32_t *shape;
    uint32_t ndim;
} nrt_tensor_info_t;

typedef struct {
    uint64_t tensor_count;
    nrt_tensor_info_t tensor_array[];
} nrt_tensor_info_array_t;

typedef struct {
    size_t bytes_used;
    size_t bytes_limit;
} nrt_vnc_memory_stats_t;

typedef struct {
    uint64_t rt_major, rt_minor, rt_patch, rt_maintenance;
    char rt_detail[128];
    char git_hash[64];
} nrt_version_t;

typedef struct {
    uint32_t family, size;
    char arch_name[16], device_revision[8];
} nrt_instance_info_t;

NRT_STATUS nrt_init(nrt_framework_type_t framework, const char *fw_version, const char *fal_version);
void nrt_close(void);
NRT_STATUS nrt_get_total_vnc_count(uint32_t *count);
NRT_STATUS nrt_get_visible_vnc_count(uint32_t *count);
NRT_STATUS nrt_get_version(nrt_version_t *version, size_t size);
NRT_STATUS nrt_get_instance_info(nrt_instance_info_t *info, size_t size);
const char *nrt_get_status_as_str(NRT_STATUS status);
NRT_STATUS nrt_get_vnc_memory_stats(uint32_t vnc, nrt_vnc_memory_stats_t *stats, size_t in_size,
                                    size_t *out_size);

NRT_STATUS nrt_load(const void *neff, size_t size, int32_t vnc, int32_t vnc_count,
                    nrt_model_t **model);
NRT_STATUS nrt_unload(nrt_model_t *model);
NRT_STATUS nrt_get_model_tensor_info(nrt_model_t *model, nrt_tensor_info_array_t **info);
NRT_STATUS nrt_free_model_tensor_info(nrt_tensor_info_array_t *info);

NRT_STATUS nrt_tensor_allocate(nrt_tensor_placement_t placement, int vnc, size_t size,
                               const char *name, nrt_tensor_t **tensor);
NRT_STATUS nrt_tensor_allocate_slice(const nrt_tensor_t *source, size_t offset, size_t size,
                                     const char *name, nrt_tensor_t **slice);
void nrt_tensor_free(nrt_tensor_t **tensor);
NRT_STATUS nrt_tensor_read(const nrt_tensor_t *tensor, void *buf, size_t offset, size_t size);
NRT_STATUS nrt_tensor_write(nrt_tensor_t *tensor, const void *buf, size_t offset, size_t size);
size_t nrt_tensor_get_size(const nrt_tensor_t *tensor);
void *nrt_tensor_get_va(const nrt_tensor_t *tensor);

NRT_STATUS nrt_allocate_tensor_set(nrt_tensor_set_t **set);
void nrt_destroy_tensor_set(nrt_tensor_set_t **set);
NRT_STATUS nrt_add_tensor_to_tensor_set(nrt_tensor_set_t *set, const char *name,
                                        nrt_tensor_t *tensor);

typedef uint64_t nrta_seq_t;
#define NRTA_SEQ_NUM_MASK ((UINT64_C(1) << 48) - 1)

#if NRT_ABI == 228
typedef enum {
    NRTA_XU_TENSOR_READ, NRTA_XU_TENSOR_WRITE, NRTA_XU_TENSOR_OP, NRTA_XU_COMPUTE,
    NRTA_XU_COLLECTIVES, NRTA_XU_TYPE_NUM,
} nrta_xu_t;
typedef struct nrta_error_tracker nrta_error_tracker_t;
typedef struct {
    nrta_seq_t seq_id;
    uint64_t error_code;
} nrta_error_t;
#define WHERE int queue, nrta_error_tracker_t *outcome, nrta_seq_t *sequence
#define COPY_WHERE WHERE

NRT_STATUS nrta_get_completion_handle(nrta_seq_t sequence, int *fd);
NRT_STATUS nrta_error_tracker_create(uint32_t lnc, nrta_error_tracker_t **tracker);
void nrta_error_tracker_destroy(nrta_error_tracker_t *tracker);
NRT_STATUS nrta_error_tracker_get_list(nrta_error_tracker_t *tracker, const nrta_error_t **list,
                                       size_t *count);
#else
typedef enum {
    NRTA_XU_TENSOR_OP, NRTA_XU_COMPUTE, NRTA_XU_COLLECTIVES, NRTA_XU_TYPE_NUM,
} nrta_xu_t;
#define WHERE int queue, NRT_STATUS *outcome, nrta_seq_t *sequence
#define COPY_WHERE int lnc, WHERE
#endif
#if NRT_ABI >= 230
NRT_STATUS nrta_event_register_seq_id_completion(nrta_seq_t sequence, int fd);
NRT_STATUS nrta_event_register_xu_completion(int lnc, nrta_xu_t xu, int queue, int fd);
#endif

NRT_STATUS nrta_tensor_write(nrt_tensor_t *tensor, const void *buf, uint64_t offset, uint64_t size,
                             COPY_WHERE);
NRT_STATUS nrta_tensor_read(void *buf, nrt_tensor_t *tensor, uint64_t offset, uint64_t size,
                            COPY_WHERE);
NRT_STATUS nrta_tensor_copy(nrt_tensor_t *source, uint64_t source_offset, nrt_tensor_t *target,
                            uint64_t target_offset, uint64_t size, COPY_WHERE);
NRT_STATUS nrta_execute_schedule(nrt_model_t *model, const nrt_tensor_set_t *input,
                                 nrt_tensor_set_t *output, WHERE);
NRT_STATUS nrta_is_completed(nrta_seq_t sequence, bool *is_completed);
NRT_STATUS nrta_get_sequence(uint32_t lnc, nrta_xu_t xu, int queue, nrta_seq_t *sequence);

/* -- the double's own ------------------------------------------------------------------------ */

/* Runs a model whose kernel is "host N"; what it returns is the status. */
typedef int (*double_host_t)(int64_t number, void **inputs, void **outputs);

/* Keeps what a model of the kernel "archive" carries; what it returns is its number, 0 is a failure. */
typedef int64_t (*double_keep_t)(const void *archive, size_t size);

/* One request that has ended, on the device's clock in seconds. */
typedef struct {
    int64_t lnc, xu, queue;
    uint64_t number;
    double scheduled, began, ended;
} double_record_t;

void double_reset(void);                    /* as if just loaded; waits for what runs */
void double_set_host(double_host_t host, double_keep_t keep);
void double_set_family(uint32_t family);
void double_set_cores(uint32_t cores);
void double_set_memory(size_t bytes);       /* per core */
void double_set_depth(int requests);        /* per queue; more are refused with QUEUE_FULL */
void double_set_latency(uint64_t ns, uint64_t jitter_ns); /* of every request */
void double_set_version(uint64_t major, uint64_t minor);
void double_hold(int lnc, int xu, int queue);              /* nothing starts there ... */
void double_release(int lnc, int xu, int queue, int count);/* ... but so many; < 0: all from now on */
void double_fail(int lnc, int xu, int queue, int skip, int status); /* one that ends so, not run */
void double_refuse(int lnc, int xu, int queue, int count, int status); /* what scheduling returns */
int64_t double_count(const char *what);     /* see COUNTS in double.c */
size_t double_violations(char *text, size_t size); /* how many; what they say, line by line */
size_t double_history(double_record_t *records, size_t room); /* the latest, oldest first */
bool double_layout(size_t index, const char **name, size_t *value); /* sizes and offsets of above */

#endif
