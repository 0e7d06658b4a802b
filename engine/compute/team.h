/* A team of threads that shares the work of one caller. The caller works too and waits for tasks, never for threads: a
 * thread that the machine gives to somebody else delays nobody, it only takes no tasks. */
#ifndef BK_TEAM_H
#define BK_TEAM_H
#include <stdint.h>
typedef struct team team;
typedef void (*task_fn)(void *arg, int task, int thread);   /* thread: 0 is the caller */
team *team_new(int threads);          /* threads counts the caller; NULL when they cannot be had */
void  team_free(team *t);
void  team_run(team *t, int tasks, task_fn fn, void *arg);  /* returns when all tasks are done */
void  team_rest(team *t);             /* nothing more comes soon: threads stop spinning */
#endif
