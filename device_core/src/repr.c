/* Values of JSON in messages: as Python's repr has them, so that the messages are the same. */
#include "core.h"

#include <stdio.h>
#include <string.h>

#define MOST_CHARACTERS 80

struct writer {
    char *out;
    size_t used, characters;
    bool full;
};

static void add(struct writer *w, const char *text, size_t bytes) {  /* ASCII, or one character */
    size_t step = (unsigned char)text[0] >= 0x80 ? bytes : 1;
    for (size_t i = 0; i < bytes; i += step) {
        if (w->characters == MOST_CHARACTERS) {
            w->full = true;
            return;
        }
        memcpy(w->out + w->used, text + i, step);
        w->used += step;
        w->characters++;
    }
}

static void add_words(struct writer *w, const char *text) { add(w, text, strlen(text)); }

static void add_text(struct writer *w, const char *text, size_t bytes, bool plain) {
    bool single = memchr(text, '\'', bytes) != NULL, both = single && memchr(text, '"', bytes) != NULL;
    char quote = single && !both ? '"' : '\'', out[16];
    if (!plain) add(w, &quote, 1);
    for (size_t i = 0, n; i < bytes && !w->full; i += n) {
        unsigned char c = (unsigned char)text[i], second = i + 1 < bytes ? (unsigned char)text[i + 1] : 0;
        n = c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
        if (c == 0xC2 && (second < 0xA1 || second == 0xAD)) snprintf(out, sizeof out, "\\x%02x", second);
        else if (c == 0xED && second >= 0xA0)
            snprintf(out, sizeof out, "\\u%04x", 0xD000u | (second & 63u) << 6 | ((unsigned char)text[i + 2] & 63u));
        else if (c >= 0x80) {
            add(w, text + i, n);
            continue;
        } else if (plain && c >= 0x20) snprintf(out, sizeof out, "%c", c);
        else if (c == '\n' || c == '\r' || c == '\t')
            snprintf(out, sizeof out, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        else if (c < 0x20 || c == 0x7F) snprintf(out, sizeof out, "\\x%02x", c);
        else if (c == '\\' || c == (unsigned char)quote) snprintf(out, sizeof out, "\\%c", c);
        else snprintf(out, sizeof out, "%c", c);
        add_words(w, out);
    }
    if (!plain) add(w, &quote, 1);
}

static void add_value(struct writer *w, const struct json *json, uint32_t at, bool plain) {
    static const char *const words[] = {"None", "False", "True"};
    const struct json_node *node = &json->nodes[at];
    char number[LONGEST_NUMBER];
    switch (node->kind) {
    case JSON_NULL: case JSON_FALSE: case JSON_TRUE:
        add_words(w, words[node->kind]);
        return;
    case JSON_INTEGER:
        if (node->fits && node->whole == 0) add_words(w, "0");
        else add(w, json->source + node->text, node->bytes);
        return;
    case JSON_FLOAT:
        write_double(number, node->number);
        add_words(w, number);
        return;
    case JSON_TEXT:
        add_text(w, json->texts + node->text, node->bytes, plain);
        return;
    }
    bool object = node->kind == JSON_OBJECT;
    add_words(w, object ? "{" : "[");
    for (uint32_t i = json_first(json, at); i != 0 && !w->full; i = json_next(json, i)) {
        if (i != node->child) add_words(w, ", ");
        if (object) {
            add_text(w, json->texts + json->nodes[i].name, json->nodes[i].name_bytes, false);
            add_words(w, ": ");
        }
        add_value(w, json, i, false);
    }
    add_words(w, object ? "}" : "]");
}

static void end(struct writer *w, bool dots) {
    if (w->full && dots) {
        memcpy(w->out + w->used, "...", 3);
        w->used += 3;
    }
    w->out[w->used] = 0;
}

void json_repr(const struct json *json, uint32_t node, bool plain, char out[LONGEST_REPR]) {
    struct writer writer = {out, 0, 0, false};
    add_value(&writer, json, node, plain);
    end(&writer, !plain);
}

void json_repr_name(const struct json *json, uint32_t node, char out[LONGEST_REPR]) {
    struct writer writer = {out, 0, 0, false};
    add_text(&writer, json->texts + json->nodes[node].name, json->nodes[node].name_bytes, false);
    end(&writer, true);
}
