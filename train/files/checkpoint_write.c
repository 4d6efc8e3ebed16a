/* Writing a checkpoint: all tables first, in memory, then the values, straight from the caller's.
 *
 * A FlatBuffer's distances lead forward, so parents come before what they name. Each table that is
 * written has all its fields at fixed places, so that one list of fields serves all tables of a
 * kind; the lists stand in front of the first table. Values begin at multiples of 64 bytes, as the
 * engine wants them, so that a mapped file can be computed with as it is.
 */
#include <stdlib.h>
#include <string.h>

#include "train/files/checkpoint.h"
#include "train/files/fields.h"

enum { MAX_FILE = INT32_MAX, MAX_FIELDS = 7 };

/* ---- bytes ----------------------------------------------------------------------------------- */

/* Values that are written behind the tables, and the place that names them. */
typedef struct written_value_s {
    size_t named_at;
    const void *values; /* Borrowed */
    size_t bytes;
} written_value_t;

typedef struct written_s {
    uint8_t *bytes; /* Owned */
    size_t n, room;
    written_value_t *values; /* Owned */
    size_t n_values, values_room;
    bool failed; /* there is no memory: what follows is left out */
} written_t;

static void *grow(written_t *out, void *list, size_t n, size_t *room, size_t element_bytes) {
    if (n <= *room) return list;
    const size_t larger = n + n / 2 + 64;
    void *grown = realloc(list, larger * element_bytes);
    if (!grown)
        out->failed = true;
    else
        *room = larger;
    return grown ? grown : list;
}

/* Place of n zero bytes at the end; 0 if there is no memory. */
static size_t append(written_t *out, size_t n) {
    const size_t at = out->n;
    if (!out->failed) out->bytes = grow(out, out->bytes, at + n, &out->room, 1);
    if (out->failed) return 0;
    memset(out->bytes + at, 0, n);
    out->n = at + n;
    return at;
}

static void align(written_t *out, size_t alignment, size_t plus) {
    append(out, (alignment - (out->n + plus) % alignment) % alignment);
}

static void put(written_t *out, size_t at, const void *value, size_t n) {
    if (!out->failed) memcpy(out->bytes + at, value, n);
}

static void put_word(written_t *out, size_t at, size_t value) {
    const uint32_t word = (uint32_t)value;
    put(out, at, &word, sizeof word);
}

/* What comes next is what the offset at `at` names. */
static void name_next(written_t *out, size_t at) {
    put_word(out, at, out->n - at);
}

/* ---- tables ---------------------------------------------------------------------------------- */

/* Where the fields of each kind of table lie: bytes from its beginning, 0 = absent. The first word
 * is the distance to this list. */
typedef struct table_layout_s {
    uint16_t bytes;
    uint16_t n_fields;
    uint16_t fields[MAX_FIELDS];
} table_layout_t;

enum { ROOT, MODULE, TENSOR, GROUP, STATE, BAG, INTEGER, SHORT_PROPERTY, N_LAYOUTS };

static const table_layout_t layouts[N_LAYOUTS] = {
    [ROOT] = {20, ROOT_N,                {4, 8, 12, 16}   },
    [MODULE] = {16, MODULE_N,              {4, 8, 12, 0}    },
    [TENSOR] = {20, TENSOR_VALUES + 1,     {4, 0, 8, 12, 16}},
    [GROUP] = {24, GROUP_N,               {4, 8, 16, 20}   },
    [STATE] = {12, STATE_N,               {4, 8}           },
    [BAG] = {16, CHECKPOINT_STRING + 1, {4, 8, 12}       },
    [INTEGER] = {16, PROPERTY_N,            {4, 8}           },
    [SHORT_PROPERTY] = {12, PROPERTY_N,            {4, 8}           }, /* a float, or a string's offset */
};

typedef struct writer_s {
    written_t out;
    size_t layout_at[N_LAYOUTS];
} writer_t;

static void write_layouts(writer_t *writer) {
    for (int kind = 0; kind < N_LAYOUTS; kind++) {
        const table_layout_t *layout = &layouts[kind];
        const uint16_t bytes = (uint16_t)((2 + layout->n_fields) * sizeof(uint16_t));
        const size_t at = append(&writer->out, bytes);
        writer->layout_at[kind] = at;
        put(&writer->out, at, &bytes, sizeof bytes);
        put(&writer->out, at + 2, &layout->bytes, sizeof layout->bytes);
        put(&writer->out, at + 4, layout->fields, layout->n_fields * sizeof(uint16_t));
    }
}

/* A table that the offset at `named_at` names; every kind of table begins at a multiple of 8. */
static size_t write_table(writer_t *writer, int kind, size_t named_at) {
    align(&writer->out, 8, 0);
    name_next(&writer->out, named_at);
    const size_t at = append(&writer->out, layouts[kind].bytes);
    put_word(&writer->out, at, at - writer->layout_at[kind]);
    return at;
}

static size_t place(size_t table, int kind, int field) {
    return table + layouts[kind].fields[field];
}

/* A vector that the offset at `named_at` names; the place of its first element. */
static size_t write_vector(written_t *out, size_t named_at, size_t n, size_t element_bytes) {
    align(out, element_bytes < 4 ? 4 : element_bytes, 4);
    name_next(out, named_at);
    const size_t at = append(out, 4 + n * element_bytes);
    put_word(out, at, n);
    return at + 4;
}

static void write_string(written_t *out, size_t named_at, const char *text) {
    const size_t n = strlen(text), at = write_vector(out, named_at, n, 1);
    append(out, 1); /* the zero behind it */
    put(out, at, text, n);
}

/* ---- what a checkpoint has ------------------------------------------------------------------- */

static void write_values(written_t *out, size_t named_at, const checkpoint_tensor_t *tensor) {
    if (!tensor->values) {
        write_vector(out, named_at, 0, 1);
        return;
    }
    out->values = grow(out, out->values, out->n_values + 1, &out->values_room, sizeof *out->values);
    if (!out->failed)
        out->values[out->n_values++] =
            (written_value_t){named_at, tensor->values, (size_t)gradd_type_bytes(&tensor->type)};
}

static void write_tensor(writer_t *writer, size_t named_at, const checkpoint_tensor_t *tensor) {
    written_t *out = &writer->out;
    const size_t at = write_table(writer, TENSOR, named_at);
    const int32_t type = (int32_t)tensor->type.dtype;
    const size_t rank = tensor->values ? (size_t)tensor->type.rank : 0;
    put(out, place(at, TENSOR, TENSOR_TYPE), &type, sizeof type);
    write_string(out, place(at, TENSOR, TENSOR_NAME), tensor->name);
    const size_t dims = write_vector(out, place(at, TENSOR, TENSOR_DIMS), rank, sizeof(int64_t));
    put(out, dims, tensor->type.dims, rank * sizeof(int64_t));
    write_values(out, place(at, TENSOR, TENSOR_VALUES), tensor);
}

static size_t count_parameters(const checkpoint_t *checkpoint, bool requires_grad) {
    size_t n = 0;
    for (int i = 0; i < checkpoint->n_parameters; i++)
        n += checkpoint->parameters[i].requires_grad == requires_grad;
    return n;
}

static void write_parameters(writer_t *writer, size_t named_at, const checkpoint_t *checkpoint,
                             bool requires_grad) {
    size_t at =
        write_vector(&writer->out, named_at, count_parameters(checkpoint, requires_grad), 4);
    for (int i = 0; i < checkpoint->n_parameters; i++) {
        const checkpoint_parameter_t *parameter = &checkpoint->parameters[i];
        if (parameter->requires_grad != requires_grad) continue;
        checkpoint_tensor_t tensor = parameter->tensor;
        if (checkpoint->is_nominal) tensor.values = NULL;
        write_tensor(writer, at, &tensor);
        at += 4;
    }
}

static void write_module(writer_t *writer, size_t named_at, const checkpoint_t *checkpoint) {
    const size_t at = write_table(writer, MODULE, named_at);
    const uint8_t nominal = checkpoint->is_nominal;
    put(&writer->out, place(at, MODULE, MODULE_NOMINAL), &nominal, sizeof nominal);
    write_parameters(writer, place(at, MODULE, MODULE_TRAINED), checkpoint, true);
    write_parameters(writer, place(at, MODULE, MODULE_FROZEN), checkpoint, false);
}

static void write_state(writer_t *writer, size_t named_at, const checkpoint_moments_t *state) {
    const size_t at = write_table(writer, STATE, named_at);
    write_string(&writer->out, place(at, STATE, STATE_PARAMETER), state->parameter);
    const size_t moments =
        write_vector(&writer->out, place(at, STATE, STATE_MOMENTS), (size_t)state->n_moments, 4);
    for (int i = 0; i < state->n_moments; i++)
        write_tensor(writer, moments + (size_t)i * 4, &state->moments[i]);
}

static void write_group(writer_t *writer, size_t named_at, const checkpoint_group_t *group) {
    written_t *out = &writer->out;
    const size_t at = write_table(writer, GROUP, named_at);
    put(out, place(at, GROUP, GROUP_STEP), &group->step, sizeof group->step);
    put(out, place(at, GROUP, GROUP_RATE), &group->initial_learning_rate, sizeof(float));
    write_string(out, place(at, GROUP, GROUP_NAME), group->name);
    const size_t states =
        write_vector(out, place(at, GROUP, GROUP_STATES), (size_t)group->n_states, 4);
    for (int i = 0; i < group->n_states; i++)
        write_state(writer, states + (size_t)i * 4, &group->states[i]);
}

static void write_property(writer_t *writer, size_t named_at,
                           const checkpoint_property_t *property) {
    written_t *out = &writer->out;
    const int kind = property->kind == CHECKPOINT_INT ? INTEGER : SHORT_PROPERTY;
    const size_t at = write_table(writer, kind, named_at);
    const size_t value = place(at, kind, PROPERTY_VALUE);
    write_string(out, place(at, kind, PROPERTY_NAME), property->name);
    if (property->kind == CHECKPOINT_INT)
        put(out, value, &property->integer, sizeof property->integer);
    else if (property->kind == CHECKPOINT_FLOAT)
        put(out, value, &property->real, sizeof property->real);
    else
        write_string(out, value, property->text);
}

static void write_properties(writer_t *writer, size_t named_at, const checkpoint_t *checkpoint) {
    const size_t bag = write_table(writer, BAG, named_at);
    for (int kind = CHECKPOINT_INT; kind <= CHECKPOINT_STRING; kind++) {
        size_t n = 0;
        for (int i = 0; i < checkpoint->n_properties; i++)
            n += (int)checkpoint->properties[i].kind == kind;
        size_t at = write_vector(&writer->out, place(bag, BAG, kind), n, 4);
        for (int i = 0; i < checkpoint->n_properties; i++) {
            if ((int)checkpoint->properties[i].kind != kind) continue;
            write_property(writer, at, &checkpoint->properties[i]);
            at += 4;
        }
    }
}

static void write_tables(writer_t *writer, const checkpoint_t *checkpoint) {
    written_t *out = &writer->out;
    const int32_t version = CHECKPOINT_VERSION;
    append(out, 8); /* the root's offset and the identifier */
    put(out, 4, CHECKPOINT_IDENTIFIER, 4);
    write_layouts(writer);
    const size_t root = write_table(writer, ROOT, 0);
    put(out, place(root, ROOT, ROOT_VERSION), &version, sizeof version);
    write_module(writer, place(root, ROOT, ROOT_MODULE), checkpoint);
    const size_t groups =
        write_vector(out, place(root, ROOT, ROOT_GROUPS), (size_t)checkpoint->n_groups, 4);
    for (int i = 0; i < checkpoint->n_groups; i++)
        write_group(writer, groups + (size_t)i * 4, &checkpoint->groups[i]);
    write_properties(writer, place(root, ROOT, ROOT_PROPERTIES), checkpoint);
    align(out, 4, 0);
}

/* ---- the file -------------------------------------------------------------------------------- */

/* In front of values: zeros as far as needed, then their count. */
typedef struct between_s {
    uint8_t zeros[GRADD_TENSOR_ALIGN - 4];
    uint32_t n;
} between_t;

/* Bytes between `at` and the count of values that begin at a multiple of 64. */
static size_t gap(size_t at) {
    return (GRADD_TENSOR_ALIGN - (at + 4) % GRADD_TENSOR_ALIGN) % GRADD_TENSOR_ALIGN;
}

/* Says where the values will be; the size of the whole file, or more than MAX_FILE. */
static size_t place_values(written_t *out) {
    size_t at = out->n;
    for (size_t i = 0; i < out->n_values && at <= MAX_FILE; i++) {
        const size_t named_at = out->values[i].named_at, bytes = out->values[i].bytes;
        if (bytes > MAX_FILE) return bytes;
        at += gap(at);
        put_word(out, named_at, at - named_at);
        at += 4 + bytes;
    }
    return at;
}

static gradd_status_t make_parts(const written_t *out, checkpoint_file_t *file) {
    gradd_file_part_t *parts = calloc(1 + 2 * out->n_values, sizeof *parts);
    between_t *between = calloc(out->n_values + 1, sizeof *between);
    size_t at = out->n;
    file->parts = parts;
    file->between = between;
    if (!parts || !between) return GRADD_FAIL(NOMEM, "no memory for the parts of a checkpoint");
    parts[file->n_parts++] = (gradd_file_part_t){out->bytes, out->n};
    for (size_t i = 0; i < out->n_values; i++, between++) {
        const size_t zeros = gap(at), bytes = out->values[i].bytes;
        between->n = (uint32_t)bytes;
        parts[file->n_parts++] =
            (gradd_file_part_t){between->zeros + sizeof between->zeros - zeros, zeros + 4};
        parts[file->n_parts++] = (gradd_file_part_t){out->values[i].values, bytes};
        at += zeros + 4 + bytes;
    }
    return GRADD_OK;
}

gradd_status_t checkpoint_write(const checkpoint_t *checkpoint, checkpoint_file_t *out_file) {
    writer_t writer = {0};
    checkpoint_file_t file = {0};
    gradd_status_t status;
    write_tables(&writer, checkpoint);
    file.tables = writer.out.bytes;
    if (writer.out.failed)
        status = GRADD_FAIL(NOMEM, "no memory for the tables of a checkpoint");
    else if (writer.out.n > MAX_FILE || place_values(&writer.out) > MAX_FILE)
        status = GRADD_FAIL(LIMIT, "a checkpoint of 2 GiB or more: the format ends there");
    else
        status = make_parts(&writer.out, &file);
    free(writer.out.values);
    if (status != GRADD_OK)
        checkpoint_file_finish(&file);
    else
        *out_file = file;
    return status;
}

void checkpoint_file_finish(checkpoint_file_t *file) {
    if (!file) return;
    free(file->parts);
    free(file->between);
    free(file->tables);
    *file = (checkpoint_file_t){0};
}
