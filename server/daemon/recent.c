/* A ring of requests. See recent.h. */
#include "server/daemon/recent.h"

static verb_total_t *total_of(recent_t *recent, const char *verb) {
    int i = 0;
    while (i < recent->n_totals && recent->totals[i].verb != verb)
        i++;
    if (i == RECENT_VERBS) return NULL;
    if (i == recent->n_totals) recent->totals[recent->n_totals++].verb = verb;
    return &recent->totals[i];
}

void recent_add(recent_t *recent, const request_t *request) {
    verb_total_t *total = total_of(recent, request->command->name);
    if (total) {
        total->n++;
        total->waited_us += request->started_us - request->arrived_us;
        total->ran_us += request->ended_us - request->started_us;
    }
    const int64_t rest = atomic_load(&request->session->counts.arena_bytes);
    recent->requests[recent->n++ % RECENT_MOST] =
        (recent_request_t){.verb = request->command->name,
                           .session = request->session->number,
                           .arrived_us = request->arrived_us,
                           .started_us = request->started_us,
                           .ended_us = request->ended_us,
                           .arena_bytes = request->arena_bytes > rest ? request->arena_bytes : rest,
                           .rest_bytes = rest};
}

static void put_number(wire_out_t *out, const char *key, int64_t value) {
    wire_put_text(out, key);
    wire_put_i64(out, value);
}

void recent_put_totals(const recent_t *recent, wire_out_t *reply) {
    wire_put_list(reply, (uint32_t)recent->n_totals);
    for (int i = 0; i < recent->n_totals; i++) {
        const verb_total_t *total = &recent->totals[i];
        wire_put_map(reply, 4);
        wire_put_text(reply, "v");
        wire_put_text(reply, total->verb);
        put_number(reply, "n", (int64_t)total->n);
        put_number(reply, "waited_us", total->waited_us);
        put_number(reply, "ran_us", total->ran_us);
    }
}

static void put_request(wire_out_t *out, const recent_request_t *r) {
    wire_put_map(out, 7);
    wire_put_text(out, "v");
    wire_put_text(out, r->verb);
    put_number(out, "session", r->session);
    put_number(out, "at", r->arrived_us);
    put_number(out, "queued", r->started_us - r->arrived_us);
    put_number(out, "ran", r->ended_us - r->started_us);
    put_number(out, "arena", r->arena_bytes);
    put_number(out, "rest", r->rest_bytes);
}

void recent_put(const recent_t *recent, int64_t since_us, wire_out_t *reply) {
    const uint64_t oldest = recent->n > RECENT_MOST ? recent->n - RECENT_MOST : 0;
    uint64_t from = recent->n;
    while (from > oldest && recent->requests[(from - 1) % RECENT_MOST].ended_us >= since_us)
        from--;
    wire_put_list(reply, (uint32_t)(recent->n - from));
    for (uint64_t i = from; i < recent->n; i++)
        put_request(reply, &recent->requests[i % RECENT_MOST]);
}
