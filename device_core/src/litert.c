/* Runs the signatures of a .tflite file through LiteRT's C API, which is loaded when a client is opened.
 *
 * The API's own headers are not needed: the handles are opaque, and the one structure (a tensor's type) is declared to
 * be stable. Since release 2.1.6 LiteRtCreateModelFromFile takes the environment as its first argument. The library
 * does not tell its version; LiteRtCreateModelFromFd came in the same release, and its presence decides.
 */
#include "core.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__APPLE__)
#define LIBRARY "libLiteRt.dylib"
#else
#define LIBRARY "libLiteRt.so"
#endif
#define MOST_SIGNATURES 64
#define MOST_TENSORS 64
#define MOST_LITERT_DIMENSIONS 8
#define CPU 1
enum lock { LOCK_READ = 0, LOCK_WRITE = 1 };

typedef void *handle;
typedef int (*create_model_of_environment)(handle environment, const char *path, handle *model);
typedef int (*create_model)(const char *path, handle *model);

struct tensor_type {
    int32_t element;
    uint32_t rank; /* in the low 7 bits */
    int32_t shape[MOST_LITERT_DIMENSIONS];
    uint32_t strides[MOST_LITERT_DIMENSIONS];
};

/* How an environment is made: with the accelerator for CPUs only (else LiteRT looks for the libraries of others), and
 * without news that are no errors. */
struct environment_option {
    int tag;
    struct {
        int type;
        union {
            int64_t integer;
            const void *pointer;
        } of;
    } value;
};
enum { ACCELERATORS = 24, LEAST_SEVERITY = 25, INTEGER = 2, ERRORS = 3 };

/* Name, and arguments. All return a status, 0 if it went well, except for those that destroy. */
#define FUNCTIONS(F) \
    F(int, CreateEnvironment, (int, const void *, handle *)) \
    F(void, DestroyEnvironment, (handle)) \
    F(void, DestroyModel, (handle)) \
    F(int, CreateOptions, (handle *)) \
    F(void, DestroyOptions, (handle)) \
    F(int, SetOptionsHardwareAccelerators, (handle, int)) \
    F(int, CreateCompiledModel, (handle, handle, handle, handle *)) \
    F(void, DestroyCompiledModel, (handle)) \
    F(int, GetNumModelSignatures, (handle, size_t *)) \
    F(int, GetModelSignature, (handle, size_t, handle *)) \
    F(int, GetSignatureKey, (handle, const char **)) \
    F(int, GetNumSignatureInputs, (handle, size_t *)) \
    F(int, GetNumSignatureOutputs, (handle, size_t *)) \
    F(int, GetSignatureInputName, (handle, size_t, const char **)) \
    F(int, GetSignatureOutputName, (handle, size_t, const char **)) \
    F(int, GetSignatureInputTensorByIndex, (handle, size_t, handle *)) \
    F(int, GetSignatureOutputTensorByIndex, (handle, size_t, handle *)) \
    F(int, GetRankedTensorType, (handle, struct tensor_type *)) \
    F(int, GetCompiledModelInputBufferRequirements, (handle, size_t, size_t, handle *)) \
    F(int, GetCompiledModelOutputBufferRequirements, (handle, size_t, size_t, handle *)) \
    F(int, CreateManagedTensorBufferFromRequirements, (handle, const struct tensor_type *, handle, handle *)) \
    F(void, DestroyTensorBuffer, (handle)) \
    F(int, GetTensorBufferPackedSize, (handle, size_t *)) \
    F(int, LockTensorBuffer, (handle, void **, int)) \
    F(int, UnlockTensorBuffer, (handle)) \
    F(int, RunCompiledModel, (handle, size_t, size_t, handle *, size_t, handle *))

struct api {
#define MEMBER(result, name, arguments) result(*name) arguments;
    FUNCTIONS(MEMBER)
#undef MEMBER
};

struct slot {
    const char *name;
    struct tensor_type type;
};

struct signature {
    const char *key;
    handle self;
    size_t index, num_inputs, num_outputs;
    struct slot *slots;  /* inputs, then outputs; NULL until the signature is run */
    handle *buffers;     /* in the same order; NULL until types and shapes were checked */
};

struct runtime {
    struct api api;
    void *library;
    handle environment, model, options, compiled;
    size_t num_signatures;
    struct signature *signatures;
    char *file;  /* the name of the program, for messages */
};

static int load_library(struct runtime *runtime, const char *path, char *error) {
    int mode = RTLD_NOW | RTLD_LOCAL;
#if defined(RTLD_NODELETE)
    mode |= RTLD_NODELETE;  /* it may have threads and thread-local data, which must outlive us */
#endif
    runtime->library = dlopen(path == NULL ? LIBRARY : path, mode);
    if (runtime->library == NULL)
        return fail(error, TFPFL_BUNDLE_ERROR,
                    "LiteRT cannot be loaded: %s. Install its library (in Python's wheel ai-edge-litert it is "
                    "ai_edge_litert/libLiteRt.so), and name its path in the option `litert`", dlerror());
    void *found;
    /* A pointer to a function may not be cast from one to data, but has the same bytes. */
#define FIND(result, name, arguments) \
    if ((found = dlsym(runtime->library, "LiteRt" #name)) == NULL) \
        return fail(error, TFPFL_BUNDLE_ERROR, "this LiteRT has no function LiteRt" #name ": 2.0 or newer is needed"); \
    memcpy(&runtime->api.name, &found, sizeof found);
    FUNCTIONS(FIND)
#undef FIND
    return 0;
}

/* The library has no function that says it. */
static const char *status_name(int status) {
    switch (status) {
    case 1: return "an invalid argument";
    case 2: return "not enough memory";
    case 5: return "not supported";
    case 6: return "not found";
    case 8: return "a wrong version";
    case 500: return "the file cannot be read";
    case 501: return "the file is no program";
    case 504: return "the program cannot be compiled";
    default: return "a failure of the runtime";
    }
}

static int cannot(const struct runtime *runtime, const char *what, const char *or_else, int status, char *error) {
    return fail(error, TFPFL_BUNDLE_ERROR, "LiteRT cannot %s of %s; it may be too old for it%s: %s (%d)", what,
                runtime->file, or_else, status_name(status), status);
}

static int cannot_run(const struct runtime *runtime, const char *key, const char *or_else, int status, char *error) {
    char what[80];
    snprintf(what, sizeof what, "run signature '%.40s'", key);
    return cannot(runtime, what, or_else, status, error);
}

static int create_model_from_file(struct runtime *runtime, const char *program) {
    void *found = dlsym(runtime->library, "LiteRtCreateModelFromFile");
    if (found == NULL) return 5;  /* unsupported */
    if (dlsym(runtime->library, "LiteRtCreateModelFromFd") != NULL) {
        create_model_of_environment create;
        memcpy(&create, &found, sizeof found);
        return create(runtime->environment, program, &runtime->model);
    }
    create_model create;
    memcpy(&create, &found, sizeof found);
    return create(program, &runtime->model);
}

static int load_program(struct runtime *runtime, const char *program, char *error) {
    const struct api *api = &runtime->api;
    const struct environment_option options[] = {{ACCELERATORS, {INTEGER, {CPU}}},
                                                  {LEAST_SEVERITY, {INTEGER, {ERRORS}}}};
    int status = api->CreateEnvironment(2, options, &runtime->environment);
    if (status == 0) status = create_model_from_file(runtime, program);
    if (status == 0) status = api->CreateOptions(&runtime->options);
    if (status == 0) status = api->SetOptionsHardwareAccelerators(runtime->options, CPU);
    if (status == 0)
        status = api->CreateCompiledModel(runtime->environment, runtime->model, runtime->options, &runtime->compiled);
    size_t count = 0;
    if (status == 0) status = api->GetNumModelSignatures(runtime->model, &count);
    if (status != 0)
        return fail(error, TFPFL_BUNDLE_ERROR, "LiteRT cannot open %s; it may be too old for it: %s (%d)", runtime->file,
                    status_name(status), status);
    if (count > MOST_SIGNATURES)
        return fail(error, TFPFL_BUNDLE_ERROR, "%s has %zu signatures, more than any of ours", runtime->file, count);
    runtime->signatures = calloc(count + 1, sizeof *runtime->signatures);
    if (runtime->signatures == NULL) return no_memory(error);
    for (size_t i = 0; i < count; i++, runtime->num_signatures++) {
        struct signature *s = &runtime->signatures[i];
        s->index = i;
        status = api->GetModelSignature(runtime->model, i, &s->self);
        if (status == 0) status = api->GetSignatureKey(s->self, &s->key);
        if (status != 0) return cannot(runtime, "read the signatures", "", status, error);
    }
    return 0;
}

int runtime_open(struct runtime **out, const char *library, const char *program, char *error) {
    struct runtime *runtime = *out = calloc(1, sizeof *runtime);
    const char *slash = strrchr(program, '/'), *name = slash == NULL ? program : slash + 1;
    if (runtime == NULL || (runtime->file = take(strlen(name) + 1, 1)) == NULL) return no_memory(error);
    strcpy(runtime->file, name);
    int status = load_library(runtime, library, error);
    return status == 0 ? load_program(runtime, program, error) : status;
}

static void free_slots(struct runtime *runtime, struct signature *s) {
    for (size_t i = 0; s->buffers != NULL && i < s->num_inputs + s->num_outputs; i++)
        if (s->buffers[i] != NULL) runtime->api.DestroyTensorBuffer(s->buffers[i]);
    free(s->buffers);
    free(s->slots);
    s->buffers = NULL;
    s->slots = NULL;
}

void runtime_close(struct runtime *runtime) {
    if (runtime == NULL) return;
    for (size_t i = 0; i < runtime->num_signatures; i++) free_slots(runtime, &runtime->signatures[i]);
    if (runtime->compiled != NULL) runtime->api.DestroyCompiledModel(runtime->compiled);
    if (runtime->options != NULL) runtime->api.DestroyOptions(runtime->options);
    if (runtime->model != NULL) runtime->api.DestroyModel(runtime->model);
    if (runtime->environment != NULL) runtime->api.DestroyEnvironment(runtime->environment);
    if (runtime->library != NULL) dlclose(runtime->library);
    free(runtime->signatures);
    free(runtime->file);
    free(runtime);
}

static struct signature *find_signature(const struct runtime *runtime, const char *key) {
    for (size_t i = 0; i < runtime->num_signatures; i++)
        if (strcmp(runtime->signatures[i].key, key) == 0) return &runtime->signatures[i];
    return NULL;
}

bool runtime_can(const struct runtime *runtime, const char *signature) {
    return find_signature(runtime, signature) != NULL;
}

static int describe_slot(const struct api *api, const struct signature *s, size_t i) {
    bool input = i < s->num_inputs;
    size_t index = input ? i : i - s->num_inputs;
    struct slot *slot = &s->slots[i];
    handle tensor;
    int status = input ? api->GetSignatureInputName(s->self, index, &slot->name)
                       : api->GetSignatureOutputName(s->self, index, &slot->name);
    if (status == 0)
        status = input ? api->GetSignatureInputTensorByIndex(s->self, index, &tensor)
                       : api->GetSignatureOutputTensorByIndex(s->self, index, &tensor);
    return status == 0 ? api->GetRankedTensorType(tensor, &slot->type) : status;
}

/* Learns names and types of inputs and outputs when a signature is run for the first time. */
static int describe(struct runtime *runtime, struct signature *s, char *error) {
    const struct api *api = &runtime->api;
    if (s->slots != NULL) return 0;
    int status = api->GetNumSignatureInputs(s->self, &s->num_inputs);
    if (status == 0) status = api->GetNumSignatureOutputs(s->self, &s->num_outputs);
    if (status != 0) return cannot_run(runtime, s->key, "", status, error);
    if (s->num_inputs > MOST_TENSORS || s->num_outputs > MOST_TENSORS)
        return fail(error, TFPFL_BUNDLE_ERROR, "signature '%.40s' of %s has more inputs or outputs than any of ours",
                    s->key, runtime->file);
    size_t count = s->num_inputs + s->num_outputs;
    s->slots = calloc(count + 1, sizeof *s->slots);
    s->buffers = calloc(count + 1, sizeof *s->buffers);
    bool taken = s->slots != NULL && s->buffers != NULL;
    for (size_t i = 0; taken && i < count && status == 0; i++) status = describe_slot(api, s, i);
    if (taken && status == 0) return 0;
    free_slots(runtime, s);
    return taken ? cannot_run(runtime, s->key, "", status, error) : no_memory(error);
}

/* Makes the buffers, of types that were checked. */
static int make_buffers(struct runtime *runtime, struct signature *s) {
    const struct api *api = &runtime->api;
    int status = 0;
    for (size_t i = 0; i < s->num_inputs + s->num_outputs && status == 0; i++) {
        handle requirements;
        if (s->buffers[i] != NULL) continue;
        status = i < s->num_inputs
                     ? api->GetCompiledModelInputBufferRequirements(runtime->compiled, s->index, i, &requirements)
                     : api->GetCompiledModelOutputBufferRequirements(runtime->compiled, s->index, i - s->num_inputs,
                                                                     &requirements);
        if (status == 0)
            status = api->CreateManagedTensorBufferFromRequirements(runtime->environment, &s->slots[i].type,
                                                                    requirements, &s->buffers[i]);
    }
    return status;
}

static size_t bytes_of(const struct tensor *tensor, bool whole) {
    size_t bytes = 4;
    for (size_t i = 0; i < tensor->dimensions; i++) bytes *= i == 0 && !whole ? tensor->rows : tensor->shape[i];
    return bytes;
}

static const char *type_name(int32_t element) {
    return element == FLOAT32 ? "float32" : element == INT32 ? "int32" : "another type";
}

/* The program may come from a stranger: nothing is copied unless type and shape are those of our array. */
static int check_slot(const struct runtime *runtime, const struct signature *s, const struct slot *slot,
                      const struct tensor *tensor, char *error) {
    size_t rank = slot->type.rank & 127;
    bool fits = slot->type.element == (int32_t)tensor->type && rank == tensor->dimensions;
    for (size_t i = 0; fits && i < rank; i++) fits = (int64_t)slot->type.shape[i] == (int64_t)tensor->shape[i];
    if (fits) return 0;
    char wanted[160], found[160];
    uint32_t shape[MOST_LITERT_DIMENSIONS];
    if (rank > MOST_LITERT_DIMENSIONS) rank = MOST_LITERT_DIMENSIONS;
    for (size_t i = 0; i < rank; i++) shape[i] = (uint32_t)slot->type.shape[i];
    write_shape(wanted, sizeof wanted, "", shape, rank);
    write_shape(found, sizeof found, "", tensor->shape, tensor->dimensions);
    return fail(error, TFPFL_BUNDLE_ERROR, "signature '%s' of %s: %s must be %s %s; found %s %s", s->key, runtime->file,
                slot->name, type_name(slot->type.element), wanted, type_name((int32_t)tensor->type), found);
}

static int by_text(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

static void list_names(char out[500], const char **names, size_t count) {
    size_t used = 0;
    qsort(names, count, sizeof *names, by_text);
    out[0] = 0;
    for (size_t i = 0; i < count && used < 400; i++)
        used += (size_t)snprintf(out + used, 500 - used, "%s%.60s", i > 0 ? ", " : "", names[i]);
}

static int other_names(const struct runtime *runtime, const struct signature *s, bool inputs,
                       const struct tensor *tensors, size_t count, char *error) {
    const char *names[MOST_TENSORS];
    char wanted[500], found[500];
    size_t first = inputs ? 0 : s->num_inputs, slots = inputs ? s->num_inputs : s->num_outputs;
    for (size_t i = 0; i < slots; i++) names[i] = s->slots[first + i].name;
    list_names(wanted, names, slots);
    for (size_t i = 0; i < count; i++) names[i] = tensors[i].name;
    list_names(found, names, count);
    return fail(error, TFPFL_BUNDLE_ERROR, inputs ? "signature '%s' of %s takes %s; found %s"
                                                  : "signature '%s' of %s gives %s; needed are %s",
                s->key, runtime->file, wanted, *found ? found : "none");
}

static const struct tensor *find_tensor(const struct tensor *tensors, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(tensors[i].name, name) == 0) return &tensors[i];
    return NULL;
}

static int check_slots(const struct runtime *runtime, const struct signature *s, const struct tensor *inputs,
                       size_t num_inputs, const struct tensor *outputs, size_t num_outputs, char *error) {
    size_t found = 0;
    int status = 0;
    if (num_inputs != s->num_inputs) return other_names(runtime, s, true, inputs, num_inputs, error);
    for (size_t i = 0; i < s->num_inputs + s->num_outputs && status == 0; i++) {
        bool input = i < s->num_inputs;
        const struct tensor *tensor = input ? find_tensor(inputs, num_inputs, s->slots[i].name)
                                            : find_tensor(outputs, num_outputs, s->slots[i].name);
        if (input && tensor == NULL) return other_names(runtime, s, true, inputs, num_inputs, error);
        if (tensor == NULL) continue;
        found += !input;
        status = check_slot(runtime, s, &s->slots[i], tensor, error);
    }
    return status == 0 && found != num_outputs ? other_names(runtime, s, false, outputs, num_outputs, error) : status;
}

/* Fills up with copies of the first example: of one of zeros some networks make NaN, and NaN times a weight of 0 is NaN.
 * What belongs to examples, such as their weights, gets zeros. */
static void fill_up(char *memory, const struct tensor *tensor, size_t bytes, size_t whole) {
    bool examples = strcmp(tensor->name, "x") == 0 || strcmp(tensor->name, "raw") == 0 || strcmp(tensor->name, "phi") == 0;
    size_t row = examples && tensor->rows > 0 ? bytes / tensor->rows : 0;
    if (row == 0) memset(memory + bytes, 0, whole - bytes);
    else for (size_t at = bytes; at < whole; at += row) memcpy(memory + at, memory, row);
}

/* Copies an array into its buffer, or out of it. Returns LiteRT's status; 3 (a failure) if the buffer is too small. */
static int copy(const struct runtime *runtime, handle buffer, const struct tensor *tensor, bool input) {
    const struct api *api = &runtime->api;
    size_t room = 0, bytes = bytes_of(tensor, false), whole = bytes_of(tensor, true);
    void *memory;
    int status = api->GetTensorBufferPackedSize(buffer, &room);
    if (status == 0 && room < whole) status = 3;
    if (status == 0) status = api->LockTensorBuffer(buffer, &memory, input ? LOCK_WRITE : LOCK_READ);
    if (status != 0) return status;
    if (input) {
        memcpy(memory, tensor->in, bytes);
        fill_up(memory, tensor, bytes, whole);
    } else {
        memcpy(tensor->out, memory, bytes);
    }
    return api->UnlockTensorBuffer(buffer);
}

int runtime_run(struct runtime *runtime, const char *key, const struct tensor *inputs, size_t num_inputs,
                const struct tensor *outputs, size_t num_outputs, char *error) {
    struct signature *s = find_signature(runtime, key);
    if (s == NULL) {
        const char *names[MOST_SIGNATURES];
        char found[500];
        for (size_t i = 0; i < runtime->num_signatures; i++) names[i] = runtime->signatures[i].key;
        list_names(found, names, runtime->num_signatures);
        return fail(error, TFPFL_BUNDLE_ERROR, "%s has no signature '%s'; it has %s", runtime->file, key, found);
    }
    int status = describe(runtime, s, error);
    if (status == 0) status = check_slots(runtime, s, inputs, num_inputs, outputs, num_outputs, error);
    if (status != 0) return status;
    status = make_buffers(runtime, s);
    for (size_t i = 0; i < s->num_inputs && status == 0; i++)
        status = copy(runtime, s->buffers[i], find_tensor(inputs, num_inputs, s->slots[i].name), true);
    if (status == 0)
        status = runtime->api.RunCompiledModel(runtime->compiled, s->index, s->num_inputs, s->buffers, s->num_outputs,
                                               s->buffers + s->num_inputs);
    for (size_t i = s->num_inputs; i < s->num_inputs + s->num_outputs && status == 0; i++) {
        const struct tensor *tensor = find_tensor(outputs, num_outputs, s->slots[i].name);
        if (tensor != NULL) status = copy(runtime, s->buffers[i], tensor, false);
    }
    return status == 0 ? 0 : cannot_run(runtime, key, ", or an input is out of range", status, error);
}
