/* What client.c and steps.c share. */
#ifndef TFPFL_CLIENT_H
#define TFPFL_CLIENT_H

#include "core.h"

struct tfpfl_client {
    struct bundle bundle;
    struct runtime *runtime, *trunk; /* the trunk is opened when it is needed */
    char *litert, *trunk_file;
    char *state;
    struct known known; /* of the file `state` */
    float *theta;
    float *weights; /* [batch]: of the examples of a chunk */
    tfpfl_head head;
    bool opened;
    char error[TFPFL_ERROR_ROOM];
};

int check_examples(tfpfl_client *client, const tfpfl_examples *examples, bool labelled);
/* What belongs to the examples: their labels, or their targets. */
const void *answers_of(const tfpfl_client *client, const tfpfl_examples *examples);
size_t answer_bytes(const tfpfl_client *client); /* of one example */
int compute_features(tfpfl_client *client, const tfpfl_examples *examples, float *features);

/* ---- kept.c */

int keep_theta(const char *path, const float *theta, size_t count, char *error);
/* theta is to be freed; NULL: there is no such file, or it is damaged. */
int kept_theta(const char *path, size_t count, float **theta, char *error);
/* Takes the theta that a file keeps, if there is one. */
int receive_kept(tfpfl_client *client, const char *path);

/* ---- steps.c */

struct tensor theta_of(const tfpfl_client *client);
struct tensor rows_of(const tfpfl_client *client, const tfpfl_examples *examples, size_t start, size_t rows);
/* Makes gradient steps on the client's head, which stays; `head` becomes the new one. With the run's safeguard, it is
 * the old one if the steps raised the loss. */
int fit_head(tfpfl_client *client, const float *features, const void *answers, size_t count, int32_t steps,
             float beta, tfpfl_head *head, double *loss_before, double *loss);
/* tau - 1 steps and the joint step: the gradient of theta [P], and the head after it. */
int compute_round(tfpfl_client *client, const tfpfl_examples *examples, float *gradient, tfpfl_head *head, float *loss);

#endif
