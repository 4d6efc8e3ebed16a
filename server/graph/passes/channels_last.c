/* Convolutions and what is around them over channels-last tensors, where the device computes these
 * faster. See server/graph/channels/channels.h. Runs behind all that recognises patterns, and in
 * front of differentiation: the backward then is in that form of its own accord. */
#include "server/graph/channels/channels.h"

static gradd_status_t channels_last(graph_t *g) {
    channels_t c;
    GRADD_TRY(graph_sort(g));
    gradd_status_t status = channels_choose(g, &c);
    if (!status && c.any) status = channels_rewrite(&c);
    channels_finish(&c);
    return status;
}

const graph_pass_t graph_pass_channels_last = {
    "channels_last", 98, true, channels_last, {"ConvLast"}};
