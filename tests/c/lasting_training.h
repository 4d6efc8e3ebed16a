/* A small training with all that a state keeps: frozen and trained parameters, moments, running
 * statistics, random numbers, a schedule, a property, a position in the data. For tests of states
 * in files.
 */
#ifndef GRADD_TESTS_C_LASTING_TRAINING_H
#define GRADD_TESTS_C_LASTING_TRAINING_H

#include "train/gradd_train.h"

/* A state at the beginning: body.* is frozen, head.* and norm.* are trained. */
gradd_train_state_t *lasting_training_state(void);
gradd_train_session_t *lasting_training_open(gradd_train_state_t *state);
/* One step on the batch at the state's position, which moves on. Thaws body.* before step THAWS. */
enum { LASTING_THAWS = 3 };
gradd_status_t lasting_training_step(gradd_train_session_t *session);
/* Until the optimizer has taken so many steps, in a session of its own; then commits, if the state
 * has a file. */
gradd_status_t lasting_training_run(gradd_train_state_t *state, int64_t steps);
/* All that the state keeps, as bytes that are equal if it is; to be freed. */
char *lasting_training_image(const gradd_train_state_t *state, size_t *out_n);
/* Whether the state is what a training in memory has after so many steps. */
void lasting_training_check(const gradd_train_state_t *state, int64_t steps);

#endif
