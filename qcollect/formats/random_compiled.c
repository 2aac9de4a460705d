/* Random fractions as random.py defines them, for places side by side: the same numbers, faster.

   Philox-4x32-10 of LANES counters at once gives what the elements of a group draw: word w of lane l is element
   LANES * w + l. Nothing here is a float operation that rounds, so the numbers do not depend on the instructions.

   Most of it are products of two 32-bit numbers. With AVX2 each word is kept in the lower half of 64 bits, where the
   vector instruction for them looks; what the upper half holds is nobody's. Compilers do not find that by themselves:
   what they make of the plain loops takes three times as long. Nor do they find what need not be done:

   - In the first two rounds most is the same for all lanes of a group, or for the same lane of all groups.
   - A round makes a word of the upper half of a product, the lower half of a product of the round before, and a key. So
     every second round's products take up two keys, their round's in the upper half and the next round's in the lower,
     and the products of the others none.

   Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

   Compiled and called by random_compiled.py. */

#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define NUM_ROUNDS 10
#define NUM_WORDS 4
#define LANES 16
#define GROUP (NUM_WORDS * LANES)
#define UNUSED_BITS 8 /* of a word, beside those of a fraction */
#define UNIT 0x1p-24f

static const uint32_t MULTIPLIERS[2] = {0xD2511F53u, 0xCD9E8D57u};
static const uint32_t KEY_STEPS[2] = {0x9E3779B9u, 0xBB67AE85u};

#ifdef __AVX2__
#define VECTORS 4 /* of four lanes: even ones of a half, odd ones of it, and the same of the other half */
#endif

/* What the groups have in common. */
typedef struct {
  uint32_t keys[NUM_ROUNDS][2];
#ifdef __AVX2__
  __m256i two_keys[NUM_ROUNDS / 2][2]; /* of a round in the upper halves, of the next one in the lower halves */
  __m256i upper_of_lanes[VECTORS], lower_of_lanes[VECTORS]; /* halves of the first round's products */
#endif
} Common;

static Common make_common(uint64_t seed) {
  Common common;
  for (int round = 0; round < NUM_ROUNDS; round++)
    for (int word = 0; word < 2; word++)
      common.keys[round][word] = (uint32_t)(seed >> 32 * word) + (uint32_t)round * KEY_STEPS[word];
#ifdef __AVX2__
  for (int round = 0; round < NUM_ROUNDS; round += 2)
    for (int word = 0; word < 2; word++) {
      const uint64_t upper = common.keys[round][word], lower = common.keys[round + 1][word];
      common.two_keys[round / 2][word] = _mm256_set1_epi64x((int64_t)(upper << 32 | lower));
    }
  for (int v = 0; v < VECTORS; v++) {
    const int lane = 8 * (v / 2) + v % 2;
    const __m256i lanes = _mm256_set_epi64x(lane + 6, lane + 4, lane + 2, lane);
    common.lower_of_lanes[v] = _mm256_mul_epu32(lanes, _mm256_set1_epi64x(MULTIPLIERS[1]));
    common.upper_of_lanes[v] = _mm256_srli_epi64(common.lower_of_lanes[v], 32);
  }
#endif
  return common;
}

#ifdef __AVX2__

static inline __m256i everywhere(uint64_t word) { return _mm256_set1_epi32((int32_t)(uint32_t)word); }

static void draw_group(const Common *common, uint64_t group, float *to) {
  const __m256i first_multiplier = _mm256_set1_epi64x(MULTIPLIERS[0]);
  const __m256i second_multiplier = _mm256_set1_epi64x(MULTIPLIERS[1]);
  const uint64_t first_of_all = (group & UINT32_MAX) * MULTIPLIERS[0]; /* of round 0 */
  const uint64_t second_of_all = ((first_of_all >> 32) ^ common->keys[0][1]) * MULTIPLIERS[1]; /* of round 1 */
  __m256i words[VECTORS][NUM_WORDS];
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; v++) {
    const __m256i word = _mm256_xor_si256(common->upper_of_lanes[v], everywhere((group >> 32) ^ common->keys[0][0]));
    const __m256i first = _mm256_mul_epu32(word, first_multiplier);
    words[v][0] =
        _mm256_xor_si256(common->lower_of_lanes[v], everywhere((second_of_all >> 32) ^ common->keys[1][0]));
    words[v][1] = everywhere(second_of_all);
    words[v][2] = _mm256_xor_si256(_mm256_srli_epi64(first, 32), everywhere(first_of_all ^ common->keys[1][1]));
    words[v][3] = first;
  }
#pragma GCC unroll 10
  for (int round = 2; round < NUM_ROUNDS; round++) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      __m256i first = _mm256_mul_epu32(words[v][0], first_multiplier);
      __m256i second = _mm256_mul_epu32(words[v][2], second_multiplier);
      if (round % 2 == 0) {
        first = _mm256_xor_si256(first, common->two_keys[round / 2][1]);
        second = _mm256_xor_si256(second, common->two_keys[round / 2][0]);
      }
      words[v][0] = _mm256_xor_si256(_mm256_srli_epi64(second, 32), words[v][1]);
      words[v][2] = _mm256_xor_si256(_mm256_srli_epi64(first, 32), words[v][3]);
      words[v][1] = second;
      words[v][3] = first;
    }
  }
#pragma GCC unroll 4
  for (int word = 0; word < NUM_WORDS; word++)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const __m256i odd = _mm256_slli_epi64(words[2 * half + 1][word], 32);
      const __m256i bits = _mm256_blend_epi32(words[2 * half][word], odd, 0xAA);
      const __m256 whole = _mm256_cvtepi32_ps(_mm256_srli_epi32(bits, UNUSED_BITS));
      _mm256_storeu_ps(to + LANES * word + 8 * half, _mm256_mul_ps(whole, _mm256_set1_ps(UNIT)));
    }
}

#else

static void multiply(const uint32_t *from, uint32_t multiplier, uint32_t *high, uint32_t *low) {
  for (int lane = 0; lane < LANES; lane++) {
    const uint64_t product = (uint64_t)from[lane] * multiplier;
    high[lane] = (uint32_t)(product >> 32);
    low[lane] = (uint32_t)product;
  }
}

static void draw_group(const Common *common, uint64_t group, float *to) {
  uint32_t words[NUM_WORDS][LANES], high[2][LANES], low[2][LANES];
  for (int lane = 0; lane < LANES; lane++) {
    words[0][lane] = (uint32_t)group;
    words[1][lane] = (uint32_t)(group >> 32);
    words[2][lane] = (uint32_t)lane;
    words[3][lane] = 0;
  }
  for (int round = 0; round < NUM_ROUNDS; round++) {
    multiply(words[0], MULTIPLIERS[0], high[0], low[0]);
    multiply(words[2], MULTIPLIERS[1], high[1], low[1]);
    for (int lane = 0; lane < LANES; lane++) {
      words[0][lane] = high[1][lane] ^ words[1][lane] ^ common->keys[round][0];
      words[1][lane] = low[1][lane];
      words[2][lane] = high[0][lane] ^ words[3][lane] ^ common->keys[round][1];
      words[3][lane] = low[0][lane];
    }
  }
  for (int word = 0; word < NUM_WORDS; word++)
    for (int lane = 0; lane < LANES; lane++)
      to[LANES * word + lane] = (float)(int32_t)(words[word][lane] >> UNUSED_BITS) * UNIT;
}

#endif

/* The fractions of num places from first on, to the float32 numbers at address to, by so many threads. */
void qcollect_fill_fractions(uint64_t seed, uint64_t first, uint64_t num, int num_threads, float *to) {
  const Common common = make_common(seed);
  const uint64_t skipped = first % GROUP, num_groups = (skipped + num + GROUP - 1) / GROUP;
  (void)num_threads; /* of OpenMP, where there is one */
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (uint64_t i = 0; i < num_groups; i++) {
    const uint64_t begin = i == 0 ? skipped : 0;
    const uint64_t left = skipped + num - GROUP * i, end = left < GROUP ? left : GROUP;
    float *start = to + (GROUP * i + begin - skipped);
    if (end - begin == GROUP) {
      draw_group(&common, first / GROUP + i, start);
    } else {
      float all[GROUP];
      draw_group(&common, first / GROUP + i, all);
      memcpy(start, all + begin, (end - begin) * sizeof *start);
    }
  }
}
