/* The number of threads of a plan, and the modelled time of a launch. See plan.h.
 *
 * A second thread halves the work of a launch and has to be woken for it: it sleeps between runs,
 * and soon also while a launch runs that is too small to be shared. Where a plan's launches are
 * small or few, waking costs more than it saves: an MLP of 784-500-10 in batches of 64 takes 1.03
 * ms with one thread and 1.15 ms with two, ten layers of 128 in batches of 8 take 0.9 and 1.8 ms
 * (two virtual processors of a Xeon). The choice is made once per plan, from its shapes alone and
 * not from measured time: bits depend on the number of threads, and a repeated run must use the
 * same number.
 */
#include "server/plan/plan.h"

/* The work of one thread of a current processor in a microsecond, out of its caches. */
#define FLOPS_PER_US 200e3
#define BYTES_PER_US 20e3
/* The cost of involving other threads: in a launch, and in a run, whose two halves begin asleep.
 */
#define LAUNCH_US 15
#define RUN_US    300

int plan_threads(const plan_cost_t *cost, int threads) {
    const double alone = cost->flops / FLOPS_PER_US + cost->bytes / BYTES_PER_US;
    const double saved = alone - alone / threads;
    return saved > RUN_US + (double)LAUNCH_US * cost->launches ? threads : 1;
}

/* The fixed time of a launch. */
#define BEGIN_US 2

double plan_cost_us(const plan_cost_t *cost, int threads) {
    const double flops = cost->flops / FLOPS_PER_US, bytes = cost->bytes / BYTES_PER_US;
    const double work = (flops > bytes ? flops : bytes) + cost->again / BYTES_PER_US;
    return work / threads + BEGIN_US * (double)cost->launches;
}
