/* The clock and the pauses of a device: all of its waiting but that for an answer. A test has a clock of its own here. */
#include "live.h"

#include <errno.h>
#include <math.h>
#include <time.h>

double live_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

void live_pause(double seconds) {
    if (!(seconds > 0)) return;
    struct timespec left = {.tv_sec = (time_t)seconds};
    left.tv_nsec = (long)((seconds - floor(seconds)) * 1e9);
    while (nanosleep(&left, &left) != 0 && errno == EINTR) continue;
}
