/* Questions to the server by libcurl. A server that is away is asked again, with longer and longer pauses. */
#include "live.h"

#include <curl/curl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SILENT 60L         /* seconds without a byte until a connection is given up; a poll takes 30 at most */
#define LONGEST_PAUSE 15.0 /* seconds between attempts */
enum { NOT_YET_VALID = 9, EXPIRED = 10 }; /* OpenSSL's numbers of certificates whose time is not now */

struct http {
    CURL *curl;
    char *url, *certificate;
    bool here;    /* the server is on this machine */
    bool reached; /* it has answered since this was opened */
    double patience;
};

/* ---- opening */

static int keep(char **to, const char *text, size_t bytes, char *error) {
    *to = take(bytes + 1, 1);
    if (*to == NULL) return no_memory(error);
    memcpy(*to, text, bytes);
    (*to)[bytes] = 0;
    return 0;
}

/* By http, whoever is on the way reads the token, and may answer in the server's place. */
static int check_way(const char *url, bool *here, char *error) {
    static const char *const names[] = {"127.0.0.1", "::1", "localhost"};
    CURLU *parts = curl_url();
    char *found = NULL;
    if (parts == NULL) return no_memory(error);
    bool good = curl_url_set(parts, CURLUPART_URL, url, 0) == CURLUE_OK &&
                curl_url_get(parts, CURLUPART_HOST, &found, 0) == CURLUE_OK;
    char *host = good ? found : NULL;
    int status = 0;
    if (host != NULL && host[0] == '[') {  /* an address of IPv6 */
        host++;
        host[strcspn(host, "]")] = 0;
    }
    for (char *c = host; c != NULL && *c != 0; c++)
        if (*c >= 'A' && *c <= 'Z') *c = (char)(*c - 'A' + 'a');
    *here = false;
    for (size_t i = 0; host != NULL && i < sizeof names / sizeof *names; i++) *here |= strcmp(host, names[i]) == 0;
    if (host == NULL)
        status = fail(error, TFPFL_BUNDLE_ERROR, "a server's address is such as https://example.org:8443, found '%s'", url);
    else if (!*here && strncmp(url, "https://", 8) != 0)
        status = fail(error, TFPFL_BUNDLE_ERROR, "http is for a server on this machine alone (127.0.0.1, ::1, localhost): "
                      "others could read the enrolment token on its way to %s, or answer in its place. Give the server "
                      "--tls, and the device its address with https://, found '%s'", host, url);
    curl_free(found);
    curl_url_cleanup(parts);
    return status;
}

int live_http_open(const char *url, const char *certificate, double patience, struct http **out, char *error) {
    struct http *http = *out = calloc(1, sizeof *http);
    size_t bytes = strlen(url);
    if (http == NULL) return no_memory(error);
    if (strncmp(url, "http://", 7) != 0 && strncmp(url, "https://", 8) != 0)
        return fail(error, TFPFL_BUNDLE_ERROR, "the server's address begins with http:// or https://, found '%s'", url);
    while (bytes > 0 && url[bytes - 1] == '/') bytes--;
    http->patience = patience;
    int status = check_way(url, &http->here, error);
    if (status != 0) return status;
    http->curl = curl_easy_init();
    status = http->curl == NULL ? no_memory(error) : keep(&http->url, url, bytes, error);
    if (status == 0 && certificate != NULL) status = keep(&http->certificate, certificate, strlen(certificate), error);
    return status;
}

void live_http_close(struct http *http) {
    if (http == NULL) return;
    curl_easy_cleanup(http->curl);
    free(http->url);
    free(http->certificate);
    free(http);
}

/* ---- one attempt */

struct received {
    char *bytes;
    size_t used, room, most;
    bool too_long;
};

static size_t receive(char *from, size_t size, size_t count, void *to) {
    struct received *found = to;
    size_t bytes = size * count;
    if (bytes > found->most - found->used) {
        found->too_long = true;
        return 0;
    }
    if (bytes > found->room - found->used) {
        size_t room = found->used + bytes > found->room * 2 ? found->used + bytes : found->room * 2;
        char *more = realloc(found->bytes, room + 1);
        if (more == NULL) return 0;
        found->bytes = more;
        found->room = room;
    }
    memcpy(found->bytes + found->used, from, bytes);
    found->used += bytes;
    return bytes;
}

static bool add_header(struct curl_slist **list, const char *name, const char *value) {
    char line[160];
    snprintf(line, sizeof line, "%s: %s", name, value);
    struct curl_slist *longer = curl_slist_append(*list, line);
    if (longer != NULL) *list = longer;
    return longer != NULL;
}

static int headers_of(const struct signer *signer, const struct request *request, struct curl_slist **list, char *error) {
    struct stamp stamp;
    char number[24];
    bool added = add_header(list, "Content-Type", "application/octet-stream") && add_header(list, "Expect", "");
    if (signer != NULL && added) {
        int status = live_stamp(signer, request->method, request->target, request->body, request->bytes, &stamp, error);
        if (status != 0) return status;
        snprintf(number, sizeof number, "%lld", (long long)signer->client);
        added = add_header(list, "Tfpfl-Client", number) && add_header(list, "Tfpfl-Time", stamp.time) &&
                add_header(list, "Tfpfl-Nonce", stamp.nonce) && add_header(list, "Tfpfl-Signature", stamp.signature) &&
                add_header(list, "Tfpfl-Body", stamp.body);
    }
    return added ? 0 : no_memory(error);
}

/* What would fail at the next attempt as well. A certificate may be trusted then: if the device's clock is still to be
 * set, or if the server has answered before, and a network shows its own page in its place for a while. */
static bool is_final(const struct http *http, CURLcode code) {
    long why = 0;
    if (code == CURLE_PEER_FAILED_VERIFICATION) {
        curl_easy_getinfo(http->curl, CURLINFO_SSL_VERIFYRESULT, &why);
        return !http->reached && why != NOT_YET_VALID && why != EXPIRED;
    }
    return code == CURLE_URL_MALFORMAT || code == CURLE_UNSUPPORTED_PROTOCOL || code == CURLE_OUT_OF_MEMORY ||
           code == CURLE_SSL_CACERT_BADFILE || code == CURLE_NOT_BUILT_IN;
}

static void set_options(struct http *http, const char *url, const struct request *request, struct curl_slist *headers,
                        struct received *found, char *why) {
    CURL *curl = http->curl;
    curl_easy_reset(curl);  /* keeps the connection */
    curl_easy_setopt(curl, CURLOPT_URL, url);
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, why);
    curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT, SILENT);
    curl_easy_setopt(curl, CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl_easy_setopt(curl, CURLOPT_LOW_SPEED_TIME, SILENT);
    curl_easy_setopt(curl, CURLOPT_ACCEPT_ENCODING, "");  /* all that this libcurl can read */
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, receive);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, found);
    if (http->here) curl_easy_setopt(curl, CURLOPT_PROXY, "");  /* a proxy is elsewhere, and would get the token */
    if (http->certificate != NULL) {
        curl_easy_setopt(curl, CURLOPT_CAINFO, http->certificate);
        curl_easy_setopt(curl, CURLOPT_CAPATH, NULL);  /* else those in the system's folder could sign, too */
    }
    if (request->body != NULL) {
        curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)request->bytes);
        curl_easy_setopt(curl, CURLOPT_POSTFIELDS, request->body);
    }
    curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, request->method);
}

/* Sends and receives. libcurl before 7.87 lets OpenSSL write to a connection that the server has closed, and the signal
 * for that would end the app. It comes to the thread that writes: this one holds it back, and takes it away. */
static CURLcode perform(CURL *curl) {
    sigset_t closed, before, waiting;
    int taken;
    sigemptyset(&closed);
    sigaddset(&closed, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &closed, &before);
    sigpending(&waiting);
    bool waited = sigismember(&waiting, SIGPIPE);
    CURLcode code = curl_easy_perform(curl);
    sigpending(&waiting);
    if (!waited && sigismember(&waiting, SIGPIPE)) sigwait(&closed, &taken);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return code;
}

/* again: there was no answer, and `error` says why. */
static int once(struct http *http, const struct signer *signer, const struct request *request, struct answer *answer,
                bool *again, char *error) {
    struct received found = {.most = request->most > 65536 ? request->most : 65536};
    struct curl_slist *headers = NULL;
    char why[CURL_ERROR_SIZE] = "", *url = NULL;
    size_t room = strlen(http->url) + strlen(request->target) + 1;
    *again = false;
    int status = headers_of(signer, request, &headers, error);
    if (status == 0 && ((url = take(room, 1)) == NULL || (found.bytes = take(0, 1)) == NULL)) status = no_memory(error);
    if (status == 0) {
        snprintf(url, room, "%s%s", http->url, request->target);
        set_options(http, url, request, headers, &found, why);
        CURLcode code = perform(http->curl);
        curl_easy_getinfo(http->curl, CURLINFO_RESPONSE_CODE, &answer->status);
        answer->body = found.bytes;
        answer->bytes = found.used;
        found.bytes = NULL;
        if (found.too_long) {
            status = fail(error, TFPFL_SERVER_ERROR, "the server's answer to %s %s has more than %zu bytes",
                          request->method, request->target, found.most);
        } else if (code != CURLE_OK) {
            *again = !is_final(http, code);
            status = fail(error, TFPFL_SERVER_ERROR, "%s does not answer: %s", http->url,
                          why[0] != 0 ? why : curl_easy_strerror(code));
        } else if (answer->status >= 500 || answer->status == 408 || answer->status == 429) {
            char reason[REASON_ROOM];
            live_reason(answer, reason);
            *again = true;
            status = fail(error, TFPFL_SERVER_ERROR, "%s does not answer: status %ld: %s", http->url, answer->status,
                          reason);
        }
    }
    if (status != 0) {
        free(answer->body);
        answer->body = NULL;
    }
    free(found.bytes);
    free(url);
    curl_slist_free_all(headers);
    return status;
}

/* ---- until there is an answer */

int live_ask(struct http *http, const struct signer *signer, const struct request *request, struct answer *answer,
             char *error) {
    double until = 0, pause = 0.2;
    for (bool away = false;; away = true) {
        bool again;
        memset(answer, 0, sizeof *answer);
        int status = once(http, signer, request, answer, &again, error);
        http->reached = http->reached || status == 0;
        if (!again) return status;
        if (!away) until = live_now() + http->patience;  /* before that the server was there, as in a long download */
        if (live_now() + pause > until) return status;
        live_pause(pause * (0.5 + 0.5 * live_drawn()));  /* not all devices at once */
        pause = 2 * pause < LONGEST_PAUSE ? 2 * pause : LONGEST_PAUSE;
    }
}

/* ---- answers */

/* One line of UTF-8, whatever came: `text` is from JSON, where half of a surrogate pair may stand by itself, or cut. */
static void make_plain(char *text, bool from_json) {
    size_t used = strlen(text), last = used;
    for (size_t i = 0; i < used; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c < 0x20 || c == 0x7F) text[i] = ' ';
        else if (c >= 0x80 && (!from_json || (c == 0xED && (unsigned char)text[i + 1] >= 0xA0))) text[i] = '?';
        else if ((c & 0xC0) == 0x80 && i > 0 && text[i - 1] == '?') text[i] = '?';
        if (((unsigned char)text[i] & 0xC0) != 0x80) last = i;
    }
    unsigned char first = (unsigned char)text[last];
    size_t needed = first < 0xC0 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    if (last + needed > used) text[last] = 0;
}

/* Whether an answer is JSON, which is then to be freed; the answer stays as it is. */
static bool read_json(const struct answer *answer, struct json *json) {
    char why[TFPFL_ERROR_ROOM], *copy = take(answer->bytes, 1);
    if (copy == NULL) return false;
    memcpy(copy, answer->body, answer->bytes);
    return json_read(json, copy, answer->bytes, why) == 0;
}

bool live_time(const struct answer *answer, double *time) {
    struct json json;
    if (!read_json(answer, &json)) return false;
    bool found = live_rate_entry(&json, 1, "time", time) && *time < 1e15;
    json_free(&json);
    return found;
}

void live_reason(const struct answer *answer, char out[REASON_ROOM]) {
    struct json json;
    size_t bytes = answer->bytes < 200 ? answer->bytes : 200;
    memcpy(out, answer->body, bytes);
    out[bytes] = 0;
    bool found = false;
    if (read_json(answer, &json)) {
        uint32_t node = json_member(&json, 1, "error");
        found = node != 0 && json.nodes[node].kind == JSON_TEXT;
        if (found) json_copy_text(&json, node, out, REASON_ROOM);
        json_free(&json);
    }
    make_plain(out, found);
}

int live_good(const struct answer *answer, char *error) {
    char reason[REASON_ROOM];
    if (answer->status == 200) return 0;
    live_reason(answer, reason);
    return fail(error, TFPFL_SERVER_ERROR, "the server refused (%ld): %s", answer->status, reason);
}

int live_json(struct answer *answer, struct json *json, char *error) {
    char why[TFPFL_ERROR_ROOM];
    int status = live_good(answer, error);
    memset(json, 0, sizeof *json);
    if (status != 0) return status;
    char *body = answer->body;
    answer->body = NULL;
    status = json_read(json, body, answer->bytes, why);
    if (status == TFPFL_SYSTEM_ERROR) return fail(error, status, "%s", why);
    if (status != 0) return fail(error, TFPFL_SERVER_ERROR, "the server's answer is not JSON: %s", why);
    if (json->nodes[1].kind == JSON_OBJECT) return 0;
    json_free(json);
    return fail(error, TFPFL_SERVER_ERROR, "the server's answer must be a JSON object");
}
