/* Messages: texts that grow, and the entries of JSON that came. */
#include "live.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- texts that grow */

void words_bytes(struct words *words, const void *bytes, size_t count) {
    if (words->failed) return;
    if (count > words->room - words->used) {
        size_t room = 2 * words->room + count + 200;
        char *more = realloc(words->text, room);
        if (more == NULL) {
            words->failed = true;
            return;
        }
        words->text = more;
        words->room = room;
    }
    memcpy(words->text + words->used, bytes, count);
    words->used += count;
}

void words_add(struct words *words, const char *text) { words_bytes(words, text, strlen(text)); }

void words_number(struct words *words, double value) {
    char number[LONGEST_NUMBER];
    write_double(number, value);
    words_add(words, isnan(value) ? "NaN" : isinf(value) ? (value > 0 ? "Infinity" : "-Infinity") : number);
}

void words_whole(struct words *words, size_t value) {
    char number[LONGEST_NUMBER];
    snprintf(number, sizeof number, "%zu", value);
    words_add(words, number);
}

void words_text(struct words *words, const char *text) {
    char escape[8];
    words_add(words, "\"");
    for (; *text != 0; text++) {
        if ((unsigned char)*text >= 0x20 && *text != '"' && *text != '\\') {
            words_bytes(words, text, 1);
            continue;
        }
        snprintf(escape, sizeof escape, "\\u%04x", (unsigned)(unsigned char)*text);
        words_add(words, escape);
    }
    words_add(words, "\"");
}

/* ---- entries of a message */

bool live_text_entry(const struct json *json, const char *name, char *to, size_t room) {
    uint32_t node = json_member(json, 1, name);
    if (node == 0 || json->nodes[node].kind != JSON_TEXT || json->nodes[node].bytes >= room) return false;
    json_copy_text(json, node, to, room);
    return true;
}

bool live_whole_entry(const struct json *json, uint32_t object, const char *name, int64_t low, int64_t *to) {
    uint32_t node = json_member(json, object, name);
    if (node == 0 || json->nodes[node].kind != JSON_INTEGER || !json->nodes[node].fits) return false;
    int64_t value = json->nodes[node].whole;
    if (value < low || value > INT32_MAX) return false;
    *to = value;
    return true;
}

bool live_rate_entry(const struct json *json, uint32_t object, const char *name, double *to) {
    uint32_t node = json_member(json, object, name);
    if (node == 0 || (json->nodes[node].kind != JSON_INTEGER && json->nodes[node].kind != JSON_FLOAT)) return false;
    double value = json->nodes[node].number;
    if (!(value >= 0) || isinf(value)) return false;
    *to = value;
    return true;
}
