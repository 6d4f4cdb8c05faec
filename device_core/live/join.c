/* How a device begins: it joins, and gets the bundle and its first head. */
#include "live.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PROGRAM "program.tflite"
#define NEW_BUNDLE "bundle.new"
#define FIRST_HEAD "head.first"
#define MOST_FILE ((size_t)1 << 30)

/* ---- joining */

/* The sha256 of the program, of a device that has a bundle. */
static int add_program(tfpfl_live *live, struct words *words) {
    struct bundle bundle;
    char hash[65] = "";
    bool found;
    int status = live_is_there(live->bundle, "manifest.json", &found, live->error);
    if (status != 0 || !found) return status;
    status = bundle_open(&bundle, live->bundle, live->error);
    if (status != 0) return status;
    const struct json *manifest = &bundle.manifest;
    uint32_t entry = json_member(manifest, json_member(manifest, 1, "files"), PROGRAM);
    if (entry != 0) json_copy_text(manifest, json_member(manifest, entry, "sha256"), hash, sizeof hash);
    bundle_free(&bundle);
    words_add(words, ", \"program\": ");
    words_text(words, hash);
    return 0;
}

int live_count_classes(tfpfl_live *live) {
    const tfpfl_live_data *data = &live->data;
    live->classes = data->classes;
    if (live->classes > 0) return 0;
    if (live->member.client >= 0) live->classes = (size_t)live->member.classes;
    else if (data->train.labels == NULL)
        return fail(live->error, TFPFL_BUNDLE_ERROR, "the number of classes must be given for examples without labels");
    for (size_t i = 0; data->train.labels != NULL && i < data->train.count; i++)
        if (data->train.labels[i] >= 0 && (size_t)data->train.labels[i] >= live->classes)
            live->classes = (size_t)data->train.labels[i] + 1;
    return 0;
}

static void write_sizes(char *to, size_t room, bool known, int64_t examples, int64_t classes) {
    char first[60] = "";
    if (known) snprintf(first, sizeof first, "%" PRId64 " training examples of ", examples);
    snprintf(to, room, "%s%" PRId64 " classes", first, classes);
}

int live_check_sizes(tfpfl_live *live) {
    const struct member *member = &live->member;
    char before[100], now[100];
    int64_t examples = (int64_t)live->data.train.count, classes = (int64_t)live->classes;
    bool known = member->examples > 0;
    if ((!known || member->examples == examples) && member->classes == classes) return 0;
    write_sizes(before, sizeof before, known, member->examples, member->classes);
    write_sizes(now, sizeof now, known, examples, classes);
    return fail(live->error, TFPFL_BUNDLE_ERROR, "%s is of a device that joined with %s, and its data have %s now: these "
                "stay what they were, since the server counts with them. Give it the examples that it joined with, or "
                "join as another client, with another folder and that client's token", live->folder, before, now);
}

int live_note_examples(tfpfl_live *live, int64_t examples) {
    if (live->member.examples > 0 || examples <= 0) return 0;
    live->member.examples = examples;
    return live_keep_member(live->folder, &live->member, live->error);
}

/* Whether the labels or targets of a split can be used; it fails as the client does when it has its bundle. */
static int check_answers(tfpfl_live *live, const char *split, const tfpfl_examples *examples, bool trained) {
    char *error = live->error;
    for (size_t i = 0; examples->labels != NULL && i < examples->count; i++) {
        int32_t label = examples->labels[i];
        if (label >= 0 && (size_t)label < live->classes) continue;
        if (label < 0 && trained && live->data.classes == 0)
            return fail(error, TFPFL_BUNDLE_ERROR, "the labels y of %s hold %" PRId32 ", and classes are numbered from 0. If "
                        "they are numbers to predict, say so with \"classes\": the number of outputs", split, label);
        return fail(error, TFPFL_BUNDLE_ERROR, "the examples of %s: label %" PRId32 " is out of range: this client's are "
                    "0..%zu; the head is untouched", split, label, live->classes - 1);
    }
    for (size_t i = 0; examples->targets != NULL && i < examples->count * live->classes; i++) {
        double y = (double)examples->targets[i];
        if (!isfinite(y))
            return fail(error, TFPFL_BUNDLE_ERROR, "the labels y of %s hold %s: leave such examples out", split,
                        isnan(y) ? "nan" : y > 0 ? "inf" : "-inf");
    }
    return 0;
}

int live_check_data(tfpfl_live *live) {
    const tfpfl_examples *given[SPLITS] = {&live->data.train, &live->data.validation, &live->data.test};
    for (int i = 0; i < SPLITS; i++) {
        const tfpfl_examples *examples = given[i];
        size_t n = examples->count, each = n == 0 ? 0 : examples->numbers / n;
        if (n == 0) continue;
        if ((examples->x == NULL && examples->tokens == NULL) || each * n != examples->numbers || each == 0)
            return fail(live->error, TFPFL_BUNDLE_ERROR, "the examples of %s: found %zu numbers for %zu examples",
                        live_splits[i], examples->x == NULL && examples->tokens == NULL ? 0 : examples->numbers, n);
        for (size_t j = 0; examples->x != NULL && j < n; j++)
            if (!all_finite(examples->x + j * each, each))
                return fail(live->error, TFPFL_BUNDLE_ERROR, "the examples of %s: example %zu holds NaN or infinity: the "
                            "head is untouched", live_splits[i], j);
        int status = check_answers(live, live_splits[i], examples, i == 0);
        if (status != 0) return status;
    }
    return 0;
}

/* Which live rounds the folder is of, if it is known. */
static int add_run(tfpfl_live *live, struct words *words) {
    char run[RUN_ROOM];
    int status = live_run(live->folder, run, live->error);
    if (status == 0 && run[0] != 0) {
        words_add(words, ", \"run\": ");
        words_text(words, run);
    }
    return status;
}

static int keep_run(tfpfl_live *live, const struct json *json) {
    char run[RUN_ROOM];
    if (json_member(json, 1, "run") == 0) return 0;  /* servers of before do not say it */
    if (!live_text_entry(json, "run", run, sizeof run) || run[0] == 0) return live_unexpected(live, "run");
    return live_keep_run(live->folder, run, live->error);
}

static int send_join(tfpfl_live *live, const struct words *words) {
    const struct request request = {"POST", "/v1/join", words->text, words->used, MOST_ANSWER};
    struct answer answer;
    struct json json = {0};
    struct member member = {.examples = (int64_t)live->data.train.count}, before;
    int status = live_ask(live->http, NULL, &request, &answer, live->error);
    if (status != 0) return status;
    status = live_json(&answer, &json, live->error);
    if (status == 0 && (!live_whole_entry(&json, 1, "client", 0, &member.client) ||
                        !live_whole_entry(&json, 1, "classes", 1, &member.classes)))
        status = live_unexpected(live, "client and classes");
    if (status == 0) status = keep_run(live, &json);
    uint32_t secure = status == 0 ? json_member(&json, 1, "secure") : 0;
    member.secure = secure != 0 && json.nodes[secure].kind == JSON_TRUE;
    live->secure = live->secure || member.secure;
    json_free(&json);
    free(answer.body);
    /* What the device has hidden so far stays hidden, whatever the server says now. */
    if (status == 0) status = live_member(live->folder, &before, live->error);
    if (status != 0) return status;
    member.secure = member.secure || before.secure;
    live->member = member;
    return live_keep_member(live->folder, &member, live->error);
}

int live_join(tfpfl_live *live) {
    struct words words = {0};
    char point[POINT_TEXT];
    if (live->token == NULL)
        return fail(live->error, TFPFL_BUNDLE_ERROR, "%s has not joined yet: give the enrolment token", live->folder);
    int status = live_key_public(live->key, point, live->error);
    if (status != 0) return status;
    words_add(&words, "{\"protocol\": 1, \"token\": ");
    words_text(&words, live->token);
    words_add(&words, ", \"examples\": ");
    words_whole(&words, live->data.train.count);
    words_add(&words, ", \"classes\": ");
    words_whole(&words, live->classes);
    status = add_program(live, &words);
    if (status == 0) status = add_run(live, &words);
    words_add(&words, ", \"key\": ");
    words_text(&words, point);
    words_add(&words, ", \"secure\": 1}");
    if (status == 0 && words.failed) status = no_memory(live->error);
    if (status == 0) status = send_join(live, &words);
    free(words.text);
    if (status == 0) live_tell(live, "joined as client %" PRId64, live->member.client);
    return status;
}

/* ---- the bundle and the first head */

static bool is_file_name(const char *name) {
    for (size_t i = 0; name[i] != 0; i++) {
        char c = name[i];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
              (i > 0 && (c == '.' || c == '-')))) return false;
    }
    return name[0] != 0;
}

static int download(tfpfl_live *live, const char *target, const char *path) {
    struct answer answer;
    int status = live_get(live, target, MOST_FILE, &answer);
    if (status != 0) return status;
    status = live_good(&answer, live->error);
    if (status == 0) status = live_write(path, answer.body, answer.bytes, 0644, live->error);
    free(answer.body);
    return status;
}

static int get_file(tfpfl_live *live, const struct json *json, uint32_t node, const char *folder) {
    char name[LONGEST_FILE_NAME + 2] = "", target[LONGEST_FILE_NAME + 40];
    if (json->nodes[node].kind == JSON_TEXT) json_copy_text(json, node, name, sizeof name);
    if (strlen(name) > LONGEST_FILE_NAME || !is_file_name(name)) {
        char shown[LONGEST_REPR];
        json_repr(json, node, false, shown);
        return fail(live->error, TFPFL_SERVER_ERROR, "the server names a file %s, which is no file of a bundle", shown);
    }
    char *path = join(folder, name);
    if (path == NULL) return no_memory(live->error);
    snprintf(target, sizeof target, "/v1/bundle/%s", name);
    int status = download(live, target, path);
    free(path);
    return status;
}

static int get_files(tfpfl_live *live, const char *folder) {
    struct answer answer;
    struct json json = {0};
    int status = live_get(live, "/v1/bundle", MOST_ANSWER, &answer);
    if (status != 0) return status;
    status = live_json(&answer, &json, live->error);
    uint32_t files = status == 0 ? json_member(&json, 1, "files") : 0;
    if (status == 0 && (files == 0 || json.nodes[files].kind != JSON_LIST)) status = live_unexpected(live, "files");
    for (uint32_t i = status == 0 ? json_first(&json, files) : 0; i != 0 && status == 0; i = json_next(&json, i))
        status = get_file(live, &json, i, folder);
    json_free(&json);
    free(answer.body);
    return status;
}

int live_get_bundle(tfpfl_live *live) {
    char *folder = join(live->folder, NEW_BUNDLE);
    if (folder == NULL) return no_memory(live->error);
    live_empty(folder, "");
    rmdir(folder);
    int status = mkdir(folder, 0777) != 0 ? system_error(live->error, folder) : get_files(live, folder);
    if (status == 0) status = tfpfl_check_bundle(folder, NULL, live->error);
    if (status == 0 && (rename(folder, live->bundle) != 0 || sync_folder(live->bundle) != 0))
        status = system_error(live->error, live->bundle);
    free(folder);
    return status;
}

int live_get_head(tfpfl_live *live) {
    tfpfl_model model;
    tfpfl_head head = {0};
    char *path = join(live->folder, FIRST_HEAD);
    if (path == NULL) return no_memory(live->error);
    int status = tfpfl_check_bundle(live->bundle, &model, live->error);
    if (status == 0) status = download(live, "/v1/head", path);
    if (status == 0) status = tfpfl_head_load(path, model.num_features, model.num_classes, &head, live->error);
    if (status == 0) status = tfpfl_head_save(live->head, &head, live->error);
    unlink(path);
    tfpfl_head_free(&head);
    free(path);
    return status;
}
