/* Inside of a training state, for the modules of train/. The functions are gradd_train.h's. */
#ifndef GRADD_TRAIN_STATE_H
#define GRADD_TRAIN_STATE_H

#include "train/gradd_train.h"

#define STATE_PIECES (1 + GRADD_TRAIN_MOMENTS) /* of a parameter: values, moments */

/* Where a state's file has the pieces of a parameter (lasting.h). */
typedef struct train_places_s {
    uint64_t at[STATE_PIECES];   /* in the latest commit; 0 = it has none */
    uint64_t next[STATE_PIECES]; /* in the commit that is being made */
    bool written;                /* by that one */
    bool is_mapped;              /* the values are the file's, in memory */
    bool is_own;                 /* and all their pages have been written to */
} train_places_t;

typedef struct train_parameter_s {
    char *name; /* Owned */
    gradd_type_t type;
    int64_t bytes;
    void *data;     /* Owned, as all memory below is; NULL = it has no values yet */
    void *gradient; /* room for one; NULL = there is none */
    float *moments[GRADD_TRAIN_MOMENTS];
    int64_t steps;
    bool trainable;
    bool has_gradient; /* since the last reset */
    bool changed;      /* since the latest commit */
    train_places_t places;
} train_parameter_t;

/* What a session of the state goes on with, beside its progress. */
typedef struct train_course_s {
    uint64_t seed;  /* of random numbers */
    uint64_t draws; /* training steps since the seed was set */
    bool has_seed;  /* there was a step, or the seed was set: options of a session have no say */
    bool has_schedule;
    int64_t warmup, total; /* of the schedule, steps */
} train_course_t;

struct train_state_s {
    train_parameter_t *parameters; /* Owned */
    int n_parameters, parameter_room;
    gradd_train_property_t *properties; /* Owned, names and texts as well */
    int n_properties, property_room;
    gradd_train_progress_t progress;
    train_course_t course;
    bool has_session;
    bool waits;                /* there are gradients that the optimizer has not used */
    struct lasting_s *lasting; /* Owned; NULL = the state is in memory alone */
};

/* Room for a gradient, of any content; there may be some already. */
gradd_status_t state_make_gradient(train_parameter_t *p);
/* Moment k, zeros if it is new. */
gradd_status_t state_make_moment(train_parameter_t *p, int k);
/* Memory for values, of any content, if there is none. */
gradd_status_t state_make_data(train_parameter_t *p);
/* Its values, or moment k - 1; NULL = there are none. */
void *state_piece(const train_parameter_t *p, int k);
int64_t state_piece_bytes(const train_parameter_t *p, int k);
/* Bytes of a moment. */
int64_t state_moment_bytes(const train_parameter_t *p);
void state_drop_gradient(train_parameter_t *p);
void state_drop_moments(train_parameter_t *p); /* and the count of steps */

/* Sets the learning rate by the schedule, which there is. */
void state_schedule_rate(gradd_train_state_t *state);

/* Whether a parameter can have this type, whose shape is known; its name is for the message. */
gradd_status_t state_check_type(const gradd_type_t *type, const char *name);

/* Memory for so many bytes; `what` is for the message. */
gradd_status_t state_take(int64_t bytes, const char *what, void **out);
void state_give_back(void *memory, int64_t bytes);

#endif
