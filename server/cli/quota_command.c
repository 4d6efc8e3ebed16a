/* See quota_command.h. */
#include "server/cli/quota_command.h"

#include <inttypes.h>

#include "server/cli/admin.h"
#include "server/wire/print.h"

#define NAME_WIDTH 28

static void put_number(wire_out_t *request, const char *key, int64_t value) {
    wire_key(request, key);
    wire_put_u64(request, (uint64_t)value);
}

/* -1: the command line does not say. */
static void put_request(wire_out_t *request, const options_t *options) {
    admin_begin(request, "quota");
    if (options->name) {
        wire_key(request, "name");
        wire_put_text(request, options->name);
    }
    if (options->share >= 0) put_number(request, "share", options->share);
    if (options->quota_mib >= 0) put_number(request, "bytes", options->quota_mib << 20);
    if (options->sessions >= 0) put_number(request, "sessions", options->sessions);
    if (options->remove) put_number(request, "remove", 1);
}

static const char *limit_text(int64_t value, char text[PRINT_BYTES], bool is_amount) {
    if (!value) return "-";
    if (is_amount) return print_amount(value, text);
    snprintf(text, PRINT_BYTES, "%" PRId64, value);
    return text;
}

static void print_rules(const msgpack_object *rules) {
    char name[72], bytes[PRINT_BYTES], sessions[PRINT_BYTES];
    if (!rules || wire_count(rules) == 0) {
        puts("no quotas: sessions have equal shares");
        return;
    }
    printf("%-*s %6s %10s %9s %9s\n", NAME_WIDTH, "NAME", "SHARE", "MEMORY", "SESSIONS",
           "CONNECTED");
    for (int i = 0; i < wire_count(rules); i++) {
        const msgpack_object *rule = wire_at(rules, i);
        printf("%-*s %6" PRId64 " %10s %9s %9" PRId64 "\n", NAME_WIDTH,
               reply_text(rule, "name", name, sizeof name), reply_number(rule, "share"),
               limit_text(reply_number(rule, "bytes"), bytes, true),
               limit_text(reply_number(rule, "sessions"), sessions, false),
               reply_number(rule, "connected"));
    }
}

gradd_status_t quota_command(const rundir_t *dir, const options_t *options) {
    wire_out_t request = {0};
    admin_reply_t reply;
    put_request(&request, options);
    gradd_status_t st = admin_send(dir->cmd, &request, &reply);
    if (st == GRADD_OK) st = admin_check(&reply.doc.root);
    if (st == GRADD_OK && options->json) {
        putchar('{');
        print_pairs(stdout, &reply.doc.root);
        puts("}");
    } else if (st == GRADD_OK) {
        print_rules(wire_in(&reply.doc.root, "quotas"));
    }
    admin_finish(&reply);
    return st;
}
