/* Reads JSON as strictly as Python's json.loads does, with bounds on depth and on the number of values.
 *
 * The texts are kept in UTF-8. A half of a surrogate pair, which JSON may have by itself, takes three bytes as any other
 * character of its size; so bytes order texts as their characters do.
 */
#include "core.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_VALUES 500000 /* of a manifest, which has some hundred and two for each class */
#define DEEPEST 64
#define MOST_DIGITS 4300 /* of an integer, as in Python */

struct reader {
    struct json *json;
    size_t at;
    char *error;
};

static int wrong(struct reader *r, const char *what) {
    return fail(r->error, TFPFL_BUNDLE_ERROR, "%s at byte %zu", what, r->at);
}

static int peek(const struct reader *r) {
    return r->at < r->json->source_bytes ? (unsigned char)r->json->source[r->at] : -1;
}

static void skip_space(struct reader *r) {
    for (int c = peek(r); c == ' ' || c == '\t' || c == '\n' || c == '\r'; c = peek(r)) r->at++;
}

static int add_node(struct reader *r, uint32_t *node) {
    struct json *json = r->json;
    if (json->used > MOST_VALUES) return wrong(r, "more than 500,000 values");
    if (json->used == json->room) {
        uint32_t room = json->room * 2;
        struct json_node *nodes = realloc(json->nodes, room * sizeof *nodes);
        if (nodes == NULL) return no_memory(r->error);
        json->nodes = nodes;
        json->room = room;
    }
    *node = json->used++;
    memset(&json->nodes[*node], 0, sizeof *json->nodes);
    return 0;
}

static int hex4(struct reader *r, uint32_t *value) {
    *value = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        int c = peek(r);
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10
                  : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0) return wrong(r, "\\u without four hexadecimal digits");
        *value = *value << 4 | (uint32_t)digit;
    }
    return 0;
}

/* Every escape is at least as long as the character that it stands for: the texts never take more than the source. */
static void add_character(struct json *json, uint32_t c) {
    char *to = json->texts + json->texts_used;
    size_t n = 0;
    if (c < 0x80) {
        to[n++] = (char)c;
    } else if (c < 0x800) {
        to[n++] = (char)(0xC0 | c >> 6);
    } else if (c < 0x10000) {
        to[n++] = (char)(0xE0 | c >> 12);
        to[n++] = (char)(0x80 | (c >> 6 & 63));
    } else {
        to[n++] = (char)(0xF0 | c >> 18);
        to[n++] = (char)(0x80 | (c >> 12 & 63));
        to[n++] = (char)(0x80 | (c >> 6 & 63));
    }
    if (c >= 0x80) to[n++] = (char)(0x80 | (c & 63));
    json->texts_used += n;
}

static int read_escape(struct reader *r) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    int c = peek(r);
    const char *found = c > 0 ? strchr(from, c) : NULL;
    if (found != NULL) {
        r->at++;
        add_character(r->json, (unsigned char)to[found - from]);
        return 0;
    }
    if (c != 'u') return wrong(r, "an unknown escape");
    r->at++;
    uint32_t value, second;
    if (hex4(r, &value)) return TFPFL_BUNDLE_ERROR;
    if (value >= 0xD800 && value < 0xDC00 && r->json->source_bytes - r->at >= 6 && r->json->source[r->at] == '\\' &&
        r->json->source[r->at + 1] == 'u') {
        size_t start = r->at;
        r->at += 2;
        if (hex4(r, &second)) return TFPFL_BUNDLE_ERROR;
        if (second >= 0xDC00 && second < 0xE000)
            value = 0x10000 + ((value - 0xD800) << 10 | (second - 0xDC00));
        else
            r->at = start;
    }
    add_character(r->json, value);
    return 0;
}

/* The number of bytes of the UTF-8 character at `s`; 0 if it is none. */
static size_t utf8(const unsigned char *s, size_t room) {
    size_t n = s[0] < 0x80 ? 1 : s[0] >= 0xC2 && s[0] < 0xE0 ? 2 : (s[0] & 0xF0) == 0xE0 ? 3
             : s[0] >= 0xF0 && s[0] < 0xF5 ? 4 : 0;
    if (n == 0 || n > room) return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xC0) != 0x80) return 0;
    if (s[0] == 0xE0 && s[1] < 0xA0) return 0;  /* longer than needed */
    if (s[0] == 0xED && s[1] > 0x9F) return 0;  /* half of a pair */
    if (s[0] == 0xF0 && s[1] < 0x90) return 0;
    if (s[0] == 0xF4 && s[1] > 0x8F) return 0;  /* beyond the last character */
    return n;
}

static int read_text(struct reader *r, uint32_t *text, uint32_t *bytes) {
    struct json *json = r->json;
    if (peek(r) != '"') return wrong(r, "no text in quotes");
    r->at++;
    *text = (uint32_t)json->texts_used;
    for (;;) {
        int c = peek(r);
        if (c < 0) return wrong(r, "a text without end");
        if (c < 0x20) return wrong(r, "a control character in a text");
        if (c == '"') break;
        if (c == '\\') {
            r->at++;
            int status = read_escape(r);
            if (status) return status;
            continue;
        }
        size_t n = utf8((const unsigned char *)json->source + r->at, json->source_bytes - r->at);
        if (n == 0) return wrong(r, "no UTF-8");
        memcpy(json->texts + json->texts_used, json->source + r->at, n);
        json->texts_used += n;
        r->at += n;
    }
    r->at++;
    *bytes = (uint32_t)(json->texts_used - *text);
    return 0;
}

static size_t skip_digits(struct reader *r) {
    size_t start = r->at;
    while (peek(r) >= '0' && peek(r) <= '9') r->at++;
    return r->at - start;
}

static int read_number(struct reader *r, struct json_node *node) {
    size_t start = r->at;
    const char *source = r->json->source;
    bool negative = peek(r) == '-';
    if (negative) r->at++;
    size_t first = r->at, digits = 1;
    if (peek(r) == '0') r->at++;
    else if ((digits = skip_digits(r)) == 0) return wrong(r, "no value");
    node->kind = JSON_INTEGER;
    size_t end = r->at;
    if (peek(r) == '.') {
        r->at++;
        if (skip_digits(r) > 0) end = r->at, node->kind = JSON_FLOAT;
        r->at = end;
    }
    if (peek(r) == 'e' || peek(r) == 'E') {
        r->at++;
        if (peek(r) == '+' || peek(r) == '-') r->at++;
        if (skip_digits(r) > 0) end = r->at, node->kind = JSON_FLOAT;
        r->at = end;
    }
    if (node->kind == JSON_INTEGER && digits > MOST_DIGITS) return wrong(r, "an integer of more than 4,300 digits");
    node->text = (uint32_t)start;
    node->bytes = (uint32_t)(r->at - start);
    node->number = read_double(source + start, r->at - start);
    uint64_t whole = 0;
    node->fits = node->kind == JSON_INTEGER && digits <= 19;
    for (size_t i = first; node->fits && i < end; i++) whole = 10 * whole + (uint64_t)(source[i] - '0');
    node->fits = node->fits && whole <= INT64_MAX;
    if (node->fits) node->whole = negative ? -(int64_t)whole : (int64_t)whole;
    return 0;
}

static bool read_word(struct reader *r, const char *word) {
    size_t n = strlen(word);
    if (r->json->source_bytes - r->at < n || memcmp(r->json->source + r->at, word, n) != 0) return false;
    r->at += n;
    return true;
}

struct named {
    const struct json *json;
    uint32_t node;
};

static int compare_names(const struct json *json, uint32_t a, uint32_t b) {
    const struct json_node *x = &json->nodes[a], *y = &json->nodes[b];
    uint32_t least = x->name_bytes < y->name_bytes ? x->name_bytes : y->name_bytes;
    int order = memcmp(json->texts + x->name, json->texts + y->name, least);
    return order != 0 ? order : (x->name_bytes > y->name_bytes) - (x->name_bytes < y->name_bytes);
}

static int by_name(const void *a, const void *b) {
    const struct named *x = a, *y = b;
    int order = compare_names(x->json, x->node, y->node);
    return order != 0 ? order : (x->node > y->node) - (x->node < y->node);  /* the earlier one first */
}

/* The members of an object, sorted by name; NULL if there is no memory. */
static struct named *sorted(const struct json *json, uint32_t object) {
    struct named *found = take(json->nodes[object].count, sizeof *found);
    size_t n = 0;
    if (found == NULL) return NULL;
    for (uint32_t i = json->nodes[object].child; i != 0; i = json->nodes[i].next)
        found[n++] = (struct named){json, i};
    qsort(found, n, sizeof *found, by_name);
    return found;
}

/* A name that comes again: its last value counts, at the place of the first. */
static int drop_repeated(struct reader *r, uint32_t object) {
    struct json *json = r->json;
    uint32_t count = json->nodes[object].count;
    if (count < 2) return 0;
    struct named *members = sorted(json, object);
    if (members == NULL) return no_memory(r->error);
    for (uint32_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && compare_names(json, members[i].node, members[end].node) == 0; end++)
            json->nodes[members[end].node].replaced = true;
        if (end - i > 1) {
            struct json_node *first = &json->nodes[members[i].node], last = json->nodes[members[end - 1].node];
            last.next = first->next;
            last.replaced = false;
            *first = last;
        }
    }
    free(members);
    return 0;
}

static int read_value(struct reader *r, uint32_t *node, int depth);

static int read_items(struct reader *r, uint32_t parent, int depth) {
    struct json *json = r->json;
    bool object = json->nodes[parent].kind == JSON_OBJECT;
    int end = object ? '}' : ']', status;
    uint32_t last = 0, item, name = 0, name_bytes = 0;
    if (depth >= DEEPEST) return fail(r->error, TFPFL_BUNDLE_ERROR, "it is nested too deeply");
    r->at++;
    skip_space(r);
    if (peek(r) == end) {
        r->at++;
        return 0;
    }
    for (;;) {
        if (object) {
            if ((status = read_text(r, &name, &name_bytes))) return status;
            skip_space(r);
            if (peek(r) != ':') return wrong(r, "no colon after a name");
            r->at++;
        }
        if ((status = read_value(r, &item, depth + 1))) return status;
        json->nodes[item].name = name;
        json->nodes[item].name_bytes = name_bytes;
        if (last == 0) json->nodes[parent].child = item;
        else json->nodes[last].next = item;
        last = item;
        json->nodes[parent].count++;
        skip_space(r);
        int c = peek(r);
        r->at++;
        if (c == end) return object ? drop_repeated(r, parent) : 0;
        if (c != ',') return r->at--, wrong(r, object ? "no comma between entries" : "no comma between items");
        skip_space(r);
    }
}

static int read_value(struct reader *r, uint32_t *node, int depth) {
    skip_space(r);
    int status = add_node(r, node), c = peek(r);
    if (status) return status;
    struct json_node *here = &r->json->nodes[*node];
    if (c == '{' || c == '[') {
        here->kind = c == '{' ? JSON_OBJECT : JSON_LIST;
        return read_items(r, *node, depth);
    }
    if (c == '"') {
        here->kind = JSON_TEXT;
        return read_text(r, &here->text, &here->bytes);
    }
    if (read_word(r, "null")) return here->kind = JSON_NULL, 0;
    if (read_word(r, "true")) return here->kind = JSON_TRUE, 0;
    if (read_word(r, "false")) return here->kind = JSON_FALSE, 0;
    here->kind = JSON_FLOAT;  /* Python reads these three, too */
    if (read_word(r, "NaN")) return here->number = NAN, 0;
    if (read_word(r, "Infinity")) return here->number = INFINITY, 0;
    if (read_word(r, "-Infinity")) return here->number = -INFINITY, 0;
    if (c == '-' || (c >= '0' && c <= '9')) return read_number(r, here);
    return wrong(r, "no value");
}

int json_read(struct json *json, char *source, size_t bytes, char *error) {
    memset(json, 0, sizeof *json);
    json->source = source;
    json->source_bytes = bytes;
    json->room = 256;
    json->used = 1;
    json->nodes = take(json->room, sizeof *json->nodes);
    json->texts = take(bytes, 1);
    struct reader reader = {json, 0, error};
    uint32_t root;
    int status = TFPFL_BUNDLE_ERROR;
    if (json->nodes == NULL || json->texts == NULL) status = no_memory(error);
    else if (bytes > UINT32_MAX / 2) status = wrong(&reader, "too long a text");
    else if ((status = read_value(&reader, &root, 0)) == 0) {
        skip_space(&reader);
        if (reader.at != bytes) status = wrong(&reader, "something after the end");
    }
    if (status) json_free(json);
    return status;
}

void json_free(struct json *json) {
    free(json->nodes);
    free(json->texts);
    free(json->source);
    memset(json, 0, sizeof *json);
}

uint32_t json_first(const struct json *json, uint32_t node) {
    return json->nodes[node].child;  /* what was replaced is never the first */
}

uint32_t json_next(const struct json *json, uint32_t node) {
    do node = json->nodes[node].next;
    while (node != 0 && json->nodes[node].replaced);
    return node;
}

uint32_t json_member(const struct json *json, uint32_t object, const char *name) {
    size_t bytes = strlen(name);
    if (object == 0 || json->nodes[object].kind != JSON_OBJECT) return 0;
    for (uint32_t i = json_first(json, object); i != 0; i = json_next(json, i))
        if (json->nodes[i].name_bytes == bytes && memcmp(json->texts + json->nodes[i].name, name, bytes) == 0) return i;
    return 0;
}

void json_copy_text(const struct json *json, uint32_t node, char *to, size_t room) {
    size_t bytes = json->nodes[node].bytes < room ? json->nodes[node].bytes : room - 1;
    memcpy(to, json->texts + json->nodes[node].text, bytes);
    to[bytes] = 0;
}

bool json_is_text(const struct json *json, uint32_t node, const char *text) {
    const struct json_node *n = &json->nodes[node];
    return node != 0 && n->kind == JSON_TEXT && n->bytes == strlen(text) &&
           memcmp(json->texts + n->text, text, n->bytes) == 0;
}

struct item {
    const char *text;
    uint32_t bytes, node;
};

static int by_text(const void *a, const void *b) {
    const struct item *x = a, *y = b;
    int order = memcmp(x->text, y->text, x->bytes < y->bytes ? x->bytes : y->bytes);
    return order != 0 ? order : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

int json_repeated(const struct json *json, uint32_t list, uint32_t *first, char *error) {
    struct item *items = take(json->nodes[list].count, sizeof *items);
    size_t n = 0;
    *first = 0;
    if (items == NULL) return no_memory(error);
    for (uint32_t i = json_first(json, list); i != 0; i = json_next(json, i))
        items[n++] = (struct item){json->texts + json->nodes[i].text, json->nodes[i].bytes, i};
    qsort(items, n, sizeof *items, by_text);
    for (size_t i = 1; i < n; i++) {
        uint32_t earlier = items[i - 1].node < items[i].node ? items[i - 1].node : items[i].node;
        if (by_text(items + i - 1, items + i) == 0 && (*first == 0 || earlier < *first)) *first = earlier;
    }
    free(items);
    return 0;
}

/* One character of a text of ours, and how many bytes it takes. */
static uint32_t character(const char *text, size_t *bytes) {
    const unsigned char *s = (const unsigned char *)text;
    if (s[0] < 0x80) return *bytes = 1, s[0];
    if (s[0] < 0xE0) return *bytes = 2, (uint32_t)(s[0] & 31) << 6 | (s[1] & 63);
    if (s[0] < 0xF0) return *bytes = 3, (uint32_t)(s[0] & 15) << 12 | (uint32_t)(s[1] & 63) << 6 | (s[2] & 63);
    return *bytes = 4, (uint32_t)(s[0] & 7) << 18 | (uint32_t)(s[1] & 63) << 12 | (uint32_t)(s[2] & 63) << 6 |
                       (s[3] & 63);
}

size_t json_escape(const char *text, char out[JSON_CHARACTER]) {
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    size_t bytes;
    uint32_t c = character(text, &bytes);
    const char *found = c > 0 && c < 0x80 ? strchr(from, (int)c) : NULL;
    if (found != NULL) snprintf(out, JSON_CHARACTER, "\\%c", to[found - from]);
    else if (c >= 0x20 && c < 0x7F) snprintf(out, JSON_CHARACTER, "%c", (int)c);
    else if (c < 0x10000) snprintf(out, JSON_CHARACTER, "\\u%04x", (unsigned)c);
    else snprintf(out, JSON_CHARACTER, "\\u%04x\\u%04x", (unsigned)(0xD800 + ((c - 0x10000) >> 10)),
                  (unsigned)(0xDC00 + ((c - 0x10000) & 0x3FF)));
    return bytes;
}

static void hash_text(struct sha256 *hash, const char *text, size_t bytes) {
    char out[JSON_CHARACTER];
    sha256_add(hash, "\"", 1);
    for (size_t i = 0; i < bytes;) {
        i += json_escape(text + i, out);
        sha256_add(hash, out, strlen(out));
    }
    sha256_add(hash, "\"", 1);
}

/* A number as Python writes it. An integer stays as it is; of all that JSON allows, only -0 is written otherwise. */
static void hash_number(struct sha256 *hash, const struct json *json, const struct json_node *node) {
    char out[LONGEST_NUMBER];
    if (node->kind == JSON_INTEGER) {
        bool zero = node->fits && node->whole == 0;
        sha256_add(hash, zero ? "0" : json->source + node->text, zero ? 1 : node->bytes);
        return;
    }
    write_double(out, node->number);
    const char *text = isnan(node->number) ? "NaN" : isinf(node->number) ? (node->number > 0 ? "Infinity" : "-Infinity")
                                                                          : out;
    sha256_add(hash, text, strlen(text));
}

static int hash_value(struct sha256 *hash, const struct json *json, uint32_t at, const char *except, char *error) {
    const struct json_node *node = &json->nodes[at];
    static const char *const words[] = {"null", "false", "true"};
    bool object = node->kind == JSON_OBJECT, first = true;
    int status = 0;
    switch (node->kind) {
    case JSON_NULL: case JSON_FALSE: case JSON_TRUE:
        sha256_add(hash, words[node->kind], strlen(words[node->kind]));
        return 0;
    case JSON_TEXT:
        hash_text(hash, json->texts + node->text, node->bytes);
        return 0;
    case JSON_INTEGER: case JSON_FLOAT:
        hash_number(hash, json, node);
        return 0;
    }
    sha256_add(hash, object ? "{" : "[", 1);
    struct named *members = object ? sorted(json, at) : NULL;
    if (object && members == NULL) return no_memory(error);
    uint32_t item = node->child;
    for (uint32_t i = 0; status == 0 && i < node->count; i++, item = json->nodes[item].next) {
        uint32_t here = object ? members[i].node : item;
        const struct json_node *value = &json->nodes[here];
        if (value->replaced) continue;
        if (except != NULL && value->name_bytes == strlen(except) &&
            memcmp(json->texts + value->name, except, value->name_bytes) == 0) continue;
        if (!first) sha256_add(hash, ",", 1);
        first = false;
        if (object) {
            hash_text(hash, json->texts + value->name, value->name_bytes);
            sha256_add(hash, ":", 1);
        }
        status = hash_value(hash, json, here, NULL, error);
    }
    free(members);
    sha256_add(hash, object ? "}" : "]", 1);
    return status;
}

int json_hash(const struct json *json, const char *except, unsigned char digest[32], char *error) {
    struct sha256 hash;
    sha256_start(&hash);
    int status = hash_value(&hash, json, 1, except, error);
    sha256_end(&hash, digest);
    return status;
}
