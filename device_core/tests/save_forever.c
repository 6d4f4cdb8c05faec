/* Saves heads until it is killed: all numbers of the head are its number in the series.
 *
 *     save_forever HEAD
 */
#include <stdio.h>
#include <stdlib.h>

#include "tfpfl_device.h"

enum { M = 500, K = 300 };

int main(int count, char **arguments) {
    char error[TFPFL_ERROR_ROOM];
    tfpfl_head head = {M, K, malloc(4 * M * K), malloc(4 * K), {0}};
    if (count != 2 || head.kernel == NULL || head.bias == NULL) return 2;
    for (int value = 1;; value++) {
        for (int i = 0; i < M * K; i++) head.kernel[i] = (float)value;
        for (int i = 0; i < K; i++) head.bias[i] = (float)value;
        if (tfpfl_head_save(arguments[1], &head, error)) return puts(error), 1;
        printf("%d\n", value);
        fflush(stdout);
    }
}
