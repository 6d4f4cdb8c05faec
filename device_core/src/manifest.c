/* What the entries of a manifest may be: the rules of tflite_export/device/manifest.py.
 *
 * The hash in a manifest says that nothing was changed by accident. Whoever sends a bundle can compute it anew, so every
 * entry that is used is checked, before memory is taken for what it promises.
 */
#include "core.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define LARGEST 2147483647.0
#define HEAD_HEADER 52
#define LONGEST_PLACE 400

enum rule_kind { NUMBER, TEXT, LIST, NAMED, ENTRIES, BOOLEAN, OBJECT };

struct entry;
struct rule {
    enum rule_kind kind;
    const char *what;                                /* "must be ..." */
    double low, high;                                /* NUMBER */
    bool whole, none;                                /* NUMBER: no fractions; null is allowed */
    bool (*matches)(const char *text, size_t bytes); /* TEXT, and the names of NAMED */
    const struct rule *of;                           /* LIST, NAMED */
    size_t least;                                    /* LIST */
    const struct entry *entries;                     /* ENTRIES: ends with a name of NULL */
};
struct entry {
    const char *name;
    const struct rule *rule;
    bool optional;
};

/* ---- patterns */

static bool digit(char c) { return c >= '0' && c <= '9'; }

static bool word(char c) { return digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

static bool is_word(const char *text, size_t bytes) {  /* \w{1,40} */
    for (size_t i = 0; i < bytes; i++)
        if (!word(text[i])) return false;
    return bytes >= 1 && bytes <= 40;
}

static bool is_file_name(const char *text, size_t bytes) {  /* [A-Za-z0-9_][A-Za-z0-9_.-]{0,80} */
    for (size_t i = 0; i < bytes; i++)
        if (!word(text[i]) && (i == 0 || (text[i] != '.' && text[i] != '-'))) return false;
    return bytes >= 1 && bytes <= 81;
}

static bool is_line(const char *text, size_t bytes) {  /* .{1,80} */
    size_t characters = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] == '\n') return false;
        characters += ((unsigned char)text[i] & 0xC0) != 0x80;
    }
    return characters >= 1 && characters <= 80;
}

static bool is_something(const char *text, size_t bytes) {  /* (?s:.+) */
    (void)text;
    return bytes > 0;
}

static bool is_hash(const char *text, size_t bytes) {  /* [0-9a-f]{64} */
    for (size_t i = 0; i < bytes; i++)
        if (!digit(text[i]) && !(text[i] >= 'a' && text[i] <= 'f')) return false;
    return bytes == 64;
}

static bool is_dtype(const char *text, size_t bytes) {  /* float32|int32 */
    return (bytes == 7 && memcmp(text, "float32", 7) == 0) || (bytes == 5 && memcmp(text, "int32", 5) == 0);
}

static bool is_dict_or_tuple(const char *text, size_t bytes) {  /* dict|tuple */
    return (bytes == 4 && memcmp(text, "dict", 4) == 0) || (bytes == 5 && memcmp(text, "tuple", 5) == 0);
}

static bool is_output(const char *text, size_t bytes) {  /* [A-Za-z0-9_.]{1,80} */
    for (size_t i = 0; i < bytes; i++)
        if (!word(text[i]) && text[i] != '.') return false;
    return bytes >= 1 && bytes <= 80;
}

static bool is_tensor(const char *text, size_t bytes) {  /* (float32|int32)\[(-?\d+(, -?\d+)*)?\] */
    const char *end = text + bytes;
    if (bytes >= 8 && memcmp(text, "float32[", 8) == 0) text += 8;
    else if (bytes >= 6 && memcmp(text, "int32[", 6) == 0) text += 6;
    else return false;
    if (end - text == 1 && *text == ']') return true;
    for (;;) {
        if (text < end && *text == '-') text++;
        const char *digits = text;
        while (text < end && digit(*text)) text++;
        if (text == digits) return false;
        if (end - text == 1 && *text == ']') return true;
        if (end - text < 3 || text[0] != ',' || text[1] != ' ') return false;
        text += 2;
    }
}

/* ---- the rules */

static const struct rule count = {NUMBER, "an integer from 1 to 2147483647", 1, LARGEST, .whole = true};
static const struct rule id = {NUMBER, "an integer from 0 to 2147483647", 0, LARGEST, .whole = true};
static const struct rule batch = {NUMBER, "an integer from 1 to 4096", 1, 4096, .whole = true};
static const struct rule room = {NUMBER, "an integer from 1 to 65536", 1, 65536, .whole = true};
static const struct rule size = {NUMBER, "an integer from 0 to 4611686018427387904", 0, 4611686018427387904.0,
                                 .whole = true};
static const struct rule any_number = {NUMBER, "a number from -3.4e+38 to 3.4e+38", -3.4e38, 3.4e38};
static const struct rule positive = {NUMBER, "a number from 0 to 3.4e+38", 0, 3.4e38};
static const struct rule positive_or_none = {NUMBER, "a number from 0 to 3.4e+38", 0, 3.4e38, .none = true};
static const struct rule text = {TEXT, "a text"};
static const struct rule hash = {TEXT, "64 hexadecimal digits", .matches = is_hash};
static const struct rule tensor = {TEXT, "a dtype and a shape", .matches = is_tensor};
static const struct rule dtype = {TEXT, "float32 or int32", .matches = is_dtype};
static const struct rule dict_or_tuple = {TEXT, "dict or tuple", .matches = is_dict_or_tuple};
static const struct rule kind = {TEXT, "a kind of labels besides classification", .matches = is_kind};
static const struct rule file_name = {TEXT, "a file name", .matches = is_file_name};
static const struct rule boolean = {BOOLEAN, "true or false"};
static const struct rule object = {OBJECT, "an object"};
static const struct rule tensors = {NAMED, "an object", .of = &tensor, .matches = is_word};
static const struct rule shape = {LIST, "a list of 1 or more", .of = &count, .least = 1};
static const struct rule weight_shape = {LIST, "a list of 0 or more", .of = &count};
static const struct rule texts = {LIST, "a list of 0 or more", .of = &text};
static const struct rule column_names = {LIST, "a list of 1 or more", .of = &text, .least = 1};
static const struct rule class_name = {TEXT, "a text of one or more characters", .matches = is_something};
static const struct rule class_names = {LIST, "a list of 1 or more", .of = &class_name, .least = 1};
static const struct rule ids = {LIST, "a list of 1 or more", .of = &id, .least = 1};
static const struct rule objects = {LIST, "a list of 0 or more", .of = &object};
static const struct rule named_texts = {NAMED, "an object", .of = &text, .matches = is_line};
static const struct rule named_objects = {NAMED, "an object", .of = &object, .matches = is_line};
static const struct rule operations = {NAMED, "an object", .of = &count, .matches = is_line};

#define OBJECT_OF(entries_) {ENTRIES, "an object", .entries = entries_}
static const struct entry weight_entries[] = {{"name", &text}, {"shape", &weight_shape}, {"offset", &id}, {NULL}};
static const struct rule weight = OBJECT_OF(weight_entries);
static const struct rule weights = {LIST, "a list of 0 or more", .of = &weight};
static const struct entry array_entries[] = {
    {"name", &text}, {"shape", &weight_shape}, {"dtype", &dtype}, {"offset", &id}, {"num_tokens", &count, true}, {NULL}};
static const struct rule array = OBJECT_OF(array_entries);
static const struct rule arrays = {LIST, "a list of 1 or more", .of = &array, .least = 1};
static const struct entry input_entries[] = {{"kind", &dict_or_tuple}, {"arrays", &arrays}, {NULL}};
static const struct rule inputs = OBJECT_OF(input_entries);
static const struct entry model_entries[] = {
    {"example_shape", &shape}, {"example_dtype", &dtype, true}, {"num_tokens", &count, true}, {"inputs", &inputs, true},
    {"num_features", &count}, {"num_classes", &count}, {"num_backbone_weights", &count}, {"static_batch", &batch},
    {"kind", &kind, true}, {"theta", &weights}, {NULL}};
static const struct rule model_rule = OBJECT_OF(model_entries);
static const struct entry trunk_entries[] = {{"file", &file_name}, {"raw_shape", &shape}, {"sha256", &hash}, {NULL}};
static const struct rule trunk = OBJECT_OF(trunk_entries);
static const struct entry training_entries[] = {
    {"tau", &count}, {"beta", &positive}, {"rho", &positive_or_none}, {"head_rate", &positive_or_none},
    {"safeguard", &boolean}, {"rounds", &boolean}, {NULL}};
static const struct rule training = OBJECT_OF(training_entries);
static const struct entry preprocessing_entries[] = {
    {"scale", &any_number, true}, {"shift", &any_number, true}, {"stored_dtype", &text, true},
    {"columns", &column_names, true}, {NULL}};
static const struct rule preprocessing = OBJECT_OF(preprocessing_entries);
static const struct entry label_entries[] = {{"names", &class_names}, {"class_ids", &ids}, {NULL}};
static const struct rule labels = OBJECT_OF(label_entries);
static const struct entry signature_entries[] = {{"inputs", &tensors}, {"outputs", &tensors}, {NULL}};
static const struct rule signature = OBJECT_OF(signature_entries);
static const struct rule signatures = {NAMED, "an object", .of = &signature, .matches = is_word};
static const struct entry file_entries[] = {
    {"bytes", &size}, {"sha256", &hash}, {"operations", &operations, true}, {NULL}};
static const struct rule file = OBJECT_OF(file_entries);
static const struct rule files = {NAMED, "an object", .of = &file, .matches = is_file_name};
static const struct entry runtime_entries[] = {{"tested", &texts}, {"minimum", &named_texts}, {NULL}};
static const struct rule runtimes = OBJECT_OF(runtime_entries);
static const struct rule output_bounds = {NAMED, "an object", .of = &positive, .matches = is_output};
static const struct rule file_bounds = {NAMED, "an object", .of = &positive, .matches = is_file_name};
static const struct entry check_entries[] = {{"max_relative", &positive_or_none}, {"l2_relative", &positive},
                                             {"outputs", &output_bounds, true}, {"files", &file_bounds, true}, {NULL}};
static const struct rule check_rule = OBJECT_OF(check_entries);
static const struct entry browser_entries[] = {{"room", &room}, {"batch", &batch}, {"head_batch", &batch}, {NULL}};
static const struct rule browser = OBJECT_OF(browser_entries);
static const struct entry manifest_entries[] = {
    {"model", &model_rule}, {"trunk", &trunk, true}, {"training", &training}, {"preprocessing", &preprocessing},
    {"labels", &labels}, {"signatures", &signatures}, {"files", &files}, {"quality", &named_objects, true},
    {"runtimes", &runtimes, true}, {"memory", &objects, true}, {"check", &check_rule}, {"browser", &browser, true}, {NULL}};
static const struct rule manifest_rule = OBJECT_OF(manifest_entries);

/* ---- the checker */

struct checker {
    const struct json *json;
    char place[LONGEST_PLACE];
    char *error;
};

static int must_be(struct checker *c, uint32_t node, const char *what) {
    char found[LONGEST_REPR];
    const struct json_node *n = &c->json->nodes[node];
    const char *digits = n->kind == JSON_INTEGER ? c->json->source + n->text : "";
    size_t length = n->kind == JSON_INTEGER ? n->bytes : 0;
    if (*digits == '-') digits++, length--;
    if (length > 21 || (length == 21 && memcmp(digits, "100000000000000000000", 21) != 0))
        strcpy(found, "a longer number");
    else
        json_repr(c->json, node, false, found);
    return fail(c->error, TFPFL_BUNDLE_ERROR, "%s must be %s, found %s", c->place, what, found);
}

static int check(struct checker *c, uint32_t node, const struct rule *rule);

/* Checks an item at the place that the format appends, and goes back. */
static int check_at(struct checker *c, uint32_t node, const struct rule *rule, size_t end) {
    int status = check(c, node, rule);
    if (status == 0) c->place[end] = 0;
    return status;
}

static int check_entries_of(struct checker *c, uint32_t node, const struct rule *rule) {
    size_t end = strlen(c->place);
    for (const struct entry *entry = rule->entries; entry->name != NULL; entry++) {
        uint32_t member = json_member(c->json, node, entry->name);
        snprintf(c->place + end, LONGEST_PLACE - end, "%s%s", end > 0 ? "." : "", entry->name);
        if (member == 0 && !entry->optional) return fail(c->error, TFPFL_BUNDLE_ERROR, "%s is missing", c->place);
        int status = member == 0 ? 0 : check_at(c, member, entry->rule, end);
        if (status) return status;
        c->place[end] = 0;
    }
    return 0;
}

static int check_items_of(struct checker *c, uint32_t node, const struct rule *rule) {
    const struct json *json = c->json;
    size_t end = strlen(c->place), i = 0;
    for (uint32_t item = json_first(json, node); item != 0; item = json_next(json, item), i++) {
        if (rule->kind == LIST) {
            snprintf(c->place + end, LONGEST_PLACE - end, "[%zu]", i);
        } else {
            const char *name = json->texts + json->nodes[item].name;
            size_t bytes = json->nodes[item].name_bytes;
            if (!rule->matches(name, bytes)) {
                char found[LONGEST_REPR];
                json_repr_name(json, item, found);
                return fail(c->error, TFPFL_BUNDLE_ERROR, "a name in %s must be a plain name, found %s", c->place, found);
            }
            snprintf(c->place + end, LONGEST_PLACE - end, ".%.*s", (int)bytes, name);
        }
        int status = check_at(c, item, rule->of, end);
        if (status) return status;
    }
    return 0;
}

static int check(struct checker *c, uint32_t node, const struct rule *rule) {
    const struct json_node *n = &c->json->nodes[node];
    bool number = n->kind == JSON_INTEGER || (n->kind == JSON_FLOAT && !rule->whole);
    switch (rule->kind) {
    case NUMBER:
        if (n->kind == JSON_NULL && rule->none) return 0;
        number = number && n->number >= rule->low && n->number <= rule->high;
        if (rule->whole && n->fits) number = number && n->whole <= (int64_t)rule->high;  /* exactly */
        return number ? 0 : must_be(c, node, rule->what);
    case TEXT:
        if (n->kind != JSON_TEXT) return must_be(c, node, rule->what);
        return rule->matches == NULL || rule->matches(c->json->texts + n->text, n->bytes)
                   ? 0 : must_be(c, node, rule->what);
    case BOOLEAN:
        return n->kind == JSON_TRUE || n->kind == JSON_FALSE ? 0 : must_be(c, node, rule->what);
    case LIST:
        if (n->kind != JSON_LIST || n->count < rule->least) return must_be(c, node, rule->what);
        return check_items_of(c, node, rule);
    default:
        if (n->kind != JSON_OBJECT) return must_be(c, node, rule->what);
        return rule->kind == OBJECT ? 0 : rule->kind == NAMED ? check_items_of(c, node, rule)
                                                              : check_entries_of(c, node, rule);
    }
}

/* ---- sizes that follow from one another */

static uint64_t number_of(const struct json *json, uint32_t node) {
    const struct json_node *n = &json->nodes[node];
    return n->fits ? (uint64_t)n->whole : (uint64_t)n->number;
}

static uint64_t entry_of(const struct json *json, uint32_t object_node, const char *name) {
    return number_of(json, json_member(json, object_node, name));
}

static uint64_t times(uint64_t a, uint64_t b) {  /* the largest number stands for all that are larger */
    return b != 0 && a > UINT64_MAX / b ? UINT64_MAX : a * b;
}

static uint64_t product(const struct json *json, uint32_t list) {
    uint64_t found = 1;
    for (uint32_t i = json_first(json, list); i != 0; i = json_next(json, i)) found = times(found, number_of(json, i));
    return found;
}

static int too_large(char *error) {
    return fail(error, TFPFL_BUNDLE_ERROR, "the sizes in model are too large for this machine");
}

static int check_size(const struct json *json, const char *name, uint64_t wanted, char *error) {
    uint32_t entry = json_member(json, json_member(json, 1, "files"), name);
    if (entry == 0) return fail(error, TFPFL_BUNDLE_ERROR, "files.%s is missing", name);
    uint64_t found = entry_of(json, entry, "bytes");
    if (found == wanted) return 0;
    return fail(error, TFPFL_BUNDLE_ERROR, "files.%s.bytes is %" PRIu64 ", but the sizes in model take %" PRIu64, name,
                found, wanted);
}

/* Whether the arrays of a list follow one another, and what numbers they have. */
static int check_offsets(const struct json *json, uint32_t list, const char *place, const char *what, uint64_t *end,
                         char *error) {
    uint64_t i = 0;
    *end = 0;
    for (uint32_t row = json_first(json, list); row != 0; row = json_next(json, row), i++) {
        uint64_t offset = entry_of(json, row, "offset"), numbers = product(json, json_member(json, row, "shape"));
        if (offset != *end)
            return fail(error, TFPFL_BUNDLE_ERROR,
                        "%s[%" PRIu64 "].offset is %" PRIu64 ", but the %s before take %" PRIu64 " numbers", place, i,
                        offset, what, *end);
        *end = numbers > UINT64_MAX - *end ? UINT64_MAX : *end + numbers;
    }
    return 0;
}

static int check_weights(const struct json *json, uint32_t list, uint64_t p, char *error) {
    uint64_t end;
    int status = check_offsets(json, list, "model.theta", "weights", &end, error);
    if (status != 0 || end == p) return status;
    return fail(error, TFPFL_BUNDLE_ERROR, "model.num_backbone_weights is %" PRIu64 ", but model.theta has %" PRIu64
                " numbers", p, end);
}

static void write_list(const struct json *json, uint32_t list, char out[TFPFL_ERROR_ROOM]) {
    size_t used = (size_t)snprintf(out, TFPFL_ERROR_ROOM, "[");
    for (uint32_t i = json_first(json, list); i != 0 && used < TFPFL_ERROR_ROOM - 30; i = json_next(json, i))
        used += (size_t)snprintf(out + used, TFPFL_ERROR_ROOM - used, "%s%" PRIu64, used > 1 ? ", " : "",
                                 number_of(json, i));
    snprintf(out + used, TFPFL_ERROR_ROOM - used, "]");
}

/* Whether the arrays of an example follow one another, are what the example's shape says, and a dict's in order. */
static int check_inputs(const struct json *json, uint32_t inputs_node, uint32_t example, char *error) {
    uint32_t list = json_member(json, inputs_node, "arrays"), before = 0;
    uint64_t end;
    int status = check_offsets(json, list, "model.inputs.arrays", "arrays", &end, error);
    if (status != 0) return status;
    if (json->nodes[example].count != 1 || number_of(json, json_first(json, example)) != end) {
        char found[TFPFL_ERROR_ROOM];
        write_list(json, example, found);
        return fail(error, TFPFL_BUNDLE_ERROR, "model.example_shape is %s, but model.inputs has %" PRIu64 " numbers",
                    found, end);
    }
    if (!json_is_text(json, json_member(json, inputs_node, "kind"), "dict")) return 0;
    for (uint32_t row = json_first(json, list); row != 0; before = row, row = json_next(json, row)) {
        if (before == 0) continue;
        const struct json_node *a = &json->nodes[json_member(json, before, "name")];
        const struct json_node *b = &json->nodes[json_member(json, row, "name")];
        size_t common = a->bytes < b->bytes ? a->bytes : b->bytes;
        int order = memcmp(json->texts + a->text, json->texts + b->text, common);
        if (order > 0 || (order == 0 && a->bytes >= b->bytes))
            return fail(error, TFPFL_BUNDLE_ERROR,
                        "model.inputs.arrays must be in the order of their names, found others");
    }
    return 0;
}

static int check_sizes(const struct json *json, char *error) {
    uint32_t model = json_member(json, 1, "model"), label = json_member(json, 1, "labels");
    uint64_t p = entry_of(json, model, "num_backbone_weights"), m = entry_of(json, model, "num_features");
    uint64_t k = entry_of(json, model, "num_classes");
    int status = check_size(json, "theta.bin", 4 * p, error);
    if (status == 0) status = check_size(json, "head.bin", HEAD_HEADER + 4 * ((m + 1) * k), error);
    if (status == 0) status = check_weights(json, json_member(json, model, "theta"), p, error);
    if (status) return status;
    uint32_t list = json_member(json, label, "names"), names = json->nodes[list].count, again;
    uint32_t class_ids = json->nodes[json_member(json, label, "class_ids")].count;
    if (names != k || class_ids > k)  /* a head that clients share may be wider than this client's classes */
        return fail(error, TFPFL_BUNDLE_ERROR, "labels has %" PRIu32 " names and %" PRIu32 " class_ids for %" PRIu64
                    " classes", names, class_ids, k);
    status = json_repeated(json, list, &again, error);
    if (status) return status;
    if (again != 0) {
        char found[LONGEST_REPR];
        json_repr(json, again, false, found);
        return fail(error, TFPFL_BUNDLE_ERROR, "labels.names must differ, found %s twice", found);
    }
    uint32_t several = json_member(json, model, "inputs");
    if (several != 0) status = check_inputs(json, several, json_member(json, model, "example_shape"), error);
    if (status) return status;
    uint32_t below = json_member(json, json_member(json, 1, "trunk"), "file");
    if (below != 0) {
        char name[LONGEST_FILE_NAME + 1];
        json_copy_text(json, below, name, sizeof name);
        if (json_member(json, json_member(json, 1, "files"), name) == 0)
            return fail(error, TFPFL_BUNDLE_ERROR, "trunk.file is %s, which is not among the files", name);
    }
    uint32_t page = json_member(json, 1, "browser");
    uint64_t columns = page == 0 ? k : entry_of(json, page, "room");
    if (columns < k)
        return fail(error, TFPFL_BUNDLE_ERROR, "browser.room is %" PRIu64 ", but the model has %" PRIu64 " classes",
                    columns, k);
    return 0;
}

/* The shape of one example, and its numbers, of which a chunk must fit into memory. */
static int read_shape(const struct json *json, uint32_t list, const char *place, uint32_t *to, size_t *dimensions,
                      size_t *numbers, size_t rows, char *error) {
    uint64_t all = product(json, list);
    if (json->nodes[list].count > TFPFL_MOST_DIMENSIONS)
        return fail(error, TFPFL_BUNDLE_ERROR, "%s has %" PRIu32 " dimensions; at most %d can be used", place,
                    json->nodes[list].count, TFPFL_MOST_DIMENSIONS);
    if (times(all, 4 * rows) > SIZE_MAX / 2) return too_large(error);
    for (uint32_t i = json_first(json, list); i != 0; i = json_next(json, i))
        to[(*dimensions)++] = (uint32_t)number_of(json, i);
    *numbers = (size_t)all;
    return 0;
}

static int read_model(const struct json *json, tfpfl_model *model, char *error) {
    uint32_t entries = json_member(json, 1, "model"), run = json_member(json, 1, "training");
    uint32_t example = json_member(json, entries, "example_shape"), below = json_member(json, 1, "trunk");
    memset(model, 0, sizeof *model);
    model->batch = (size_t)entry_of(json, entries, "static_batch");
    int status = read_shape(json, example, "model.example_shape", model->example_shape, &model->dimensions,
                            &model->example_numbers, model->batch, error);
    if (status == 0)
        status = read_shape(json, below == 0 ? example : json_member(json, below, "raw_shape"), "trunk.raw_shape",
                            model->raw_shape, &model->raw_dimensions, &model->raw_numbers, model->batch, error);
    if (status) return status;
    model->num_features = (size_t)entry_of(json, entries, "num_features");
    model->num_classes = (size_t)entry_of(json, entries, "num_classes");
    model->num_backbone_weights = (size_t)entry_of(json, entries, "num_backbone_weights");
    if (times(model->num_features, 4 * model->batch) > SIZE_MAX / 2 ||
        times(model->num_classes, 4 * model->num_features + 4) > SIZE_MAX / 4 ||
        times(model->num_backbone_weights, 8) > SIZE_MAX / 2)
        return too_large(error);
    uint32_t rate = json_member(json, run, "head_rate");
    model->tau = (int32_t)entry_of(json, run, "tau");
    model->beta = json->nodes[json_member(json, run, "beta")].number;
    model->head_rate = json->nodes[rate].kind == JSON_NULL ? NAN : json->nodes[rate].number;
    model->safeguard = json->nodes[json_member(json, run, "safeguard")].kind == JSON_TRUE;
    model->rounds = json->nodes[json_member(json, run, "rounds")].kind == JSON_TRUE;
    model->trunk = below != 0;
    model->whole_numbers = json_is_text(json, json_member(json, entries, "example_dtype"), "int32");
    if (json_member(json, entries, "num_tokens") != 0)
        model->num_tokens = (uint32_t)entry_of(json, entries, "num_tokens");
    strcpy(model->kind, "classification");
    if (json_member(json, entries, "kind") != 0)
        json_copy_text(json, json_member(json, entries, "kind"), model->kind, sizeof model->kind);
    return 0;
}

int manifest_check(const struct json *manifest, tfpfl_model *model, char *error) {
    struct checker checker = {manifest, "", error};
    int status = check(&checker, 1, &manifest_rule);
    if (status == 0) status = check_sizes(manifest, error);
    return status == 0 ? read_model(manifest, model, error) : status;
}
