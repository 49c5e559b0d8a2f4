/* Loaded by LD_PRELOAD: every fsync and fdatasync takes BENCH_FLUSH_DELAY_US microseconds longer.
   A cloud volume flushes in 0.5 to 2 ms, where a disk with a cache of its own needs 0.05. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>

typedef int (*flush)(int);

static void wait_for_the_disk(void)
{
    static long delay_us = -1;
    if (delay_us < 0) {
        const char *given = getenv("BENCH_FLUSH_DELAY_US");
        delay_us = given ? atol(given) : 0;
    }
    if (delay_us > 0) {
        struct timespec pause = {delay_us / 1000000, delay_us % 1000000 * 1000};
        nanosleep(&pause, NULL);
    }
}

int fsync(int descriptor)
{
    wait_for_the_disk();
    return ((flush)dlsym(RTLD_NEXT, "fsync"))(descriptor);
}

int fdatasync(int descriptor)
{
    wait_for_the_disk();
    return ((flush)dlsym(RTLD_NEXT, "fdatasync"))(descriptor);
}
