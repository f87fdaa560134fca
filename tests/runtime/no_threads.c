/* For LD_PRELOAD: threads that the system refuses, as with RLIMIT_NPROC. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

typedef int create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

static int left = 1 << 30;

void allow_threads(int count) { __atomic_store_n(&left, count, __ATOMIC_SEQ_CST); }

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *),
                   void *argument) {
    create *real = (create *)dlsym(RTLD_NEXT, "pthread_create");
    if (__atomic_fetch_sub(&left, 1, __ATOMIC_SEQ_CST) <= 0) return EAGAIN;
    return real(thread, attributes, body, argument);
}
