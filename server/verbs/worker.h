/* The state of the engine thread, for all clients and for each session.
 *
 * The worker owns the models and the compiled plans, shared by every session that uses the same
 * graph (reference counts; a second client finds both ready). A session's own objects hang on
 * session->objects: the graphs it has named, plans by id, bindings, runs. Only the engine thread
 * touches any of this, so there are no locks; what another thread loads or makes for it comes as a
 * whole (maker.h).
 */
#ifndef GRADD_SERVER_VERBS_WORKER_H
#define GRADD_SERVER_VERBS_WORKER_H

#include "server/api/gradd.h"
#include "server/verbs/commands.h"
#include "server/verbs/lost.h"
#include "server/verbs/spans.h"
#include "shm/sha256.h"

/* Exit status of a daemon whose device is lost: EX_UNAVAILABLE of sysexits.h. */
#define DEVICE_LOST_STATUS 69

#define SESSION_MAX_GRAPHS   64  /* beyond it the graph that was used least recently is dropped */
#define SESSION_MAX_PLANS    256 /* beyond it the plan that was used least recently is dropped */
#define SESSION_MAX_BINDINGS 1024
#define SESSION_MAX_RUNS     1024
#define SESSION_MAX_TENSORS  65536 /* in one list */
#define SESSION_MAX_COMMUNICATORS 16
/* In all bindings and unreleased runs of a session: each costs some hundred bytes here. A model of
 * a thousand parameters has a few thousand bound. */
#define SESSION_MAX_HELD (1 << 20)

typedef struct session_objects_s session_objects_t;

/* ---- shared by all sessions (cache.c) ---- */

typedef struct model_entry_s {
    struct model_entry_s *next;
    uint8_t id[GRADD_SHA256_BYTES];
    gradd_model_t *model; /* Owned */
    int refs;             /* sessions that named it and compiled plans */
    uint64_t used;
} model_entry_t;

typedef struct compiled_s {
    struct compiled_s *next;
    uint8_t key[GRADD_SHA256_BYTES]; /* of graph id and all options */
    gradd_plan_t *plan;              /* Owned */
    model_entry_t *model;            /* Shared: retained */
    int refs;                        /* plans of sessions */
    uint64_t used;
} compiled_t;

typedef struct worker_s {
    pid_t owner;                /* that clients and the command line know as the daemon */
    gradd_device_t *device;     /* Owned; what never changes of it, its info, is for any thread */
    char missed[300];           /* why it is not the one that was asked for; "" = it is */
    bool plain;                 /* no pattern is recognised, for any client */
    bool dense_loss;            /* logits of a loss are made as a whole, for any client */
    int64_t unread_bytes;       /* admitted since the machine's memory was looked at */
    int64_t wait_ms;            /* for memory, of requests that do not say */
    uint64_t room;              /* a word that rises when runs give memory back; see worker_waits */
    atomic_int n_waiting;       /* sessions that wait for that */
    const char *root;           /* of the machine's files: "", but for tests */
    struct plan_maker_s *maker; /* Owned: maker.h; NULL = the engine thread makes plans */
    model_entry_t *models;
    compiled_t *compiled;
    lost_plans_t lost;
    struct session_objects_s *objects; /* of all sessions that have asked for something */
    uint64_t clock;                    /* rises with every use: the order of the LRU lists */
    uint64_t serial;                   /* names plans for the memory of bindings */
    atomic_llong n_forward, n_backward, n_compiled, n_plan_hits, n_failed;
} worker_t;

/* Finds a model by its id, retained, or NULL. */
model_entry_t *cache_find_model(worker_t *worker, const uint8_t id[GRADD_SHA256_BYTES]);
/* Adds one that is loaded, retained; it is destroyed if that fails. Fails with NOMEM. */
gradd_status_t cache_add_model(worker_t *worker, const uint8_t id[GRADD_SHA256_BYTES],
                               gradd_model_t *model, model_entry_t **out_model);
/* Loads and retains. */
gradd_status_t cache_load_model(worker_t *worker, const uint8_t id[GRADD_SHA256_BYTES],
                                const void *onnx, size_t bytes, model_entry_t **out_model);
void cache_release_model(worker_t *worker, model_entry_t *model);
/* What a plan is known by: the same in the next daemon of the device (lost.h). */
void cache_plan_key(const model_entry_t *model, const gradd_plan_options_t *options,
                    uint8_t out_key[GRADD_SHA256_BYTES]);
/* The plan of that key and device, retained, or NULL. Fails with UNSUPPORTED if it is refused. */
gradd_status_t cache_find_compiled(worker_t *worker, const uint8_t key[GRADD_SHA256_BYTES],
                                   const gradd_device_t *device, compiled_t **out_compiled);
/* Adds a plan of that model, retained; it is destroyed if that fails. Fails with NOMEM. */
gradd_status_t cache_add_compiled(worker_t *worker, const uint8_t key[GRADD_SHA256_BYTES],
                                  model_entry_t *model, gradd_plan_t *plan,
                                  compiled_t **out_compiled);
/* Finds or compiles, retained; *out_hit tells which. */
gradd_status_t cache_compile(worker_t *worker, model_entry_t *model,
                             const gradd_plan_options_t *options, compiled_t **out_compiled,
                             bool *out_hit);
void cache_release_compiled(worker_t *worker, compiled_t *compiled);
/* Destroys everything; all references are gone. */
void cache_finish(worker_t *worker);

/* ---- device and memory (admission.c) ---- */

/* Opens the device, which asks worker_admit; a memory limit of 0 means 90 % of the memory that the
 * device has, or the machine. */
gradd_status_t worker_open_device(worker_t *worker, const gradd_device_options_t *options);
/* Gives back what finished runs have left for the next ones. */
void worker_trim(worker_t *worker);
/* The device of that name, n bytes; NULL = the default. Fails with UNSUPPORTED. */
gradd_status_t worker_find_device(worker_t *worker, const char *name, size_t n,
                                  gradd_device_t **out_device);
/* Whether there is room for what a run takes, on the device or the machine; context is the worker.
 * Fails with NOMEM and the figures. */
gradd_status_t worker_admit(void *context, int64_t bytes);
/* Whether the machine has room for a model that is loaded next, and once more what a new plan has
 * taken for its constants. Fails with NOMEM and the figures. */
gradd_status_t worker_admit_model(worker_t *worker, int64_t bytes);
gradd_status_t worker_admit_plan(worker_t *worker, int64_t bytes);
/* What runs may take now, on the device or the machine and below the limit; spare arenas make room
 * if it is less than `bytes`. */
int64_t worker_room(worker_t *worker, int64_t bytes);

/* ---- waiting for memory (waiting.c) ---- */

/* A request has failed with NOMEM. True: its run finds room when other sessions give theirs back,
 * so the request goes on with `again`, from its beginning, when that may be. False: it fails, and
 * the message says why it does not wait: all others' memory would not do, it has waited as long as
 * it would, or some wait for each other, and this is the youngest. */
bool worker_waits(worker_t *worker, request_t *request,
                  gradd_status_t (*again)(worker_t *worker, request_t *request));
/* A request is about to take memory for a run. True: it goes on with `again` later, because one of
 * another session has waited for longer, and would not get its memory if this one took some. */
bool worker_yields(worker_t *worker, request_t *request, int64_t bytes,
                   gradd_status_t (*again)(worker_t *worker, request_t *request));
/* Runs have given memory back, or some time has passed: those that wait look again. Any thread. */
void worker_tell_room(worker_t *worker);
/* It waits no more. */
void worker_end_wait(worker_t *worker, session_objects_t *objects);

/* ---- of one session (objects.c) ---- */

/* A list of pointers by id; ids are few, so a linear search is the fastest. */
typedef struct id_list_s {
    struct id_item_s {
        uint64_t id;
        void *object;
    } *items; /* Owned */
    int n, capacity;
} id_list_t;

void *id_list_get(const id_list_t *list, uint64_t id);
gradd_status_t id_list_put(id_list_t *list, uint64_t id, void *object); /* the id is not there */
void *id_list_take(id_list_t *list, uint64_t id);                       /* NULL if not there */

/* Some of the gradients of a plan, in their order. */
typedef struct split_s {
    int n;
    int32_t *at;     /* Owned: positions in the plan's `grads` */
    int32_t *inputs; /* Owned: the model inputs there */
} split_t;

typedef struct session_plan_s {
    uint64_t id, serial, used;
    uint64_t ran;         /* the clock at its last forward, 0 = never */
    compiled_t *compiled; /* Shared: retained */
    int n_in, n_bound, n_rest, n_out, n_grads, n_gmask;
    gradd_type_t *in;       /* Owned: one per model input */
    int32_t *bound, *rest;  /* Owned: model inputs from the binding and from the message */
    int32_t *grads;         /* Owned: model inputs */
    int32_t *out;           /* Owned: model outputs */
    int32_t *gmask;         /* Owned: positions in `out` whose gradient may arrive */
    int64_t constant_bytes; /* of the compiled plan, as they count for the session */
    split_t early, late;    /* of `grads`: what a forward forms, and the rest */
    int n_runs;             /* runs of this plan; it cannot be dropped before them */
} session_plan_t;

/* Validated tensors with their addresses. Their segments stay mapped as long as it lives. */
typedef struct tensors_s {
    gradd_handle_table_t *table; /* Borrowed */
    int n;
    gradd_type_t *types; /* Owned */
    void **address;      /* Owned; NULL where the message left one out */
    uint64_t *segments;  /* Owned: the ids that are retained */
    int n_segments;
    span_t *spans; /* Owned, sorted; tag = position in the list */
    int n_spans;
} tensors_t;

typedef struct binding_s {
    uint64_t id;
    struct session_objects_s *objects; /* Borrowed: whose it is */
    int refs;                          /* 1 for the session, 1 for each run */
    tensors_t tensors;
    uint64_t input_serial, grad_serial; /* the plan that it was last compared with */
} binding_t;

typedef struct session_run_s {
    uint64_t id;
    session_plan_t *plan; /* Borrowed: the plan counts its runs */
    binding_t *binding;   /* Shared: retained; may be NULL */
    binding_t *early;     /* the same: memory of the early gradients */
    gradd_run_t *handle;  /* Owned */
    const void **inputs;  /* Owned: all model inputs */
    tensors_t in, out;
    int64_t arena_bytes;
    uint64_t generation; /* of the bound inputs; 0 = the forward has not looked */
} session_run_t;

/* A communicator that this session has joined (cmd_reduce.c). */
typedef struct communicator_s {
    uint64_t id;
    struct gradd_comm_s *comm; /* Owned; NULL = it has failed: */
    char why[400];
} communicator_t;

struct backward_s; /* see cmd_backward.c */
struct update_s;   /* see cmd_step.c */

/* A run that waits for memory. */
typedef struct run_wait_s {
    int64_t bytes;              /* 0 = none does */
    int64_t since_us, until_us; /* the latter: INT64_MAX = for ever */
    bool ends;                  /* it is the youngest of some that wait for each other */
} run_wait_t;

struct session_objects_s {
    struct session_objects_s *next; /* in worker->objects */
    session_t *session;             /* Borrowed */
    worker_t *worker;               /* Borrowed */
    struct session_graph_s {
        model_entry_t *model;
        uint64_t used;
        wire_doc_t source; /* node -> source line, for error texts */
        zmq_msg_t source_frame;
    } graphs[SESSION_MAX_GRAPHS];
    int n_graphs;
    const model_entry_t *subject; /* Borrowed: the model that the present request is about */
    const compiled_t *running;    /* Borrowed: of a plan whose forward or backward it is; or NULL */
    bool running_backward;
    uint64_t running_plan; /* its id in the session; 0: none */
    id_list_t plans, bindings, runs, communicators;
    /* Of the request that is not finished, because it was put aside or waits; or NULL: */
    struct backward_s *backward; /* Owned */
    struct update_s *update;     /* Owned */
    struct making_s *making;     /* Shared: the plan that it waits for */
    int n_held;                  /* tensors of the bindings and runs that exist */
    run_wait_t wait;
    int64_t heard_us; /* when a request of it has ended last */
};

/* The present request runs this plan: texts name the model's nodes, and a crash is the plan's. */
void objects_run_plan(session_objects_t *objects, const session_plan_t *plan, bool backward);
/* Ends one run (of this id); unknown ids are ignored. */
void objects_release_run(session_objects_t *objects, uint64_t id);
void objects_drop_plan(worker_t *worker, session_objects_t *objects,
                       session_plan_t *plan); /* it has no runs */
void objects_release_binding(binding_t *binding);
/* The graph that this session has put under that id, GRADD_SHA256_BYTES, or NULL. */
struct session_graph_s *objects_find_graph(session_objects_t *objects, const void *id);
void objects_finish_graph(worker_t *worker, struct session_graph_s *graph);
/* Gives everything back; session->objects is NULL afterwards. */
void objects_end(worker_t *worker, session_t *session);

/* ---- averages over processes (cmd_reduce.c, cmd_backward.c) ---- */

/* The communicator of that id, for a request of that verb. Fails with STALE, PEER. */
gradd_status_t communicator_find(session_objects_t *objects, uint64_t id, const char *verb,
                                 communicator_t **out);
/* A round of it cannot be ended, because of the last failure: it is of no use any more. */
void communicator_fail(worker_t *worker, communicator_t *communicator);
/* Of all of a session: nothing is written for it any more. */
void communicators_end(worker_t *worker, session_objects_t *objects);
/* Forgets the tensors of a backward that is not finished; a communicator has let go of them. */
void backward_end(session_objects_t *objects);

/* ---- a step that was put aside (cmd_step.c) ---- */

/* A step that has begun is finished though its client is gone: parameters that are kept for another
 * process would be torn. False: it was put aside once more. */
bool update_finish(session_objects_t *objects);

/* ---- lists of tensors (tensors.c) ---- */

/* Validates the tensors of a message: types, segments, bounds, alignment; retains segments. Errors
 * begin with `what` and the entry. object may be NULL: no tensors. */
gradd_status_t tensors_init(tensors_t *tensors, gradd_handle_table_t *table,
                            const msgpack_object *object, const char *what);
/* The same for a list of n of which the message may leave some out: its field 'at' says which
 * position an entry has. */
gradd_status_t tensors_init_placed(tensors_t *tensors, gradd_handle_table_t *table,
                                   const msgpack_object *object, int n, const char *what);
/* The same for a field that is one tensor. */
gradd_status_t tensors_init_one(tensors_t *tensors, gradd_handle_table_t *table,
                                const msgpack_object *object, const char *what);
void tensors_finish(tensors_t *tensors); /* accepts NULL and zeroed ones */

/* ---- requests ---- */

/* Runs one request and completes its reply; one without a command ends its session, one
 * without a session asks about all of them. False: it has to be handled again, once its word is
 * there. */
bool worker_handle(worker_t *worker, request_t *request);

#endif
