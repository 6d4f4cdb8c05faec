/* The functions of kotlin/tfpfl/Client.kt: each calls one function of the core. A failure becomes a TfpflException. */
#include <jni.h>
#include <stdlib.h>
#include <string.h>

#include "tfpfl_device.h"

#define NAMED(result, name) JNIEXPORT result JNICALL Java_tfpfl_Native_##name
#define CLIENT(handle) ((tfpfl_client *)(intptr_t)(handle))

/* ---- errors */

/* The JVM's own text from UTF-8; what is none becomes U+FFFD. */
static jstring text_of(JNIEnv *env, const char *message) {
    jchar out[TFPFL_ERROR_ROOM];
    jsize used = 0;
    const unsigned char *s = (const unsigned char *)message;
    while (*s != 0 && used + 2 < TFPFL_ERROR_ROOM) {
        int more = *s < 0x80 ? 0 : (*s & 0xE0) == 0xC0 ? 1 : (*s & 0xF0) == 0xE0 ? 2 : (*s & 0xF8) == 0xF0 ? 3 : -1;
        uint32_t c = more < 0 ? 0xFFFD : more == 0 ? *s : *s & (0x3Fu >> more);
        s++;
        for (; more > 0; more--, s++) {
            if ((*s & 0xC0) != 0x80) {
                c = 0xFFFD;
                break;
            }
            c = c << 6 | (*s & 0x3F);
        }
        if (c >= 0x10000) {
            out[used++] = (jchar)(0xD800 + ((c - 0x10000) >> 10));
            out[used++] = (jchar)(0xDC00 + ((c - 0x10000) & 0x3FF));
        } else {
            out[used++] = (jchar)c;
        }
    }
    return (*env)->NewString(env, out, used);
}

static void raise(JNIEnv *env, int status, const char *message) {
    if ((*env)->ExceptionCheck(env)) return;  /* the JVM has its own, such as for lack of memory */
    jclass kind = (*env)->FindClass(env, "tfpfl/TfpflException");
    jmethodID make = kind == NULL ? NULL : (*env)->GetMethodID(env, kind, "<init>", "(ILjava/lang/String;)V");
    jstring text = make == NULL ? NULL : text_of(env, message);
    jobject error = text == NULL ? NULL : (*env)->NewObject(env, kind, make, (jint)status, text);
    if (error != NULL) (*env)->Throw(env, (jthrowable)error);
}

/* ---- arrays */

static char *copy_text(JNIEnv *env, jbyteArray bytes) {
    jsize length = bytes == NULL ? 0 : (*env)->GetArrayLength(env, bytes);
    char *text = bytes == NULL ? NULL : calloc((size_t)length + 1, 1);
    if (text != NULL) (*env)->GetByteArrayRegion(env, bytes, 0, length, (jbyte *)text);
    return text;
}

/* The arrays of Client.kt's Examples: any may be null. */
enum { X, TOKENS, LABELS, TARGETS, ARRAYS };
struct given {
    tfpfl_examples examples;
    jobject from[ARRAYS];
    void *to[ARRAYS];
};

static void give_back(JNIEnv *env, struct given *given) {
    for (int i = 0; i < ARRAYS; i++) {
        if (given->to[i] == NULL) continue;
        if (i == X || i == TARGETS) (*env)->ReleaseFloatArrayElements(env, given->from[i], given->to[i], JNI_ABORT);
        else (*env)->ReleaseIntArrayElements(env, given->from[i], given->to[i], JNI_ABORT);
    }
}

/* The number of examples is that of the labels, or of the rows of targets, or else `count`. Targets of another length than
 * the client would read are left out, and it says that there are none. 0: the JVM has no memory, and has said so. */
static int take_examples(JNIEnv *env, jlong handle, jobjectArray arrays, jint count, struct given *given) {
    size_t lengths[ARRAYS] = {0}, k = tfpfl_describe(CLIENT(handle))->num_classes, n = (size_t)count;
    int taken = 1;
    memset(given, 0, sizeof *given);
    for (int i = 0; i < ARRAYS && taken; i++) {  /* no function of the JVM after its exception */
        given->from[i] = (*env)->GetObjectArrayElement(env, arrays, i);
        if (given->from[i] == NULL) continue;
        lengths[i] = (size_t)(*env)->GetArrayLength(env, given->from[i]);
        given->to[i] = i == X || i == TARGETS ? (void *)(*env)->GetFloatArrayElements(env, given->from[i], NULL)
                                              : (void *)(*env)->GetIntArrayElements(env, given->from[i], NULL);
        taken = given->to[i] != NULL;
    }
    if (given->from[LABELS] != NULL) n = lengths[LABELS];
    else if (given->from[TARGETS] != NULL) n = lengths[TARGETS] / k;
    tfpfl_examples *examples = &given->examples;
    examples->x = given->from[TOKENS] == NULL ? given->to[X] : NULL;
    examples->tokens = given->to[TOKENS];
    examples->numbers = lengths[given->from[TOKENS] == NULL ? X : TOKENS];
    examples->labels = given->to[LABELS];
    examples->targets = lengths[TARGETS] % k == 0 && lengths[TARGETS] / k == n ? given->to[TARGETS] : NULL;
    examples->count = n;
    return taken;
}

static jfloatArray floats(JNIEnv *env, const float *values, size_t count) {
    jfloatArray out = (*env)->NewFloatArray(env, (jsize)count);
    if (out != NULL) (*env)->SetFloatArrayRegion(env, out, 0, (jsize)count, values);
    return out;
}

/* The arrays of a head were made by Client.kt with the lengths that the client's sizes give. */
static void put_head(JNIEnv *env, const tfpfl_head *head, jfloatArray kernel, jfloatArray bias, jbyteArray digest) {
    (*env)->SetFloatArrayRegion(env, kernel, 0, (jsize)(head->num_features * head->num_classes), head->kernel);
    (*env)->SetFloatArrayRegion(env, bias, 0, (jsize)head->num_classes, head->bias);
    (*env)->SetByteArrayRegion(env, digest, 0, 32, (const jbyte *)head->theta_sha256);
}

/* ---- the functions */

NAMED(jlong, open)(JNIEnv *env, jclass self, jbyteArray bundle, jbyteArray state, jbyteArray litert,
                  jbyteArray trunk) {
    (void)self;
    char *folder = copy_text(env, bundle), *file = copy_text(env, state), *library = copy_text(env, litert);
    char *below = copy_text(env, trunk);
    tfpfl_options options = {.state = file, .litert = library, .trunk = below};
    tfpfl_client *client = NULL;
    int status = folder == NULL ? TFPFL_SYSTEM_ERROR : tfpfl_open(folder, &options, &client);
    if (status != 0) {
        raise(env, status, tfpfl_error(client));
        tfpfl_close(client);
        client = NULL;
    }
    free(folder);
    free(file);
    free(library);
    free(below);
    return (jlong)(intptr_t)client;
}

NAMED(void, close)(JNIEnv *env, jclass self, jlong handle) {
    (void)env, (void)self;
    tfpfl_close(CLIENT(handle));
}

NAMED(jlongArray, sizes)(JNIEnv *env, jclass self, jlong handle) {
    (void)self;
    const tfpfl_model *model = tfpfl_describe(CLIENT(handle));
    jlong all[8 + TFPFL_MOST_DIMENSIONS] = {(jlong)model->num_features, (jlong)model->num_classes,
                                            (jlong)model->num_backbone_weights, (jlong)model->batch, model->tau,
                                            model->rounds, model->whole_numbers, model->num_tokens};
    for (size_t i = 0; i < model->dimensions; i++) all[8 + i] = model->example_shape[i];
    jsize count = (jsize)(8 + model->dimensions);
    jlongArray out = (*env)->NewLongArray(env, count);
    if (out != NULL) (*env)->SetLongArrayRegion(env, out, 0, count, all);
    return out;
}

NAMED(jfloatArray, theta)(JNIEnv *env, jclass self, jlong handle) {
    (void)self;
    return floats(env, tfpfl_theta(CLIENT(handle)), tfpfl_describe(CLIENT(handle))->num_backbone_weights);
}

NAMED(void, head)(JNIEnv *env, jclass self, jlong handle, jfloatArray kernel, jfloatArray bias, jbyteArray digest) {
    (void)self;
    put_head(env, tfpfl_current_head(CLIENT(handle)), kernel, bias, digest);
}

NAMED(jboolean, isStale)(JNIEnv *env, jclass self, jlong handle) {
    (void)env, (void)self;
    return tfpfl_head_is_stale(CLIENT(handle)) ? JNI_TRUE : JNI_FALSE;
}

NAMED(void, receive)(JNIEnv *env, jclass self, jlong handle, jfloatArray theta) {
    (void)self;
    jfloat *values = (*env)->GetFloatArrayElements(env, theta, NULL);
    if (values == NULL) return;
    int status = tfpfl_receive(CLIENT(handle), values, (size_t)(*env)->GetArrayLength(env, theta));
    (*env)->ReleaseFloatArrayElements(env, theta, values, JNI_ABORT);
    if (status != 0) raise(env, status, tfpfl_error(CLIENT(handle)));
}

NAMED(jbyteArray, names)(JNIEnv *env, jclass self, jlong handle) {
    (void)self;
    const tfpfl_head *head = tfpfl_current_head(CLIENT(handle));
    jbyteArray out = head->names == NULL || head->names_bytes > INT32_MAX
                         ? NULL : (*env)->NewByteArray(env, (jsize)head->names_bytes);
    if (out != NULL) (*env)->SetByteArrayRegion(env, out, 0, (jsize)head->names_bytes, (const jbyte *)head->names);
    return out;
}

NAMED(jstring, kind)(JNIEnv *env, jclass self, jlong handle) {
    (void)self;
    return (*env)->NewStringUTF(env, tfpfl_describe(CLIENT(handle))->kind);
}

/* `commit`: the head is that of a round, and its classes must have the names that they have now. */
NAMED(void, startFrom)(JNIEnv *env, jclass self, jlong handle, jfloatArray kernel, jfloatArray bias, jbyteArray digest,
                       jbyteArray names, jboolean commit) {
    (void)self;
    jfloat *k = (*env)->GetFloatArrayElements(env, kernel, NULL);
    jfloat *b = k == NULL ? NULL : (*env)->GetFloatArrayElements(env, bias, NULL);
    if (b == NULL) {
        if (k != NULL) (*env)->ReleaseFloatArrayElements(env, kernel, k, JNI_ABORT);
        return;
    }
    size_t classes = (size_t)(*env)->GetArrayLength(env, bias), numbers = (size_t)(*env)->GetArrayLength(env, kernel);
    tfpfl_update update = {
        .head = {classes == 0 || numbers % classes != 0 ? 0 : numbers / classes, classes, k, b, {0}, NULL, 0}};
    (*env)->GetByteArrayRegion(env, digest, 0, 32, (jbyte *)update.head.theta_sha256);
    int status = 0;
    if (names != NULL) {
        update.head.names = copy_text(env, names);
        update.head.names_bytes = (size_t)(*env)->GetArrayLength(env, names);
    }
    if (names != NULL && update.head.names == NULL) raise(env, TFPFL_SYSTEM_ERROR, tfpfl_error(NULL));
    else status = commit ? tfpfl_commit(CLIENT(handle), &update) : tfpfl_start_from(CLIENT(handle), &update.head);
    free(update.head.names);
    (*env)->ReleaseFloatArrayElements(env, kernel, k, JNI_ABORT);
    (*env)->ReleaseFloatArrayElements(env, bias, b, JNI_ABORT);
    if (status != 0) raise(env, status, tfpfl_error(CLIENT(handle)));
}

/* each: numbers of one example. Where there are not `count` times as many, the core refuses, and writes nothing. */
static jfloatArray rows(JNIEnv *env, jlong handle, jobjectArray arrays, jint count, size_t each, size_t columns,
                        int (*compute)(tfpfl_client *, const tfpfl_examples *, float *)) {
    struct given given;
    jfloatArray out = NULL;
    int status = TFPFL_SYSTEM_ERROR, taken = take_examples(env, handle, arrays, count < 0 ? 0 : count, &given);
    size_t given_numbers = given.examples.numbers, n = count < 0 ? 0 : (size_t)count;
    size_t rows_out = count >= 0 && given_numbers % each == 0 && given_numbers / each == n ? n : 0;
    int fits = columns == 0 || rows_out <= INT32_MAX / columns;  /* in a Java array */
    float *found = taken && fits ? calloc(rows_out * columns + 1, sizeof *found) : NULL;
    const char *why = "there is not enough memory";
    if (found != NULL) {
        status = compute(CLIENT(handle), &given.examples, found);
        if (status == 0) out = floats(env, found, rows_out * columns);
        else why = tfpfl_error(CLIENT(handle));
    }
    give_back(env, &given);
    free(found);
    if (status != 0) raise(env, status, why);
    return out;
}

NAMED(jfloatArray, features)(JNIEnv *env, jclass self, jlong handle, jobjectArray arrays, jint count) {
    (void)self;
    const tfpfl_model *model = tfpfl_describe(CLIENT(handle));
    return rows(env, handle, arrays, count, model->example_numbers, model->num_features, tfpfl_features);
}

NAMED(jfloatArray, predict)(JNIEnv *env, jclass self, jlong handle, jobjectArray arrays, jint count) {
    (void)self;
    const tfpfl_model *model = tfpfl_describe(CLIENT(handle));
    return rows(env, handle, arrays, count, model->example_numbers, model->num_classes, tfpfl_predict);
}

static int examples_of(tfpfl_client *client, const tfpfl_examples *raw, float *x) {
    return tfpfl_examples_of(client, raw->x, raw->numbers, raw->count, x);
}

NAMED(jfloatArray, examplesOf)(JNIEnv *env, jclass self, jlong handle, jobjectArray arrays, jint count) {
    (void)self;
    const tfpfl_model *model = tfpfl_describe(CLIENT(handle));
    return rows(env, handle, arrays, count, model->raw_numbers, model->example_numbers, examples_of);
}

static jdoubleArray doubles(JNIEnv *env, const double *values, jsize count) {
    jdoubleArray out = (*env)->NewDoubleArray(env, count);
    if (out != NULL) (*env)->SetDoubleArrayRegion(env, out, 0, count, values);
    return out;
}

NAMED(jdoubleArray, score)(JNIEnv *env, jclass self, jlong handle, jobjectArray arrays) {
    (void)self;
    struct given given;
    tfpfl_scores found = {0};
    int status = 0, taken = take_examples(env, handle, arrays, 0, &given);
    if (taken) status = tfpfl_score(CLIENT(handle), &given.examples, &found);
    give_back(env, &given);
    if (!taken) return NULL;
    if (status != 0) return raise(env, status, tfpfl_error(CLIENT(handle))), NULL;
    return doubles(env, (double[]){found.loss, found.accuracy, found.value}, 3);
}

NAMED(jdoubleArray, personalize)(JNIEnv *env, jclass self, jlong handle, jobjectArray arrays, jboolean own_steps,
                                 jint steps, jboolean own_beta, jdouble beta, jdouble held_out, jboolean on_training,
                                 jobjectArray others) {
    (void)self;
    struct given given, other;
    tfpfl_personalized found;
    tfpfl_fit fit;
    int status = 0, taken = take_examples(env, handle, arrays, 0, &given);
    memset(&other, 0, sizeof other);
    tfpfl_default_fit(CLIENT(handle), &fit);
    if (own_steps) fit.steps = steps;
    if (own_beta) fit.beta = beta;
    fit.held_out = held_out;
    fit.on_training = on_training;
    if (taken && others != NULL) {
        taken = take_examples(env, handle, others, 0, &other);
        fit.other = &other.examples;
    }
    if (taken) status = tfpfl_personalize(CLIENT(handle), &given.examples, &fit, &found);
    give_back(env, &given);
    give_back(env, &other);
    if (!taken) return NULL;
    if (status != 0) return raise(env, status, tfpfl_error(CLIENT(handle))), NULL;
    const tfpfl_scores *before = &found.before, *after = &found.after;
    double all[] = {found.kept, before->loss, before->accuracy, before->value, after->loss, after->accuracy,
                    after->value, found.loss_before, found.loss};
    return doubles(env, all, 9);
}

NAMED(jbyteArray, round)(JNIEnv *env, jclass self, jlong handle, jfloatArray theta, jobjectArray arrays, jbyteArray kind,
                         jfloatArray kernel, jfloatArray bias, jbyteArray digest, jfloatArray loss) {
    (void)self;
    struct given given;
    tfpfl_update update;
    jbyteArray out = NULL;
    char *payload = copy_text(env, kind);
    jfloat *weights = (*env)->GetFloatArrayElements(env, theta, NULL);
    int status = 0, taken = weights != NULL && payload != NULL;
    memset(&given, 0, sizeof given);
    if (taken) taken = take_examples(env, handle, arrays, 0, &given);
    if (taken)
        status = tfpfl_round(CLIENT(handle), weights, (size_t)(*env)->GetArrayLength(env, theta), &given.examples,
                             payload, &update);
    if (weights != NULL) (*env)->ReleaseFloatArrayElements(env, theta, weights, JNI_ABORT);
    give_back(env, &given);
    free(payload);
    if (!taken) return raise(env, TFPFL_SYSTEM_ERROR, tfpfl_error(NULL)), NULL;
    if (status != 0) return raise(env, status, tfpfl_error(CLIENT(handle))), NULL;
    put_head(env, &update.head, kernel, bias, digest);
    (*env)->SetFloatArrayRegion(env, loss, 0, 1, &update.loss);
    if (update.payload_bytes <= INT32_MAX) out = (*env)->NewByteArray(env, (jsize)update.payload_bytes);
    if (out != NULL)
        (*env)->SetByteArrayRegion(env, out, 0, (jsize)update.payload_bytes, (const jbyte *)update.payload);
    tfpfl_update_free(&update);
    return out;
}
