/* Encodes the gradient of theta, which a device sends: the format of tflite_export/device/payload.py.
 *
 *     4 bytes   "TFPG"
 *     uint32    kind: 0 float32, 1 int8
 *     uint32    P
 *     uint32    crc32 of what follows
 *     kind 0:   float32[P]
 *     kind 1:   float32[ceil(P / 1024)] scales, int8[P]; number j is int8[j] * scale[j // 1024]
 */
#include "core.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

#define HEADER 16
#define BLOCK 1024

static const char *const kinds[] = {"float32", "int8"};

static int kind_of(const char *name) {
    for (int i = 0; name != NULL && i < 2; i++)
        if (strcmp(name, kinds[i]) == 0) return i;
    return -1;
}

static uint64_t bytes_of(uint64_t count, int kind) {
    return HEADER + (kind == 0 ? 4 * count : count + 4 * ((count + BLOCK - 1) / BLOCK));
}

size_t tfpfl_payload_bytes(size_t count, const char *kind) {
    int number = kind_of(kind);
    if (number < 0 || (uint64_t)count > UINT32_MAX || bytes_of(count, number) > SIZE_MAX / 2) return 0;
    return (size_t)bytes_of(count, number);
}

static void encode_int8(const float *gradient, size_t count, unsigned char *scales, signed char *numbers) {
    for (size_t start = 0; start < count; start += BLOCK, scales += 4) {
        size_t end = start + BLOCK < count ? start + BLOCK : count;
        float largest = 0;
        for (size_t j = start; j < end; j++) largest = fabsf(gradient[j]) > largest ? fabsf(gradient[j]) : largest;
        float scale = largest / 127.0f;
        memcpy(scales, &scale, 4);
        /* A block whose scale is 0, or so small that it was rounded to 0, is sent as zeros. */
        for (size_t j = start; j < end; j++) {
            float value = scale > 0 ? rintf(gradient[j] / scale) : 0;
            numbers[j] = (signed char)(value > 127 ? 127 : value < -127 ? -127 : value);
        }
    }
}

int tfpfl_payload_encode(const float *gradient, size_t count, const char *name, unsigned char *payload, char *error) {
    int kind = kind_of(name);
    if (kind < 0)
        return fail(error, TFPFL_PAYLOAD_ERROR, "unknown payload '%.80s': one of float32, int8", name ? name : "");
    size_t bytes = tfpfl_payload_bytes(count, name);
    if (bytes == 0 || !all_finite(gradient, count))
        return fail(error, TFPFL_PAYLOAD_ERROR, "a gradient to be sent must be a finite vector");
    unsigned char *body = payload + HEADER;
    if (kind == 0) memcpy(body, gradient, 4 * count);
    else encode_int8(gradient, count, body, (signed char *)body + (bytes - HEADER - count));
    uint32_t numbers[3] = {(uint32_t)kind, (uint32_t)count, crc32_add(0, body, bytes - HEADER)};
    memcpy(payload, "TFPG", 4);
    memcpy(payload + 4, numbers, 12);
    return 0;
}

int tfpfl_payload_decode(const unsigned char *payload, size_t bytes, float *gradient, size_t count, char *error) {
    uint32_t numbers[3];
    if (bytes < HEADER || memcmp(payload, "TFPG", 4) != 0)
        return fail(error, TFPFL_PAYLOAD_ERROR, "these bytes are not a gradient of tfpfl");
    memcpy(numbers, payload + 4, 12);
    const unsigned char *body = payload + HEADER;
    if (numbers[0] > 1 || bytes != bytes_of(numbers[1], (int)numbers[0]) ||
        crc32_add(0, body, bytes - HEADER) != numbers[2])
        return fail(error, TFPFL_PAYLOAD_ERROR, "the gradient was cut off or changed on its way");
    if (numbers[1] != count)
        return fail(error, TFPFL_PAYLOAD_ERROR, "a gradient of %" PRIu32 " numbers came, but theta has %zu", numbers[1],
                    count);
    if (numbers[0] == 0) {
        memcpy(gradient, body, 4 * count);
        return 0;
    }
    const signed char *quantized = (const signed char *)payload + (bytes - count);
    for (size_t j = 0; j < count; j++) {
        float scale;
        memcpy(&scale, body + 4 * (j / BLOCK), 4);
        gradient[j] = (float)quantized[j] * scale;
    }
    return 0;
}
