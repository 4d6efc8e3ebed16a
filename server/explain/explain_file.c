/* Reads an ONNX file and writes it with annotations. See explain_file.h.
 *
 * The engine's subset of the schema leaves out doc strings and metadata; protobuf-c keeps such
 * fields as raw bytes and writes them back. So annotations are added as raw fields, too, and the
 * subset stays small. */
#include "server/explain/explain_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NODE_DOC_STRING 6 /* field numbers of the ONNX standard */
#define NODE_METADATA   9
#define MAX_FILE        ((size_t)2 << 30)

/* ---- reading --------------------------------------------------------------------------------- */

static void *proto_alloc(void *arena, size_t bytes) {
    return arena_alloc(arena, bytes);
}

static void proto_free(void *arena, void *p) {
    (void)arena;
    (void)p;
}

static gradd_status_t read_bytes(explain_file_t *file, FILE *in) {
    if (fseek(in, 0, SEEK_END) != 0) return GRADD_FAIL(IO, "%s: %s", file->path, strerror(errno));
    long size = ftell(in);
    if (size < 0 || (size_t)size > MAX_FILE)
        return GRADD_FAIL(LIMIT, "%s: not a file of at most 2 GiB", file->path);
    rewind(in);
    file->n_bytes = (size_t)size;
    file->bytes = arena_alloc(file->arena, file->n_bytes);
    if (!file->bytes) return GRADD_E_NOMEM;
    if (fread(file->bytes, 1, file->n_bytes, in) != file->n_bytes)
        return GRADD_FAIL(IO, "%s: cannot be read", file->path);
    return GRADD_OK;
}

gradd_status_t explain_file_open(const char *path, explain_file_t *out_file) {
    explain_file_t file = {.path = path};
    FILE *in = fopen(path, "rb");
    if (!in) return GRADD_FAIL(IO, "%s: %s", path, strerror(errno));
    gradd_status_t status = arena_create(0, &file.arena);
    if (!status) status = read_bytes(&file, in);
    fclose(in);
    /* loading first: it scans the bytes before protobuf-c sees them */
    if (!status)
        status = gradd_wrap(gradd_model_load(file.bytes, file.n_bytes, &file.model), "%s", path);
    if (!status) {
        ProtobufCAllocator allocator = {proto_alloc, proto_free, file.arena};
        file.proto = onnx__model_proto__unpack(&allocator, file.n_bytes, file.bytes);
        if (!file.proto) status = GRADD_FAIL(NOMEM, "%s: no memory to unpack it", path);
    }
    if (status) {
        explain_file_finish(&file);
        return status;
    }
    *out_file = file;
    return GRADD_OK;
}

void explain_file_finish(explain_file_t *file) {
    gradd_model_destroy(file->model);
    arena_destroy(file->arena);
    *file = (explain_file_t){0};
}

/* The entry in a raw field: a length, then a message. NULL if it is not one. */
static Onnx__StringStringEntryProto *entry_of(const explain_file_t *file,
                                              const ProtobufCMessageUnknownField *field) {
    ProtobufCAllocator allocator = {proto_alloc, proto_free, file->arena};
    size_t at = 0;
    if (field->tag != NODE_METADATA || field->wire_type != PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED)
        return NULL;
    while (at < field->len && field->data[at] & 0x80)
        at++;
    if (at++ >= field->len) return NULL;
    return onnx__string_string_entry_proto__unpack(&allocator, field->len - at, field->data + at);
}

const char *explain_file_source(const explain_file_t *file, int node) {
    const Onnx__GraphProto *graph = file->proto->graph;
    if (node < 0 || (size_t)node >= graph->n_node) return "";
    const ProtobufCMessage *base = &graph->node[node]->base;
    for (unsigned i = 0; i < base->n_unknown_fields; i++) {
        const Onnx__StringStringEntryProto *entry = entry_of(file, &base->unknown_fields[i]);
        if (entry && entry->key && entry->value && !strcmp(entry->key, "gradd.source"))
            return entry->value;
    }
    return "";
}

const char *explain_file_symbol(const explain_file_t *file, const char *input, int dim) {
    const Onnx__GraphProto *graph = file->proto->graph;
    for (size_t i = 0; i < graph->n_input; i++) {
        const Onnx__ValueInfoProto *value = graph->input[i];
        if (!value->name || strcmp(value->name, input)) continue;
        const Onnx__TensorShapeProto *shape =
            value->type && value->type->tensor_type ? value->type->tensor_type->shape : NULL;
        if (!shape || (size_t)dim >= shape->n_dim) return NULL;
        const char *name = shape->dim[dim]->dim_param;
        return name && name[0] ? name : NULL;
    }
    return NULL;
}

/* ---- writing --------------------------------------------------------------------------------- */

static size_t put_length(uint8_t *out, size_t n) {
    size_t at = 0;
    for (; n >= 0x80; n >>= 7)
        out[at++] = (uint8_t)(n | 0x80);
    out[at++] = (uint8_t)n;
    return at;
}

/* A raw field that holds these bytes with their length in front. */
static bool raw_field(arena_t *arena, unsigned tag, const void *bytes, size_t n,
                      ProtobufCMessageUnknownField *out) {
    uint8_t *data = arena_alloc(arena, n + 10);
    if (!data) return false;
    size_t head = put_length(data, n);
    if (n) memcpy(data + head, bytes, n);
    *out = (ProtobufCMessageUnknownField){.tag = tag,
                                          .wire_type = PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED,
                                          .len = head + n,
                                          .data = data};
    return true;
}

static bool metadata_field(arena_t *arena, const char *key, const char *value,
                           ProtobufCMessageUnknownField *out) {
    Onnx__StringStringEntryProto entry = ONNX__STRING_STRING_ENTRY_PROTO__INIT;
    entry.key = (char *)key;
    entry.value = (char *)value;
    size_t n = onnx__string_string_entry_proto__get_packed_size(&entry);
    uint8_t *bytes = arena_alloc(arena, n);
    if (!bytes) return false;
    onnx__string_string_entry_proto__pack(&entry, bytes);
    return raw_field(arena, NODE_METADATA, bytes, n, out);
}

static gradd_status_t annotate_node(arena_t *arena, const explain_report_t *report, int i,
                                    Onnx__NodeProto *proto) {
    explain_notes_t notes;
    GRADD_TRY(explain_report_notes(report, i, &notes));
    unsigned old = proto->base.n_unknown_fields;
    ProtobufCMessageUnknownField *fields =
        arena_array(arena, old + (unsigned)notes.n + 1, sizeof fields[0]);
    if (!fields) return GRADD_E_NOMEM;
    if (old) memcpy(fields, proto->base.unknown_fields, sizeof fields[0] * old);
    bool good =
        raw_field(arena, NODE_DOC_STRING, notes.sentence, strlen(notes.sentence), &fields[old]);
    for (int k = 0; k < notes.n && good; k++)
        good = metadata_field(arena, notes.key[k], notes.value[k], &fields[old + 1 + (unsigned)k]);
    if (!good) return GRADD_E_NOMEM;
    proto->base.unknown_fields = fields;
    proto->base.n_unknown_fields = old + (unsigned)notes.n + 1;
    return GRADD_OK;
}

gradd_status_t explain_write(arena_t *arena, const Onnx__ModelProto *proto, const char *path) {
    size_t n = onnx__model_proto__get_packed_size(proto);
    if (n > MAX_FILE) return GRADD_FAIL(LIMIT, "%s: %zu bytes, above 2 GiB", path, n);
    uint8_t *bytes = arena_alloc(arena, n);
    if (!bytes) return GRADD_E_NOMEM;
    onnx__model_proto__pack(proto, bytes);
    FILE *out = fopen(path, "wb");
    if (!out) return GRADD_FAIL(IO, "%s: %s", path, strerror(errno));
    bool good = fwrite(bytes, 1, n, out) == n;
    if (fclose(out) != 0 || !good) return GRADD_FAIL(IO, "%s: %s", path, strerror(errno));
    return GRADD_OK;
}

gradd_status_t explain_file_annotate(const explain_file_t *file, const explain_report_t *report,
                                     const char *path) {
    Onnx__GraphProto *graph = file->proto->graph;
    for (size_t i = 0; i < graph->n_node && (int)i < report->n_nodes; i++)
        GRADD_TRY(annotate_node(file->arena, report, (int)i, graph->node[i]));
    return explain_write(file->arena, file->proto, path);
}
