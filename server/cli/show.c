/* See show.h. */
#include "server/cli/show.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "server/cli/admin.h"
#include "server/cli/notes.h"
#include "server/cli/owner_command.h"
#include "server/wire/print.h"

#define DRAIN_MS 60000

/* ---- one session, as text ---- */

static void print_memory(const msgpack_object *s) {
    char amount[PRINT_BYTES], name[32];
    const msgpack_object *kinds = wire_in(s, "segment_kinds");
    const char *before = ":";
    printf("  memory      %s shared", print_amount(reply_number(s, "segment_bytes"), amount));
    for (uint32_t i = 0; kinds && kinds->type == MSGPACK_OBJECT_MAP && i < kinds->via.map.size;
         i++) {
        const msgpack_object *key = &kinds->via.map.ptr[i].key;
        if (key->type != MSGPACK_OBJECT_STR) continue;
        snprintf(name, sizeof name, "%.*s", (int)key->via.str.size, key->via.str.ptr);
        const int64_t bytes = reply_number(kinds, name);
        if (!bytes) continue;
        printf("%s %s %s", before, print_amount(bytes, amount), name);
        before = ",";
    }
    printf("\n  activations %s now", print_amount(reply_number(s, "arena_bytes"), amount));
    printf(", %s at most\n", print_amount(reply_number(s, "peak_arena_bytes"), amount));
}

static void print_quota(const msgpack_object *s) {
    char wanted[PRINT_BYTES], since[PRINT_BYTES], most[PRINT_BYTES];
    const int64_t share = reply_number(s, "share"), bytes = reply_number(s, "quota_bytes");
    if (reply_number(s, "wanted_bytes"))
        printf("  waits       for %s of activations, since %s\n",
               print_amount(reply_number(s, "wanted_bytes"), wanted),
               print_duration(reply_number(s, "wanted_ms"), since));
    if (share != 100 || bytes)
        printf("  quota       share %" PRId64 ", %s\n", share,
               bytes ? print_amount(bytes, most) : "no limit of memory");
}

static void print_plans(const msgpack_object *list) {
    char peak[PRINT_BYTES], saved[PRINT_BYTES], constant[PRINT_BYTES];
    if (!list || wire_count(list) == 0) return;
    printf("  %6s %10s %10s %10s %9s %9s %9s %10s\n", "PLAN", "PEAK", "SAVED", "CONSTANTS",
           "PLANNED", "FORWARDS", "BACKWARDS", "RAN");
    for (int i = 0; i < wire_count(list); i++) {
        const msgpack_object *plan = wire_at(list, i);
        printf("  %6" PRId64 " %10s %10s %10s %6.0f ms %9" PRId64 " %9" PRId64 " %7.0f ms%s\n",
               reply_number(plan, "plan"), print_amount(reply_number(plan, "arena_bytes"), peak),
               print_amount(reply_number(plan, "saved_bytes"), saved),
               print_amount(reply_number(plan, "constant_bytes"), constant),
               reply_real(plan, "compile_ms"), reply_number(plan, "forwards"),
               reply_number(plan, "backwards"), reply_real(plan, "ran_ms"),
               reply_number(plan, "self_check") ? "  of a self-check" : "");
    }
}

static void print_errors(const msgpack_object *list) {
    char ago[PRINT_BYTES], verb[32], code[32], what[512];
    for (int i = 0; list && i < wire_count(list); i++) {
        const msgpack_object *error = wire_at(list, i);
        printf("  failed %s ago: %s: %s: %s\n", print_duration(reply_number(error, "ago_ms"), ago),
               reply_text(error, "verb", verb, sizeof verb),
               reply_text(error, "code", code, sizeof code),
               reply_text(error, "what", what, sizeof what));
    }
}

static void print_model(const msgpack_object *s) {
    char model[128];
    if (!reply_text(s, "model", model, sizeof model)[0]) return;
    printf("  model       %s, %" PRId64 " parameters\n", model, reply_number(s, "parameters"));
    const int64_t n = reply_number(s, "fallbacks");
    if (n) printf("  in PyTorch  parts, for %" PRId64 " reason%s\n", n, n == 1 ? "" : "s");
}

static void print_session(const msgpack_object *s) {
    char client[72], state[16], age[PRINT_BYTES], idle[PRINT_BYTES];
    printf("session %" PRId64 ", %s, pid %" PRId64 ", %s\n", reply_number(s, "session"),
           reply_text(s, "client", client, sizeof client), reply_number(s, "pid"),
           reply_text(s, "state", state, sizeof state));
    print_model(s);
    printf("  pace        %.0f %% of the engine, %.1f steps/s; %" PRId64 " steps in %.1f s of it\n",
           100 * reply_real(s, "busy"), reply_real(s, "steps_per_second"), reply_number(s, "steps"),
           (double)reply_number(s, "engine_ms") / 1000);
    printf("  requests    %" PRId64 ", %" PRId64 " wait, the last one %s ago; connected for %s\n",
           reply_number(s, "requests"), reply_number(s, "waiting"),
           print_duration(reply_number(s, "idle_ms"), idle),
           print_duration(reply_number(s, "age_ms"), age));
    print_memory(s);
    print_quota(s);
    print_plans(wire_in(s, "plan_list"));
    print_errors(wire_in(s, "errors"));
}

static void print_kept(const msgpack_object *kept) {
    char name[72], bytes[PRINT_BYTES], left[PRINT_BYTES];
    const msgpack_object *ms = wire_in(kept, "left_ms");
    const bool ends = ms && ms->type == MSGPACK_OBJECT_POSITIVE_INTEGER;
    if (reply_number(kept, "base")) {
        printf("base %s, of pid %" PRId64 ", of %" PRId64 " sessions: %s\n",
               reply_text(kept, "name", name, sizeof name), reply_number(kept, "pid"),
               reply_number(kept, "users"), print_amount(reply_number(kept, "bytes"), bytes));
        return;
    }
    printf("kept session %s, pid %" PRId64 ", %s: %s", reply_text(kept, "name", name, sizeof name),
           reply_number(kept, "pid"), reply_number(kept, "in_use") ? "in use" : "left",
           print_amount(reply_number(kept, "bytes"), bytes));
    if (ends) printf(", for %s more", print_duration(reply_number(kept, "left_ms"), left));
    putchar('\n');
}

/* ---- which ones ---- */

/* NULL: no kept session has that name. */
static const msgpack_object *find_kept(const msgpack_object *list, const char *name) {
    for (int i = 0; list && i < wire_count(list); i++) {
        const msgpack_object *text = wire_in(wire_at(list, i), "name");
        if (text && text->type == MSGPACK_OBJECT_STR && text->via.str.size == strlen(name) &&
            memcmp(text->via.str.ptr, name, text->via.str.size) == 0)
            return wire_at(list, i);
    }
    return NULL;
}

static gradd_status_t ask_show(const rundir_t *dir, const char *name, admin_reply_t *out_reply) {
    wire_out_t request = {0};
    admin_begin(&request, "show");
    wire_key(&request, "name");
    wire_put_text(&request, name);
    GRADD_TRY(admin_send(dir->cmd, &request, out_reply));
    return admin_check(&out_reply->doc.root);
}

static void print_notes_json(const notes_t *notes) {
    if (notes) {
        printf(", \"kept_steps\": %" PRId64 ", \"notes\": ", notes->steps);
        print_json(stdout, &notes->doc.root);
    }
}

static void print_notes(const notes_t *notes) {
    if (!notes) {
        printf("  notes       none that are true now: %s\n", gradd_error_message());
        return;
    }
    printf("  notes       after %" PRId64 " step%s: ", notes->steps, notes->steps == 1 ? "" : "s");
    print_json(stdout, &notes->doc.root);
    putchar('\n');
}

static void print_all(const msgpack_object *root, const msgpack_object *kept, const notes_t *notes,
                      bool json) {
    const msgpack_object *sessions = wire_in(root, "sessions");
    if (json) {
        putchar('{');
        print_pairs(stdout, root);
        fputs(", \"kept\": ", stdout);
        if (kept)
            print_json(stdout, kept);
        else
            fputs("null", stdout);
        print_notes_json(notes);
        puts("}");
        return;
    }
    if (kept) print_kept(kept);
    if (kept && !reply_number(kept, "base")) print_notes(notes);
    for (int i = 0; i < wire_count(sessions); i++)
        print_session(wire_at(sessions, i));
}

gradd_status_t show_daemon(const rundir_t *dir, void *context) {
    static uint8_t buffer[KEPT_REPLY_BYTES];
    show_t *show = context;
    const char *name = show->options->name;
    char pid[24];
    admin_reply_t reply;
    wire_doc_t doc = {0};
    show->n_daemons++;
    const msgpack_object *kept = find_kept(kept_ask(dir, buffer, &doc), name);
    if (kept) snprintf(pid, sizeof pid, "%" PRId64, reply_number(kept, "pid"));
    const gradd_status_t st = ask_show(dir, kept ? pid : name, &reply);
    const msgpack_object *sessions = st == GRADD_OK ? wire_get(&reply.doc, "sessions") : NULL;
    if (st == GRADD_OK && (kept || (sessions && wire_count(sessions) > 0))) {
        show->n_found++;
        notes_t notes = {0};
        const bool noted = kept && notes_read(dir, name, &notes) == GRADD_OK;
        print_all(&reply.doc.root, kept, noted ? &notes : NULL, show->options->json);
        notes_finish(&notes);
    }
    wire_doc_finish(&doc);
    admin_finish(&reply);
    return st;
}

/* ---- drain ---- */

static gradd_status_t ask_drain(const rundir_t *dir, const options_t *options,
                                admin_reply_t *out_reply) {
    wire_out_t request = {0};
    admin_begin(&request, "drain");
    if (options->end) {
        wire_key(&request, "end");
        wire_put_u64(&request, 1);
    } else {
        wire_key(&request, "why");
        wire_put_text(&request, options->why);
    }
    GRADD_TRY(admin_send(dir->cmd, &request, out_reply));
    return admin_check(&out_reply->doc.root);
}

gradd_status_t drain(const rundir_t *dir, const options_t *options) {
    admin_reply_t reply;
    for (int waited = 0;; waited += 20) {
        const gradd_status_t st = ask_drain(dir, options, &reply);
        const int64_t n = st == GRADD_OK ? reply_number(&reply.doc.root, "sessions") : 0;
        const bool runs = st == GRADD_OK && reply_number(&reply.doc.root, "running");
        admin_finish(&reply);
        GRADD_TRY(st);
        if (runs && !options->end && waited < DRAIN_MS) {
            usleep(20000);
            continue;
        }
        if (options->json)
            printf("{\"drained\": %s, \"sessions\": %" PRId64 ", \"running\": %s}\n",
                   options->end ? "false" : "true", n, runs ? "true" : "false");
        else if (options->end)
            puts("requests are begun again");
        else
            printf("drained: %" PRId64 " session%s stay%s%s\n", n, n == 1 ? "" : "s",
                   n == 1 ? "s" : "", runs ? "; a request is still in progress" : "");
        return GRADD_OK;
    }
}
