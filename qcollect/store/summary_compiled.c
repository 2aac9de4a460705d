/* The summary of a tensor in one pass: nine float64 numbers, as FIELDS in summary.py names them.

   Works on blocks that stay in the first-level cache, each as the bits of float32 numbers. Every loop is one that
   compilers turn into vector instructions: whole numbers in any order, float64 sums in a fixed number of lanes. So the
   order of additions is that of this file, and the same values give the same bits whatever the instructions are, as
   long as nothing is contracted or reassociated (-ffp-contract=off, no -ffast-math).

   Compiled and called by summary_compiled.py. */

#include <stdint.h>
#include <string.h>

#define BLOCK 4096
#define LANES 32
#define CACHE_LINE 64
#define NO_SIGN 0x7FFFFFFFu
#define INF 0x7F800000u
/* of a sum of squares: with a smaller part around the mean, differences from the mean are squared instead */
#define MIN_SPREAD 0x1p-6
#define MAX_ROUNDS 4

enum { FLOAT32, BFLOAT16, FLOAT16 }; /* as in summary_compiled.py */

/* The mean, and the value it is counted from, which lies near it wherever squares alone would cancel. */
typedef struct {
  double num_finite, num_nan, num_inf, num_zero;
  double near, mean_from_near, squared_deviations;
  int32_t low, high;       /* bits without the sign, negative for negative numbers: in the order of the numbers */
  uint32_t before_nonzero; /* bits of the smallest magnitude but 0, less 1: 0 itself comes last */
} Summary;

/* Where the next block begins in memory, and the size of an element there. */
typedef struct {
  const char *start;
  int element_size;
} Ahead;

typedef struct {
  int32_t low, high;
  uint32_t before_nonzero, num_zero;
} Extremes;

static inline float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* The number at a place in the order of all numbers; zeros have no sign. */
static double number_at(int32_t place) {
  return place < 0 ? -(double)as_float((uint32_t)-place) : (double)as_float((uint32_t)place);
}

static void widen_bfloat16(const uint16_t *from, int size, uint32_t *to) {
  for (int i = 0; i < size; i++) to[i] = (uint32_t)from[i] << 16;
}

/* Exponents of float32 are 112 more, and those of Inf and NaN 224. Subnormal numbers get a leading one that is
   subtracted as a number; none is subnormal in between, which a processor may be set to take for 0. */
static void widen_float16(const uint16_t *from, int size, uint32_t *to) {
  for (int i = 0; i < size; i++) {
    uint32_t sign = (uint32_t)(from[i] & 0x8000) << 16, magnitude = (uint32_t)(from[i] & 0x7FFF) << 13;
    uint32_t subnormal = as_bits(as_float(magnitude + (113u << 23)) - as_float(113u << 23));
    uint32_t rest = magnitude + (magnitude < (31u << 23) ? 112u << 23 : 224u << 23);
    uint32_t is_subnormal = -(uint32_t)(magnitude < (1u << 23)); /* a mask: compilers make a branch of ?: here */
    to[i] = sign | (subnormal & is_subnormal) | (rest & ~is_subnormal);
  }
}

static Extremes find_extremes(const uint32_t *bits, int size) {
  int32_t low = INT32_MAX, high = INT32_MIN;
  uint32_t before_nonzero = UINT32_MAX, num_zero = 0;
  for (int i = 0; i < size; i++) {
    uint32_t magnitude = bits[i] & NO_SIGN, before = magnitude - 1;
    int32_t place = (int32_t)bits[i] < 0 ? -(int32_t)magnitude : (int32_t)magnitude;
    low = place < low ? place : low;
    high = place > high ? place : high;
    before_nonzero = before < before_nonzero ? before : before_nonzero;
    num_zero += magnitude == 0;
  }
  return (Extremes){low, high, before_nonzero, num_zero};
}

/* How many are finite, which are copied side by side; the others are counted. */
static int keep_finite(const uint32_t *bits, int size, uint32_t *finite, Summary *summary) {
  int num_finite = 0, num_nan = 0;
  for (int i = 0; i < size; i++) {
    uint32_t magnitude = bits[i] & NO_SIGN;
    finite[num_finite] = bits[i];
    num_finite += magnitude < INF;
    num_nan += magnitude > INF;
  }
  summary->num_nan += num_nan;
  summary->num_inf += size - num_finite - num_nan;
  return num_finite;
}

/* Sums of the differences from a value and of their squares. Meanwhile the next block comes from memory: nobody else
   asks for it in time, as a processor's own guesses end when a block does. */
static void add_up(const uint32_t *bits, int size, double near, Ahead ahead, double *sum, double *squares) {
  double sums[LANES] = {0}, squared[LANES] = {0};
  int i = 0;
  for (; i + LANES <= size; i += LANES) {
    __builtin_prefetch(ahead.start + i * ahead.element_size);
    __builtin_prefetch(ahead.start + i * ahead.element_size + CACHE_LINE);
    for (int lane = 0; lane < LANES; lane++) {
      double difference = (double)as_float(bits[i + lane]) - near;
      sums[lane] += difference;
      squared[lane] += difference * difference;
    }
  }
  for (int lane = 0; i + lane < size; lane++) {
    double difference = (double)as_float(bits[i + lane]) - near;
    sums[lane] += difference;
    squared[lane] += difference * difference;
  }
  for (int half = LANES / 2; half; half /= 2)
    for (int lane = 0; lane < half; lane++) {
      sums[lane] += sums[lane + half];
      squared[lane] += squared[lane + half];
    }
  *sum = sums[0], *squares = squared[0];
}

static void add_moments(const uint32_t *bits, int size, const Extremes *extremes, Ahead ahead, Summary *summary) {
  double mean, squared_deviations = 0.0; /* of the block, the mean counted from near */
  if (extremes->low == extremes->high) {
    mean = number_at(extremes->low) - summary->near;
  } else {
    double sum, squares;
    for (int round = 1;; round++) {
      add_up(bits, size, summary->near, ahead, &sum, &squares);
      mean = sum / size;
      squared_deviations = squares - mean * sum;
      if (squared_deviations >= squares * MIN_SPREAD || round == MAX_ROUNDS) break;
      double near = summary->near + mean;
      summary->mean_from_near -= near - summary->near;
      summary->near = near;
    }
    if (squared_deviations < 0.0) squared_deviations = 0.0;
  }
  double num_before = summary->num_finite, num_finite = num_before + size;
  double difference = mean - summary->mean_from_near;
  summary->mean_from_near += difference * (size / num_finite);
  summary->squared_deviations += squared_deviations + difference * difference * (size * (num_before / num_finite));
  summary->num_finite = num_finite;
}

static void add_block(const uint32_t *bits, int size, Ahead ahead, Summary *summary) {
  uint32_t finite[BLOCK];
  Extremes extremes = find_extremes(bits, size);
  if (extremes.high >= (int32_t)INF || extremes.low <= -(int32_t)INF) {
    size = keep_finite(bits, size, finite, summary);
    if (!size) return;
    bits = finite;
    extremes = find_extremes(bits, size);
  }
  summary->num_zero += extremes.num_zero;
  if (extremes.low < summary->low) summary->low = extremes.low;
  if (extremes.high > summary->high) summary->high = extremes.high;
  if (extremes.before_nonzero < summary->before_nonzero) summary->before_nonzero = extremes.before_nonzero;
  add_moments(bits, size, &extremes, ahead, summary);
}

/* Writes the nine numbers of `size` elements of a kind to `numbers`. Nothing is allocated and nothing is kept. */
void qcollect_summarize(const void *elements, int64_t size, int kind, double *numbers) {
  Summary summary = {.low = (int32_t)INF, .high = -(int32_t)INF, .before_nonzero = INF - 1};
  uint32_t wide[BLOCK];
  Ahead ahead = {elements, kind == FLOAT32 ? sizeof(uint32_t) : sizeof(uint16_t)};
  for (int64_t start = 0; start < size; start += BLOCK) {
    int num = size - start < BLOCK ? (int)(size - start) : BLOCK;
    const void *block = ahead.start;
    ahead.start += num * ahead.element_size;
    if (kind == BFLOAT16)
      widen_bfloat16(block, num, wide);
    else if (kind == FLOAT16)
      widen_float16(block, num, wide);
    add_block(kind == FLOAT32 ? block : wide, num, ahead, &summary);
  }
  numbers[0] = summary.num_finite;
  numbers[1] = summary.num_nan;
  numbers[2] = summary.num_inf;
  numbers[3] = summary.num_zero;
  numbers[4] = number_at(summary.low);
  numbers[5] = number_at(summary.high);
  numbers[6] = summary.near + summary.mean_from_near;
  numbers[7] = summary.squared_deviations;
  numbers[8] = number_at((int32_t)(summary.before_nonzero + 1));
}
