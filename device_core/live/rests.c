/* How long a device rests after the server has refused what it sent: tflite_export/device/live/rests.py. The same
 * examples with the same theta would be refused again, and a visit costs the device energy and both sides bytes. */
#include "live.h"

#define FIRST_REST 5.0     /* seconds */
#define LONGEST_REST 180.0 /* seconds */

void live_begin_work(tfpfl_live *live, const struct json *work) {
    double seconds;
    live->rests.left = work != NULL && live_rate_entry(work, 1, "seconds", &seconds) ? seconds : FIRST_REST;
}

void live_taken(tfpfl_live *live, enum sent what) {
    live->rests.round[what] = 0;
    live->rests.row[what] = 0;
}

void live_refused(tfpfl_live *live, enum sent what, long status, int64_t round) {
    struct rests *rests = &live->rests;
    bool again = rests->round[what] == round;
    double rest = FIRST_REST;
    if (status == 410) return;  /* it came too late: the next work is another one */
    rests->round[what] = round;
    if (status == 409 && !again) return;  /* the same, unless the server asks for it once more */
    for (int i = 0; i < rests->row[what] && rest < LONGEST_REST; i++) rest *= 2;
    if (rest > LONGEST_REST) rest = LONGEST_REST;
    if (rests->row[what] == 0 && rest > rests->left) rest = rests->left;
    rests->row[what]++;
    rests->until = live_now() + rest;
    live_tell(live, "rests for %g s before it asks for work again", rest);
}

bool live_rested(tfpfl_live *live, double most) {
    double left = live->rests.until - live_now();
    if (left <= 0) return true;
    live_pause(left < most ? left : most);
    return live_now() >= live->rests.until;
}
