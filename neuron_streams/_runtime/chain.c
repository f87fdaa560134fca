/* The chain runner: one call runs a whole compiled program, with no Python and no GIL.
 *
 * A program is a list of steps over numbered values. Values hold AtenTensorHandles: first the
 * inputs (made of the caller's memory), then the weights (borrowed), then what the steps make. The
 * C ABI of libtorch comes in as a table of function pointers, so this file needs no header of torch
 * and links to nothing.
 *
 * Steps, as 64-bit words (see program.py, which writes them):
 *   RUN   library, inputs, [value or ~value]..., outputs, [value, rank, sizes..., strides...]...
 *   SLICE source, target, rank, sizes..., strides..., offset
 *   DROP  value
 * An input written ~value is moved: this is its last use. A run steals all handles it is given.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NS_EXPORT __attribute__((visibility("default")))

typedef void *ns_tensor;
typedef int32_t (*ns_library_run)(void *container, ns_tensor *inputs, size_t input_count,
                                  ns_tensor *outputs, size_t output_count, void *stream,
                                  void *proxy);

struct ns_shims {
    int32_t (*wrap)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t,
                    int32_t, ns_tensor *);
    int32_t (*retain)(ns_tensor, ns_tensor *);
    int32_t (*release)(ns_tensor);
    int32_t (*slice)(ns_tensor, int64_t, const int64_t *, const int64_t *, int64_t, ns_tensor *);
    int32_t (*strides)(ns_tensor, int64_t **);
    int32_t (*offset)(ns_tensor, int64_t *);
    int32_t (*dtype)(ns_tensor, int32_t *);
    int32_t (*empty)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t,
                     ns_tensor *);
    int32_t (*copy)(ns_tensor, ns_tensor, int32_t);
};

struct ns_library {
    ns_library_run run;
    int32_t (*last_error)(const char **); /* NULL before torch 2.13 */
    void *container;
};

struct ns_program {
    const struct ns_shims *shims;
    const struct ns_library *libraries;
    const int64_t *code;
    int64_t code_length;
    int64_t input_count;
    const int64_t *inputs; /* of each: dtype, rank, sizes..., strides... */
    int64_t weight_count;
    int64_t value_count;
    int64_t widest; /* most inputs, or outputs, of one run */
    ns_tensor *weights;
    int64_t result_count;
    const int64_t *results;
};

enum { NS_RUN, NS_SLICE, NS_DROP };

/* A library may lay its output out otherwise than was promised: copy it into the promised form. */
static int32_t settle(const struct ns_shims *shims, ns_tensor *tensor, int64_t rank,
                      const int64_t *sizes, const int64_t *promised) {
    int64_t *strides;
    int64_t offset;
    int32_t dtype;
    ns_tensor fresh = NULL;
    if (shims->strides(*tensor, &strides) || shims->offset(*tensor, &offset)) return 1;
    int same = offset == 0;
    for (int64_t i = 0; i < rank; i++) same &= sizes[i] == 1 || strides[i] == promised[i];
    if (same) return 0;
    if (shims->dtype(*tensor, &dtype)) return 1;
    if (shims->empty(rank, sizes, promised, dtype, 0, 0, &fresh)) return 1;
    if (shims->copy(fresh, *tensor, 0)) {
        shims->release(fresh);
        return 1;
    }
    shims->release(*tensor);
    *tensor = fresh;
    return 0;
}

static int32_t gather(const struct ns_program *program, ns_tensor *values, const int64_t *words,
                      int64_t count, ns_tensor *inputs) {
    for (int64_t i = 0; i < count; i++) {
        if (words[i] < 0) {
            inputs[i] = values[~words[i]];
            values[~words[i]] = NULL;
        } else if (program->shims->retain(values[words[i]], &inputs[i])) {
            while (i-- > 0) program->shims->release(inputs[i]);
            return 1;
        }
    }
    return 0;
}

static _Thread_local const char *complaint = "";

/* What the library says of the run that failed last on this thread; "" where it cannot say. */
NS_EXPORT const char *ns_complaint(void) { return complaint; }

static void ask(const struct ns_library *library) {
    if (library->last_error == NULL || library->last_error(&complaint)) complaint = "";
}

/* Runs one library and returns the word after its step, or NULL if it failed. */
static const int64_t *run_library(const struct ns_program *program, ns_tensor *values,
                                  const int64_t *word, ns_tensor *inputs) {
    const struct ns_library *library = &program->libraries[*word++];
    int64_t input_count = *word++;
    const int64_t *taken = word;
    int64_t output_count = *(word += input_count);
    ns_tensor *outputs = inputs + program->widest;
    word++;
    if (gather(program, values, taken, input_count, inputs)) return NULL;
    if (library->run(library->container, inputs, (size_t)input_count, outputs,
                     (size_t)output_count, NULL, NULL)) {
        ask(library);
        return NULL;
    }
    const int64_t *given = word;
    for (int64_t i = 0; i < output_count; i++, given += 2 + 2 * given[1])
        values[given[0]] = outputs[i];
    for (int64_t i = 0; i < output_count; i++, word += 2 + 2 * word[1])
        if (settle(program->shims, &values[word[0]], word[1], word + 2, word + 2 + word[1]))
            return NULL;
    return word;
}

static const int64_t *run_slice(const struct ns_program *program, ns_tensor *values,
                                const int64_t *word) {
    int64_t rank = word[2];
    const int64_t *sizes = word + 3, *strides = sizes + rank, *offset = strides + rank;
    if (program->shims->slice(values[word[0]], rank, sizes, strides, *offset, &values[word[1]]))
        return NULL;
    return offset + 1;
}

static int32_t wrap_inputs(const struct ns_program *program, void *const *data,
                           ns_tensor *values) {
    const int64_t *word = program->inputs;
    for (int64_t i = 0; i < program->input_count; i++) {
        int64_t rank = word[1];
        const int64_t *sizes = word + 2, *strides = sizes + rank;
        if (program->shims->wrap(data[i], rank, sizes, strides, 0, (int32_t)word[0], 0, 0,
                                 &values[i]))
            return 1;
        word = strides + rank;
    }
    return 0;
}

static int64_t run_steps(const struct ns_program *program, ns_tensor *values,
                         ns_tensor *scratch) {
    const int64_t *word = program->code, *end = word + program->code_length;
    for (int64_t step = 1; word < end;) {
        int64_t kind = *word++;
        if (kind == NS_DROP) {
            program->shims->release(values[*word]);
            values[*word++] = NULL;
            continue;
        }
        word = kind == NS_RUN ? run_library(program, values, word, scratch)
                              : run_slice(program, values, word);
        if (word == NULL) return step;
        step++;
    }
    return 0;
}

/* Runs a program on the memory of its inputs. Returns 0 and fills `results` with handles, which
 * the caller owns, or the number of the run or slice that failed, counted from 1, or -1. */
NS_EXPORT int64_t ns_run(const struct ns_program *program, void *const *data,
                         ns_tensor *results) {
    int64_t count = program->value_count;
    int64_t weights_end = program->input_count + program->weight_count;
    size_t words = (size_t)(count + 2 * program->widest);
    complaint = "";
    ns_tensor *values = calloc(words ? words : 1, sizeof *values);
    if (values == NULL) return -1;
    if (program->weight_count)
        memcpy(values + program->input_count, program->weights,
               (size_t)program->weight_count * sizeof *values);
    int64_t failed = wrap_inputs(program, data, values) ? -1 : 0;
    if (!failed) failed = run_steps(program, values, values + count);
    for (int64_t i = 0; i < program->result_count && !failed; i++) {
        results[i] = values[program->results[i]];
        values[program->results[i]] = NULL;
    }
    for (int64_t i = 0; i < count; i++)
        if (values[i] != NULL && (i < program->input_count || i >= weights_end))
            program->shims->release(values[i]);
    free(values);
    return failed;
}
