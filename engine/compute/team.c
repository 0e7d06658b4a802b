//go:build cgo && amd64

/* State is one word: the number of the job in the upper half, the next task in the lower. A thread takes a task by
 * compare-and-swap on it, so a thread that slept through a job cannot take a task of the next one by mistake: fn and arg
 * are written only while every task of the job before is taken and done, when no swap on the old word can succeed. */
#define _GNU_SOURCE
#include "team.h"
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define CLOSED 0xffffffffu   /* task number of a job that is being set up: out of reach of every count */
enum { YIELD = 20000 };      /* pauses before the caller, who waits for the last task, offers its CPU */
enum { SPIN = 2000 };   /* pauses before a thread parks: about 40 us, more than the time between two jobs of a pass */

struct team {
    _Atomic uint64_t state;
    _Atomic(task_fn) fn;
    _Atomic(void *) arg;
    _Atomic int tasks, done;
    char pad[64];
    _Atomic int parked, rest, stop;
    pthread_mutex_t mu;
    pthread_cond_t wake;
    int n;
    pthread_t *threads;
    struct seat { team *t; int thread; } *seats;
};

/* Takes tasks of the current job until none is left. */
static void work(team *t, int thread) {
    uint64_t s = atomic_load_explicit(&t->state, memory_order_acquire);
    for (;;) {
        uint32_t next = (uint32_t)s;
        if (next >= (uint32_t)atomic_load_explicit(&t->tasks, memory_order_acquire)) return;
        task_fn fn = atomic_load_explicit(&t->fn, memory_order_relaxed);
        void *arg = atomic_load_explicit(&t->arg, memory_order_relaxed);
        if (!atomic_compare_exchange_weak_explicit(&t->state, &s, s + 1, memory_order_acq_rel, memory_order_acquire)) continue;
        fn(arg, (int)next, thread);
        atomic_fetch_add_explicit(&t->done, 1, memory_order_release);
        s = atomic_load_explicit(&t->state, memory_order_acquire);
    }
}

/* Whether a job after the given one is open. */
static int open_after(team *t, uint64_t job) {
    uint64_t s = atomic_load(&t->state);
    return (s >> 32) != job && (uint32_t)s != CLOSED;
}

static void *serve(void *p) {
    struct seat *seat = p;
    team *t = seat->t;
    uint64_t job = 0;
    for (;;) {
        int spun = 0;
        while (!open_after(t, job) && !atomic_load(&t->stop)) {
            if (++spun < SPIN && !atomic_load_explicit(&t->rest, memory_order_relaxed)) { _mm_pause(); continue; }
            pthread_mutex_lock(&t->mu);
            atomic_fetch_add(&t->parked, 1);
            while (!open_after(t, job) && !atomic_load(&t->stop)) pthread_cond_wait(&t->wake, &t->mu);
            atomic_fetch_sub(&t->parked, 1);
            pthread_mutex_unlock(&t->mu);
        }
        if (atomic_load(&t->stop)) return NULL;
        job = atomic_load_explicit(&t->state, memory_order_acquire) >> 32;
        work(t, seat->thread);
    }
}

team *team_new(int threads) {
    team *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    pthread_mutex_init(&t->mu, NULL);
    pthread_cond_init(&t->wake, NULL);
    t->threads = calloc(threads, sizeof *t->threads);
    t->seats = calloc(threads, sizeof *t->seats);
    if (!t->threads || !t->seats) { team_free(t); return NULL; }
    for (int i = 1; i < threads; i++) {
        t->seats[i] = (struct seat){ t, i };
        if (pthread_create(&t->threads[t->n], NULL, serve, &t->seats[i])) { team_free(t); return NULL; }
        t->n++;
    }
    return t;
}

void team_free(team *t) {
    if (!t) return;
    pthread_mutex_lock(&t->mu);
    atomic_store(&t->stop, 1);
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->mu);
    for (int i = 0; i < t->n; i++) pthread_join(t->threads[i], NULL);
    pthread_cond_destroy(&t->wake);
    pthread_mutex_destroy(&t->mu);
    free(t->threads); free(t->seats); free(t);
}

void team_run(team *t, int tasks, task_fn fn, void *arg) {
    if (!t->n || tasks < 2) { for (int i = 0; i < tasks; i++) fn(arg, i, 0); return; }
    atomic_store_explicit(&t->rest, 0, memory_order_relaxed);
    /* The old word goes first: who still holds it may read the new count, function and argument, but cannot swap. */
    uint64_t job = (atomic_load_explicit(&t->state, memory_order_relaxed) >> 32) + 1;
    atomic_store_explicit(&t->state, job << 32 | CLOSED, memory_order_release);
    atomic_store_explicit(&t->fn, fn, memory_order_release);
    atomic_store_explicit(&t->arg, arg, memory_order_release);
    atomic_store_explicit(&t->done, 0, memory_order_release);
    atomic_store_explicit(&t->tasks, tasks, memory_order_release);
    atomic_store(&t->state, job << 32);
    if (atomic_load(&t->parked)) {
        pthread_mutex_lock(&t->mu);
        pthread_cond_broadcast(&t->wake);
        pthread_mutex_unlock(&t->mu);
    }
    work(t, 0);
    for (int spun = 0; atomic_load_explicit(&t->done, memory_order_acquire) < tasks; spun++) {
        if (spun < YIELD) _mm_pause(); else sched_yield();
    }
}

void team_rest(team *t) { atomic_store_explicit(&t->rest, 1, memory_order_relaxed); }
