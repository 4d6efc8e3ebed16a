/* How many threads a plan takes, and how long a launch takes by the model. See plan.h.
 *
 * A second thread halves the work of a launch and has to be woken for it: it sleeps between runs,
 * and soon also while a launch runs that is too small to be shared. Where a plan's launches are
 * small or few, waking costs more than it saves: an MLP of 784-500-10 in batches of 64 takes 1.03
 * ms with one thread and 1.15 ms with two, ten layers of 128 in batches of 8 take 0.9 and 1.8 ms
 * (two virtual processors of a Xeon). The choice is one of the plan, by its shapes alone and not by
 * the clock: the number of threads decides bits, and a run is repeated with the same.
 */
#include "server/plan/plan.h"

/* What one thread of a current processor does in a microsecond, out of its caches. */
#define FLOPS_PER_US 200e3
#define BYTES_PER_US 20e3
/* What it costs to have others take part: in a launch, and in a run, whose two halves begin asleep.
 */
#define LAUNCH_US 15
#define RUN_US    300

int plan_threads(const plan_cost_t *cost, int threads) {
    const double alone = cost->flops / FLOPS_PER_US + cost->bytes / BYTES_PER_US;
    const double saved = alone - alone / threads;
    return saved > RUN_US + (double)LAUNCH_US * cost->launches ? threads : 1;
}

/* What a launch takes besides. */
#define BEGIN_US 2

double plan_cost_us(const plan_cost_t *cost, int threads) {
    const double flops = cost->flops / FLOPS_PER_US, bytes = cost->bytes / BYTES_PER_US;
    const double work = (flops > bytes ? flops : bytes) + cost->again / BYTES_PER_US;
    return work / threads + BEGIN_US * (double)cost->launches;
}
