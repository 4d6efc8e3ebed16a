/* The tables of a checkpoint: the numbers of their fields, in the order of ONNX Runtime's schema
 * (ort_training_checkpoint.fbs and, for tensors, ort.fbs; release 1.19.2). */
#ifndef GRADD_TRAIN_FILES_FIELDS_H
#define GRADD_TRAIN_FILES_FIELDS_H

#define CHECKPOINT_IDENTIFIER "ODTC"
/* Version 2, of 1.18 on, may keep values in a second file. */
#define CHECKPOINT_OLDEST  1
#define CHECKPOINT_VERSION 2

enum { ROOT_VERSION, ROOT_MODULE, ROOT_GROUPS, ROOT_PROPERTIES, ROOT_N };
enum { MODULE_TRAINED, MODULE_FROZEN, MODULE_NOMINAL, MODULE_ELSEWHERE, MODULE_N };
enum {
    TENSOR_NAME,
    TENSOR_NOTE,
    TENSOR_DIMS,
    TENSOR_TYPE,
    TENSOR_VALUES,
    TENSOR_STRINGS,
    TENSOR_ELSEWHERE, /* i64: where in a second file; -1 = in this one */
    TENSOR_N
};
enum { GROUP_NAME, GROUP_STEP, GROUP_RATE, GROUP_STATES, GROUP_N };
enum { STATE_PARAMETER, STATE_MOMENTS, STATE_N };
/* A bag's fields are the lists of the kinds of property, in the order of checkpoint_kind_t. */
enum { PROPERTY_NAME, PROPERTY_VALUE, PROPERTY_N };

#endif
