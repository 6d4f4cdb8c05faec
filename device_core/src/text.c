/* Messages, and numbers as text: the same as in Python, whatever the locale of the app is. */
#include "core.h"

#include <errno.h>
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *tfpfl_version(void) { return TFPFL_VERSION; }

int fail(char *error, int status, const char *format, ...) {
    va_list values;
    va_start(values, format);
    int needed = vsnprintf(error, TFPFL_ERROR_ROOM, format, values);
    va_end(values);
    if (needed < 0) error[0] = 0;
    if (needed >= TFPFL_ERROR_ROOM) {  /* cut before a character that would not be whole */
        size_t end = TFPFL_ERROR_ROOM - 4;
        while (end > 0 && ((unsigned char)error[end] & 0xC0) == 0x80) end--;
        strcpy(error + end, "...");
    }
    return status;
}

int no_memory(char *error) {
    return fail(error, TFPFL_SYSTEM_ERROR, "there is not enough memory");
}

int system_error(char *error, const char *path) {
    int number = errno;
    return fail(error, TFPFL_SYSTEM_ERROR, "[Errno %d] %s: '%s'", number, strerror(number), path);
}

void *take(size_t count, size_t size) {
    if (size != 0 && count > SIZE_MAX / 2 / size) return NULL;
    return malloc(count * size + 1);  /* no request for 0 bytes, which may give NULL */
}

double read_double(const char *text, size_t size) {
    char small[64], *copy = size + 8 < sizeof small ? small : malloc(size + 8);
    if (copy == NULL) return NAN;
    const char *point = localeconv()->decimal_point, *dot = memchr(text, '.', size);
    if (dot == NULL || strlen(point) > 7) {
        memcpy(copy, text, size);
        copy[size] = 0;
    } else {
        size_t before = (size_t)(dot - text), length = strlen(point);
        memcpy(copy, text, before);
        memcpy(copy + before, point, length);
        memcpy(copy + before + length, dot + 1, size - before - 1);
        copy[size - 1 + length] = 0;
    }
    double value = strtod(copy, NULL);
    if (copy != small) free(copy);
    return value;
}

/* Decimal digits of a positive number and its exponent: the fewest digits that are read back as the same number. */
static int shortest(double value, char digits[20]) {
    char text[48];
    int exponent = 0;
    for (int length = 1; length <= 17; length++) {
        snprintf(text, sizeof text, "%.*e", length - 1, value);
        const char *e = strchr(text, 'e');
        exponent = atoi(e + 1);
        int used = 0;
        for (const char *c = text; c < e && used < 17; c++)
            if (*c >= '0' && *c <= '9') digits[used++] = *c;
        digits[used] = 0;
        /* The nearest decimal is tried first. Beside a power of two, the intervals on both sides differ, and only the
         * one above may be within its interval. */
        for (int above = 0; above < 2; above++) {
            char tried[20], whole[48];
            strcpy(tried, digits);
            if (above) {
                int i = used - 1;
                while (i >= 0 && tried[i] == '9') i--;
                if (i < 0) continue;
                tried[i]++;
                for (i++; i < used; i++) tried[i] = '0';
            }
            snprintf(whole, sizeof whole, "%se%d", tried, exponent - (used - 1));
            if (strtod(whole, NULL) == value) {
                strcpy(digits, tried);
                return exponent;
            }
        }
    }
    return exponent;
}

void write_double(char out[LONGEST_NUMBER], double value) {
    if (isnan(value) || isinf(value)) {
        strcpy(out, isnan(value) ? "nan" : value < 0 ? "-inf" : "inf");
        return;
    }
    char digits[20] = "0", *to = out;
    int exponent = value == 0 ? 0 : shortest(fabs(value), digits);
    int used = (int)strlen(digits);
    while (used > 1 && digits[used - 1] == '0') digits[--used] = 0;
    if (signbit(value)) *to++ = '-';
    if (exponent < -4 || exponent >= 16) {
        *to++ = digits[0];
        if (used > 1) *to++ = '.';
        memcpy(to, digits + 1, (size_t)used - 1);
        to += used - 1;
        snprintf(to, LONGEST_NUMBER - (size_t)(to - out), "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
        return;
    }
    for (int place = exponent < 0 ? 0 : exponent; place >= 0 || exponent - place < used; place--) {
        int i = exponent - place;  /* the digit that stands at 10^place */
        *to++ = i >= 0 && i < used ? digits[i] : '0';
        if (place == 0) *to++ = '.';
    }
    if (to[-1] == '.') *to++ = '0';
    *to = 0;
}

void write_thousands(char out[LONGEST_NUMBER], uint64_t value) {
    char digits[24];
    int length = snprintf(digits, sizeof digits, "%" PRIu64, value);
    char *to = out;
    for (int i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0) *to++ = ',';
        *to++ = digits[i];
    }
    *to = 0;
}

void write_shape(char *out, size_t room, const char *first, const uint32_t *shape, size_t count) {
    size_t used = (size_t)snprintf(out, room, "[%s", first);
    for (size_t i = 0; i < count && used < room; i++)
        used += (size_t)snprintf(out + used, room - used, "%s%" PRId32, i > 0 || *first ? ", " : "",
                                 (int32_t)shape[i]);  /* LiteRT has -1 for an open dimension */
    if (used < room) snprintf(out + used, room - used, "]");
}
