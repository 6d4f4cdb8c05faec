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

struct given {
    tfpfl_examples examples;
    jfloat *x;
    jint *labels;
};

static int take_examples(JNIEnv *env, jfloatArray x, jintArray labels, jint count, struct given *given) {
    memset(given, 0, sizeof *given);
    given->x = (*env)->GetFloatArrayElements(env, x, NULL);
    given->labels = labels == NULL ? NULL : (*env)->GetIntArrayElements(env, labels, NULL);
    given->examples.x = given->x;
    given->examples.numbers = (size_t)(*env)->GetArrayLength(env, x);
    given->examples.labels = (const int32_t *)given->labels;
    given->examples.count = labels == NULL ? (size_t)count : (size_t)(*env)->GetArrayLength(env, labels);
    return given->x != NULL && (labels == NULL || given->labels != NULL);
}

static void give_back(JNIEnv *env, jfloatArray x, jintArray labels, struct given *given) {
    if (given->x != NULL) (*env)->ReleaseFloatArrayElements(env, x, given->x, JNI_ABORT);
    if (given->labels != NULL) (*env)->ReleaseIntArrayElements(env, labels, given->labels, JNI_ABORT);
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

NAMED(jlong, open)(JNIEnv *env, jclass self, jbyteArray bundle, jbyteArray state, jbyteArray litert) {
    (void)self;
    char *folder = copy_text(env, bundle), *file = copy_text(env, state), *library = copy_text(env, litert);
    tfpfl_options options = {file, library};
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
    return (jlong)(intptr_t)client;
}

NAMED(void, close)(JNIEnv *env, jclass self, jlong handle) {
    (void)env, (void)self;
    tfpfl_close(CLIENT(handle));
}

NAMED(jlongArray, sizes)(JNIEnv *env, jclass self, jlong handle) {
    (void)self;
    const tfpfl_model *model = tfpfl_describe(CLIENT(handle));
    jlong all[6 + TFPFL_MOST_DIMENSIONS] = {(jlong)model->num_features, (jlong)model->num_classes,
                                            (jlong)model->num_backbone_weights, (jlong)model->batch, model->tau,
                                            model->rounds};
    for (size_t i = 0; i < model->dimensions; i++) all[6 + i] = model->example_shape[i];
    jsize count = (jsize)(6 + model->dimensions);
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

NAMED(void, startFrom)(JNIEnv *env, jclass self, jlong handle, jfloatArray kernel, jfloatArray bias,
                       jbyteArray digest) {
    (void)self;
    if (tfpfl_current_head(CLIENT(handle))->names != NULL) {  /* they would be lost */
        raise(env, TFPFL_HEAD_ERROR, "this head has classes of its own, which can be replaced in C or Python only");
        return;
    }
    jfloat *k = (*env)->GetFloatArrayElements(env, kernel, NULL), *b = (*env)->GetFloatArrayElements(env, bias, NULL);
    size_t classes = (size_t)(*env)->GetArrayLength(env, bias), numbers = (size_t)(*env)->GetArrayLength(env, kernel);
    tfpfl_head head = {classes == 0 || numbers % classes != 0 ? 0 : numbers / classes, classes, k, b, {0}};
    (*env)->GetByteArrayRegion(env, digest, 0, 32, (jbyte *)head.theta_sha256);
    int status = 0;
    if (k != NULL && b != NULL && !(*env)->ExceptionCheck(env)) status = tfpfl_start_from(CLIENT(handle), &head);
    if (k != NULL) (*env)->ReleaseFloatArrayElements(env, kernel, k, JNI_ABORT);
    if (b != NULL) (*env)->ReleaseFloatArrayElements(env, bias, b, JNI_ABORT);
    if (status != 0) raise(env, status, tfpfl_error(CLIENT(handle)));
}

static jfloatArray rows(JNIEnv *env, jlong handle, jfloatArray x, jint count, size_t columns,
                        int (*compute)(tfpfl_client *, const tfpfl_examples *, float *)) {
    struct given given;
    jfloatArray out = NULL;
    size_t numbers = (size_t)count * columns;
    float *found = numbers > INT32_MAX ? NULL : malloc(4 * numbers + 4);
    int status = TFPFL_SYSTEM_ERROR;
    const char *why = "there is not enough memory";
    if (found != NULL && take_examples(env, x, NULL, count, &given)) {
        status = compute(CLIENT(handle), &given.examples, found);
        if (status == 0) out = floats(env, found, numbers);
        else why = tfpfl_error(CLIENT(handle));
    }
    if (found != NULL) give_back(env, x, NULL, &given);
    free(found);
    if (status != 0) raise(env, status, why);
    return out;
}

NAMED(jfloatArray, features)(JNIEnv *env, jclass self, jlong handle, jfloatArray x, jint count) {
    (void)self;
    return rows(env, handle, x, count, tfpfl_describe(CLIENT(handle))->num_features, tfpfl_features);
}

NAMED(jfloatArray, predict)(JNIEnv *env, jclass self, jlong handle, jfloatArray x, jint count) {
    (void)self;
    return rows(env, handle, x, count, tfpfl_describe(CLIENT(handle))->num_classes, tfpfl_predict);
}

static jdoubleArray doubles(JNIEnv *env, const double *values, jsize count) {
    jdoubleArray out = (*env)->NewDoubleArray(env, count);
    if (out != NULL) (*env)->SetDoubleArrayRegion(env, out, 0, count, values);
    return out;
}

NAMED(jdoubleArray, score)(JNIEnv *env, jclass self, jlong handle, jfloatArray x, jintArray labels) {
    (void)self;
    struct given given;
    tfpfl_scores found = {0};
    int status = take_examples(env, x, labels, 0, &given) ? tfpfl_score(CLIENT(handle), &given.examples, &found) : 0;
    give_back(env, x, labels, &given);
    if (status != 0) return raise(env, status, tfpfl_error(CLIENT(handle))), NULL;
    return doubles(env, (double[]){found.loss, found.accuracy}, 2);
}

NAMED(jdoubleArray, personalize)(JNIEnv *env, jclass self, jlong handle, jfloatArray x, jintArray labels, jint steps,
                                 jdouble beta, jdouble held_out, jboolean on_training, jfloatArray other_x,
                                 jintArray other_labels) {
    (void)self;
    struct given given, other = {{0}, NULL, NULL};
    tfpfl_personalized found;
    tfpfl_fit fit;
    int status = 0, taken = take_examples(env, x, labels, 0, &given);
    tfpfl_default_fit(CLIENT(handle), &fit);
    if (steps != INT32_MIN) fit.steps = steps;
    if (beta == beta) fit.beta = beta;
    fit.held_out = held_out;
    fit.on_training = on_training;
    if (taken && other_x != NULL) {
        taken = take_examples(env, other_x, other_labels, 0, &other);
        fit.other = &other.examples;
    }
    if (taken) status = tfpfl_personalize(CLIENT(handle), &given.examples, &fit, &found);
    give_back(env, x, labels, &given);
    give_back(env, other_x, other_labels, &other);
    if (!taken) return NULL;
    if (status != 0) return raise(env, status, tfpfl_error(CLIENT(handle))), NULL;
    double all[] = {found.kept, found.before.loss, found.before.accuracy, found.after.loss, found.after.accuracy,
                    found.loss_before, found.loss};
    return doubles(env, all, 7);
}

NAMED(jbyteArray, round)(JNIEnv *env, jclass self, jlong handle, jfloatArray theta, jfloatArray x, jintArray labels,
                         jbyteArray kind, jfloatArray kernel, jfloatArray bias, jbyteArray digest, jfloatArray loss) {
    (void)self;
    struct given given;
    tfpfl_update update;
    jbyteArray out = NULL;
    char *payload = copy_text(env, kind);
    jfloat *weights = (*env)->GetFloatArrayElements(env, theta, NULL);
    int status = 0, taken = take_examples(env, x, labels, 0, &given) && weights != NULL && payload != NULL;
    if (taken)
        status = tfpfl_round(CLIENT(handle), weights, (size_t)(*env)->GetArrayLength(env, theta), &given.examples,
                             payload, &update);
    if (weights != NULL) (*env)->ReleaseFloatArrayElements(env, theta, weights, JNI_ABORT);
    give_back(env, x, labels, &given);
    free(payload);
    if (!taken) return NULL;
    if (status != 0) return raise(env, status, tfpfl_error(CLIENT(handle))), NULL;
    put_head(env, &update.head, kernel, bias, digest);
    (*env)->SetFloatArrayRegion(env, loss, 0, 1, &update.loss);
    if (update.payload_bytes <= INT32_MAX) out = (*env)->NewByteArray(env, (jsize)update.payload_bytes);
    if (out != NULL)
        (*env)->SetByteArrayRegion(env, out, 0, (jsize)update.payload_bytes, (const jbyte *)update.payload);
    tfpfl_update_free(&update);
    return out;
}
