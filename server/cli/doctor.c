/* See doctor.h. */
#include "server/cli/doctor.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/plugin.h"
#include "server/cli/admin.h"
#include "server/explain/explain_report.h"
#include "server/host/confine.h"
#include "server/host/machine.h"
#include "server/host/rundir.h"
#include "server/wire/print.h"

#define ANSWER_MS 5000

typedef struct report_s {
    FILE *out;
    bool json;
    const char *wanted;
    bool told, found; /* the wanted one: has been reported, can be used */
    int n;
} report_t;

static size_t count_kernels(const gradd_backend_t *backend) {
    size_t n = 0;
    for (size_t f = 0; f < backend->n_kernels; f++)
        n += backend->kernels[f]->n;
    return n;
}

static void put_text(FILE *out, const char *key, const char *text) {
    fprintf(out, ", \"%s\": ", key);
    explain_json_text(out, text);
}

static void begin_json(report_t *r, const char *name, bool usable) {
    fprintf(r->out, "%s{\"usable\": %s", r->n++ ? ", " : "", usable ? "true" : "false");
    put_text(r->out, "name", name);
}

/* A device that can be had, and where it is from. */
static void describe(report_t *r, const gradd_backend_t *backend, const char *from) {
    const char *bf16 = backend->multiplies(GRADD_DT_BF16) ? "native" : "widened";
    const size_t kernels = count_kernels(backend);
    if (!r->json) {
        fprintf(r->out, "device %s: %s; products by %s, bf16 %s; %zu kernels\n", backend->name,
                from, backend->library(), bf16, kernels);
        if (backend->kept) fprintf(r->out, "  %s\n", backend->kept());
        return;
    }
    begin_json(r, backend->name, true);
    put_text(r->out, "from", from);
    put_text(r->out, "products", backend->library());
    put_text(r->out, "bf16", bf16);
    if (backend->kept) put_text(r->out, "kept", backend->kept());
    fprintf(r->out, ", \"kernels\": %zu}", kernels);
}

static void refuse(report_t *r, const char *name) {
    if (!r->json) {
        fprintf(r->out, "device %s: %s\n", name, gradd_error_message());
        return;
    }
    begin_json(r, name, false);
    put_text(r->out, "reason", gradd_error_message());
    fputs("}", r->out);
}

static void note(report_t *r, const char *name, bool usable) {
    if (strcmp(name, r->wanted)) return;
    r->told = true;
    r->found = usable;
}

static void look_for(report_t *r, const char *name) {
    const gradd_backend_t *backend;
    const bool usable = !gradd_plugin_load(name, &backend);
    if (usable)
        describe(r, backend, gradd_plugin_path(name));
    else
        refuse(r, name);
    note(r, name, usable);
}

/* Libraries of clients and of devices are files of this form, too. */
static bool is_library(const char *name) {
    return !strcmp(name, "shm") || !strcmp(name, "train");
}

/* The name in "libgradd_NAME.so"; false for other files. */
static bool name_of(const char *file, char name[64]) {
    static const char prefix[] = "libgradd_", suffix[] = ".so";
    const size_t n = strlen(file), around = sizeof prefix + sizeof suffix - 2;
    if (n <= around || n - around >= 64) return false;
    if (memcmp(file, prefix, sizeof prefix - 1) || strcmp(file + n - (sizeof suffix - 1), suffix))
        return false;
    snprintf(name, 64, "%.*s", (int)(n - around), file + sizeof prefix - 1);
    return !is_library(name);
}

/* Plug-ins that are built elsewhere lie beside ours. */
static void look_for_others(report_t *r) {
    struct dirent **files;
    const int n = scandir(gradd_plugin_folder(), &files, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        char name[64];
        if (name_of(files[i]->d_name, name) && strcmp(name, GRADD_PLUGIN_CUDA)) look_for(r, name);
        free(files[i]);
    }
    if (n >= 0) free(files);
}

/* ---- confinement ---- */

static gradd_status_t ask_ps(const char *path, zmq_msg_t *reply, wire_doc_t *out_doc) {
    wire_out_t request = {0};
    wire_begin(&request);
    wire_key(&request, "v");
    wire_put_text(&request, "ps");
    wire_key(&request, "q");
    wire_put_u64(&request, 1);
    wire_end(&request);
    const gradd_status_t st = admin_ask(path, &request, ANSWER_MS, reply, out_doc);
    wire_out_finish(&request);
    return st;
}

static gradd_status_t tell_daemon(const rundir_t *dir, void *context) {
    report_t *r = context;
    char owner[CONFINE_TEXT_BYTES], worker[CONFINE_TEXT_BYTES];
    zmq_msg_t reply;
    wire_doc_t doc = {0};
    zmq_msg_init(&reply);
    if (ask_ps(dir->cmd, &reply, &doc) == GRADD_OK) {
        const int64_t pid = reply_number(&doc.root, "pid");
        reply_text(&doc.root, "owner_confined", owner, sizeof owner);
        reply_text(&doc.root, "confined", worker, sizeof worker);
        if (r->json)
            fprintf(r->out, "%s{\"pid\": %lld", r->n++ ? ", " : "", (long long)pid);
        else
            fprintf(r->out, "daemon %lld: owner: %s; worker: %s\n", (long long)pid, owner, worker);
        if (r->json) {
            put_text(r->out, "owner", owner);
            put_text(r->out, "worker", worker);
            fputs("}", r->out);
        }
    }
    wire_doc_finish(&doc);
    zmq_msg_close(&reply);
    return GRADD_OK;
}

static void tell_confinement(report_t *r, const char *dir) {
    char text[CONFINE_TEXT_BYTES];
    const confined_t offered = confine_offered();
    confine_text(&offered, text);
    r->n = 0;
    if (r->json) {
        put_text(r->out, "confinement", text);
        fputs(", \"daemons\": [", r->out);
    } else {
        fprintf(r->out, "confinement: %s\n", text);
    }
    rundir_each_running(dir, tell_daemon, r);
    if (r->json) fputs("]", r->out);
}

bool doctor(FILE *out, const char *wanted, const char *dir, bool json) {
    report_t r = {out, json, wanted, !wanted[0], !wanted[0], 0};
    fprintf(out, json ? "{\"processors\": %d, \"devices\": [" : "processors: %d\n",
            machine_processors());
    for (size_t i = 0; i < gradd_backend_count; i++) {
        describe(&r, gradd_backends[i], "of this build");
        note(&r, gradd_backends[i]->name, true);
    }
    look_for(&r, GRADD_PLUGIN_CUDA);
    look_for_others(&r);
    if (!r.told) look_for(&r, wanted);
    if (json) fputs("]", out);
    tell_confinement(&r, dir);
    if (json) fputs("}\n", out);
    return r.found;
}
