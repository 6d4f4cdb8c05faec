/* SHA-256 as FIPS 180-4 describes it, and the CRC-32 of zlib. */
#include "core.h"

#include <string.h>

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t right(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void add_block(uint32_t state[8], const unsigned char *block) {
    uint32_t w[64];
    for (int t = 0; t < 16; t++)
        w[t] = (uint32_t)block[4 * t] << 24 | (uint32_t)block[4 * t + 1] << 16 | (uint32_t)block[4 * t + 2] << 8 |
               block[4 * t + 3];
    for (int t = 16; t < 64; t++) {
        uint32_t s0 = right(w[t - 15], 7) ^ right(w[t - 15], 18) ^ w[t - 15] >> 3;
        uint32_t s1 = right(w[t - 2], 17) ^ right(w[t - 2], 19) ^ w[t - 2] >> 10;
        w[t] = s1 + w[t - 7] + s0 + w[t - 16];
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int t = 0; t < 64; t++) {
        uint32_t t1 = h + (right(e, 6) ^ right(e, 11) ^ right(e, 25)) + ((e & f) ^ (~e & g)) + K[t] + w[t];
        uint32_t t2 = (right(a, 2) ^ right(a, 13) ^ right(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

void sha256_start(struct sha256 *hash) {
    static const uint32_t first[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(hash->state, first, sizeof first);
    hash->bytes = 0;
}

void sha256_add(struct sha256 *hash, const void *data, size_t bytes) {
    const unsigned char *from = data;
    while (bytes > 0) {
        size_t used = (size_t)(hash->bytes % 64), part = 64 - used < bytes ? 64 - used : bytes;
        if (used == 0 && part == 64) {
            add_block(hash->state, from);
        } else {
            memcpy(hash->block + used, from, part);
            if (used + part == 64) add_block(hash->state, hash->block);
        }
        hash->bytes += part;
        from += part;
        bytes -= part;
    }
}

void sha256_end(struct sha256 *hash, unsigned char digest[32]) {
    unsigned char end[72] = {0x80};
    uint64_t bits = hash->bytes * 8;
    size_t padding = 64 - (size_t)((hash->bytes + 8) % 64);  /* the 1 and zeros, before the 8 bytes of the length */
    for (int i = 0; i < 8; i++) end[padding + (size_t)i] = (unsigned char)(bits >> (56 - 8 * i));
    sha256_add(hash, end, padding + 8);
    for (int i = 0; i < 32; i++) digest[i] = (unsigned char)(hash->state[i / 4] >> (24 - 8 * (i % 4)));
}

void tfpfl_sha256(const void *data, size_t bytes, unsigned char digest[32]) {
    struct sha256 hash;
    sha256_start(&hash);
    sha256_add(&hash, data, bytes);
    sha256_end(&hash, digest);
}

void write_hex(char out[65], const unsigned char digest[32]) {
    for (int i = 0; i < 32; i++) {
        out[2 * i] = "0123456789abcdef"[digest[i] >> 4];
        out[2 * i + 1] = "0123456789abcdef"[digest[i] & 15];
    }
    out[64] = 0;
}

uint32_t crc32_add(uint32_t crc, const void *data, size_t bytes) {
    uint32_t table[16];  /* of half bytes: small enough to be made at each call */
    for (uint32_t i = 0; i < 16; i++) {
        table[i] = i;
        for (int bit = 0; bit < 4; bit++) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xEDB88320u : 0);
    }
    const unsigned char *from = data;
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++) {
        crc = crc >> 4 ^ table[(crc ^ from[i]) & 15];
        crc = crc >> 4 ^ table[(crc ^ (uint32_t)from[i] >> 4) & 15];
    }
    return ~crc;
}
