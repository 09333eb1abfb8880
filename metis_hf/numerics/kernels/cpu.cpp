// NVFP4 quantizers for CPUs, with the same bits as `numerics.definition`, in one pass over memory;
// a pass for amax comes first if the tensor has an outer scale.
//
// A matrix is cut into spans of 16 consecutive elements of a row; the last span of a row may be
// shorter. A tile is 16 spans. With row blocks, a tile is the next 16 spans of the matrix, and each
// span is a block. Otherwise a tile is 16 spans below each other; its columns are the blocks, or the
// whole tile is one (squares). The scales of a tile's blocks are computed in parallel, one block per
// lane. Compile without contraction into fused multiply-adds (-ffp-contract=off).
#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

// Elements per vector register. Compilers generate poor code for vectors wider than the machine's.
#if defined(__AVX512F__)
#define W 16
#define LANES(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), \
    f(13), f(14), f(15)
#elif defined(__AVX2__)
#define W 8
#define LANES(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#else
#define W 4
#define LANES(f) f(0), f(1), f(2), f(3)
#endif
#define N (16 / W)
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))
#define EACH for (int i = 0; i < N; i++)

typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t Shorts __attribute__((vector_size(2 * W)));
typedef Floats LooseFloats __attribute__((aligned(4), may_alias));
typedef Shorts LooseShorts __attribute__((aligned(2), may_alias));

// 16 integers, 16 floats.
struct I {
  Ints p[N];
};
struct F {
  Floats p[N];
};

#define BINARY(T, R, op)               \
  INLINE R operator op(T a, T b) {     \
    R r;                               \
    EACH r.p[i] = a.p[i] op b.p[i];    \
    return r;                          \
  }
BINARY(F, F, +)
BINARY(F, F, -)
BINARY(F, F, *)
BINARY(F, F, /)
BINARY(F, I, <)
BINARY(F, I, >)
BINARY(F, I, >=)
BINARY(F, I, ==)
BINARY(I, I, +)
BINARY(I, I, -)
BINARY(I, I, &)
BINARY(I, I, |)
BINARY(I, I, ^)
BINARY(I, I, >)
BINARY(I, I, <)

INLINE F all(float x) {
  F r;
  EACH r.p[i] = x - (Floats){};
  return r;
}
INLINE I all(int32_t x) {
  I r;
  EACH r.p[i] = x - (Ints){};
  return r;
}
INLINE F operator*(F a, float b) { return a * all(b); }
INLINE I operator>(F a, float b) { return a > all(b); }
INLINE I operator<(F a, float b) { return a < all(b); }
INLINE I operator>=(F a, float b) { return a >= all(b); }
INLINE I operator&(I a, int32_t b) { return a & all(b); }
INLINE I operator+(I a, int32_t b) { return a + all(b); }
INLINE I times(I a, uint32_t b) {
  I r;
  EACH r.p[i] = (Ints)((Words)a.p[i] * b);
  return r;
}
INLINE I left(I a, int n) {
  I r;
  EACH r.p[i] = a.p[i] << n;
  return r;
}
INLINE I right(I a, int n) {  // logical shift
  I r;
  EACH r.p[i] = (Ints)((Words)a.p[i] >> n);
  return r;
}
INLINE F pick(I mask, F a, F b) {
  F r;
  EACH r.p[i] = mask.p[i] ? a.p[i] : b.p[i];
  return r;
}
INLINE I pick(I mask, I a, I b) {
  I r;
  EACH r.p[i] = mask.p[i] ? a.p[i] : b.p[i];
  return r;
}
INLINE I bits(F a) {
  I r;
  EACH r.p[i] = (Ints)a.p[i];
  return r;
}
INLINE F number(I a) {
  F r;
  EACH r.p[i] = (Floats)a.p[i];
  return r;
}
INLINE F to_float(I a) {
  F r;
  EACH r.p[i] = __builtin_convertvector(a.p[i], Floats);
  return r;
}
INLINE I to_int(F a) {  // truncates
  I r;
  EACH r.p[i] = __builtin_convertvector(a.p[i], Ints);
  return r;
}
INLINE F absolute(F a) { return number(bits(a) & 0x7fffffff); }
INLINE F at_most(F a, float top) {  // NaN stays NaN
  F limit = all(top);
#if defined(__AVX__)  // one instruction, which compilers do not emit on their own
  F r;
  EACH asm("vminps %2, %1, %0" : "=v"(r.p[i]) : "v"(limit.p[i]), "vm"(a.p[i]));
  return r;
#else
  return pick(a > limit, limit, a);
#endif
}
INLINE F exact_fma(F a, F b, F c) {  // a * b + c, for products that are exact
#if defined(__FMA__)
  EACH asm("vfmadd213ps %2, %1, %0" : "+v"(a.p[i]) : "v"(b.p[i]), "vm"(c.p[i]));
  return a;
#else
  return a * b + c;
#endif
}
INLINE I larger(I a, I b) {
#if defined(__AVX2__)
  I r;
  EACH asm("vpmaxsd %2, %1, %0" : "=v"(r.p[i]) : "v"(a.p[i]), "vm"(b.p[i]));
  return r;
#else
  return pick(a > b, a, b);
#endif
}

// Exchanges the lanes of `a` that have bit S with the lanes of `b` that have not.
#define KEPT(j) ((j) & S ? W + (j) - S : (j))
#define MOVED(j) ((j) & S ? W + (j) : (j) + S)
template <int S>
INLINE void exchange(I &a, I &b) {
  I x = a, y = b;
  EACH {
    const int apart = S / W;  // in registers
    if constexpr (S < W) {
      a.p[i] = SHUFFLE(x.p[i], y.p[i], LANES(KEPT));
      b.p[i] = SHUFFLE(x.p[i], y.p[i], LANES(MOVED));
    } else if (i & apart) {
      a.p[i] = y.p[i - apart];
    } else {
      b.p[i] = x.p[i + apart];
    }
  }
}
template <int S>
INLINE void exchange_rows(I *t) {
  for (int i = 0; i < 16; i++)
    if (!(i & S)) exchange<S>(t[i], t[i + S]);
}
INLINE void transpose(F *t) {
  I rows[16];
  for (int i = 0; i < 16; i++) rows[i] = bits(t[i]);
  exchange_rows<8>(rows);
  exchange_rows<4>(rows);
  exchange_rows<2>(rows);
  exchange_rows<1>(rows);
  for (int i = 0; i < 16; i++) t[i] = number(rows[i]);
}
INLINE int32_t largest_lane(I a) {
  int32_t best = a.p[0][0];
  EACH for (int j = 0; j < W; j++) best = std::max<int32_t>(best, a.p[i][j]);
  return best;
}
INLINE int32_t sum_lanes(I a) {
  uint32_t sum = 0;
  EACH for (int j = 0; j < W; j++) sum += (uint32_t)a.p[i][j];
  return (int32_t)sum;
}
INLINE float lane(F a, int n) { return a.p[n / W][n % W]; }

// ---------------------------------------------------------------- numbers

enum { FP32, BF16, FP16 };
static const float FLT_TOP = 3.4028234663852886e38f, MAGIC = 12582912.f;  // 1.5 * 2^23

// Plain loops, because compilers scalarize conversions of byte vectors.
template <typename T>
INLINE void narrow(T *y, I v) {
  const int32_t *numbers = (const int32_t *)&v;
  for (int i = 0; i < 16; i++) y[i] = (T)numbers[i];
}
INLINE I widen(const uint8_t *x) {
  I r;
  int32_t *numbers = (int32_t *)&r;
  for (int i = 0; i < 16; i++) numbers[i] = (int32_t)x[i];
  return r;
}

INLINE F load(const void *x, int64_t at, int dtype) {
  F r;
  if (dtype == FP32) {
    EACH r.p[i] = *(const LooseFloats *)((const float *)x + at + i * W);
    return r;
  }
  I w;
  EACH w.p[i] = (Ints)__builtin_convertvector(
      *(const LooseShorts *)((const uint16_t *)x + at + i * W), Words);
  if (dtype == BF16) return number(left(w, 16));
  I magnitude = w & 0x7fff, exponent = magnitude & 0x7c00;
  I normal = left(magnitude, 13) + (112 << 23);
  I finite = pick(exponent > all(0x7bff), left(magnitude, 13) | all(0x7f800000), normal);
  I small = bits(to_float(magnitude) * 5.9604644775390625e-8f);  // 2^-24
  return number(pick(exponent > all(0), finite, small) | left(w & 0x8000, 16));
}

INLINE void store(void *y, int64_t at, F v, int dtype) {
  if (dtype == FP32) {
    EACH *(LooseFloats *)((float *)y + at + i * W) = v.p[i];
    return;
  }
  I u = bits(v), a = u & 0x7fffffff, nan = a > all(0x7f800000), r;
  if (dtype == BF16) {
    r = right(u + 0x7fff + (right(u, 16) & 1), 16);
    r = pick(nan, all(0x7fc0), r);
  } else {
    r = right(a + 0xfff + (right(a, 13) & 1) - all(112 << 23), 13);
    I small = bits(number(a) + all(.5f)) - bits(all(.5f));
    r = pick(a < all(0x38800000), small, r);
    r = pick(a > all(0x477fffff), all(0x7c00), r);
    r = pick(nan, all(0x7e00), r) | (right(u, 16) & 0x8000);
  }
  narrow((uint16_t *)y + at, r);
}


// Twice E2M1's spacing at a: 1, 2 or 4, for a in [0, 8). For NaN the result is arbitrary.
INLINE F spacing_of(F a) {  // bits of magnitudes are ordered like the magnitudes
  return number(larger(bits(a), all(0x3f800000)) & 0x7f800000);
}
INLINE F nearest(F a) {  // [0, 7) to E2M1, ties to even
  F spacing = spacing_of(a);
  return exact_fma(spacing, all(-.5f * MAGIC), exact_fma(spacing, all(.5f * MAGIC), a));
}
// As `rounding.round_stochastic`. NaN gives any number: the scale of its block is NaN.
INLINE F stochastic(F a, F uniform) {
  F spacing = spacing_of(a);
  F steps = a * number(all(0x7f800000) - bits(spacing)), whole = to_float(to_int(steps));
  F up = pick(steps - whole > uniform, all(1.f), all(0.f));
  return (whole + up) * (spacing * .5f);
}
INLINE F e4m3(F v, int up) {  // rounds [0, 448] or NaN to E4M3, kept in fp32
  I b = bits(v), cut;
  F small;
  if (up) {
    cut = b + ((1 << 20) - 1);
    F units = v * 512.f, whole = to_float(to_int(units));
    small = (whole + pick(units > whole, all(1.f), all(0.f))) * (1 / 512.f);
    small = pick(v == v, small, v);
  } else {
    cut = b + (right(b, 20) & 1) + ((1 << 19) - 1);
    F magic = all(MAGIC / 512);
    small = (v + magic) - magic;
  }
  return pick(v >= 0.015625f, number(cut & ~((1 << 20) - 1)), small);
}
INLINE I e4m3_bytes(F v) {
  I normal = right(bits(v) - all(120 << 23), 20), small = to_int(v * 512.f);
  return pick(v == v, pick(v >= 0.015625f, normal, small), all(0x7f));
}
INLINE F e4m3_values(I b) {
  F normal = number(left(b, 20) + (120 << 23)), small = to_float(b) * (1 / 512.f);
  I nan = b > all(0x7e);
  return pick(nan, number(all(0x7fc00000)), pick(b > all(7), normal, small));
}
INLINE I e2m1_codes(F rounded, F scaled) {  // NaN gives 0 or 8
  F last = pick(all(MAGIC) > rounded, rounded * .5f + all(4.f), all(0.f));
  F code = pick(rounded < 2.f, rounded * 2.f, pick(rounded < 4.f, rounded + all(2.f), last));
  return to_int(code) | (right(bits(scaled), 28) & 8);
}
INLINE F e2m1_values(I code) {
  F c = to_float(code & 7);
  F a = pick(c < 4.f, c * .5f, pick(c < 6.f, c - all(2.f), c * 2.f - all(8.f)));
  return number(bits(a) | left(code & 8, 28));
}

// ---------------------------------------------------------------- noise, as in `noise`

static const uint32_t M1 = 0x7feb352du, M2 = 0x846ca68bu;
INLINE uint32_t mix(uint32_t h) {
  h = (h ^ h >> 16) * M1;
  h = (h ^ h >> 15) * M2;
  return h ^ h >> 16;
}
INLINE I mix(I h) {
  h = times(h ^ right(h, 16), M1);
  h = times(h ^ right(h, 15), M2);
  return h ^ right(h, 16);
}
INLINE F uniform(I block, I lanes) {  // from hashes of blocks and lanes
  I h = times(block ^ lanes, M1);
  h = times(h ^ right(h, 15), M2);
  I whole;
  EACH whole.p[i] = h.p[i] >> 8;
  return exact_fma(to_float(whole), all(5.9604644775390625e-8f), all(.5f));  // 2^-24
}

// ---------------------------------------------------------------- quantizing

enum { ROWS, COLUMNS, SQUARES };
enum { ABSMAX, TRIED, EDEN };

extern "C" {
struct Options {
  int32_t tile, rule, two_level, up, stochastic, scaled, by_row, in, out;
  int32_t tried;  // number of candidate scales
  float factors[8];
  float largest_value, to_code, clip;
  float smallest_base, largest_error, error_root, largest_product, product_units;
};
struct Call {
  const void *x;  // values, or codes to unpack
  const float *minus, *plus, *given;
  void *y;  // values
  uint8_t *codes, *scale;  // packed
  float *decode;
  int64_t rows, columns;
  uint32_t first, second;  // seeds of the noise
};
}

struct Shape {
  int64_t columns, across;  // elements and spans per row
};

struct Task : Shape {
  Options o;
  Call c;
  I lanes, numbers;  // hashes of lanes, and 0 to 15
  float encode, decode;  // the tensor's outer scale, if rows have none of their own

  int64_t spans() const { return c.rows * across; }
  int64_t tiles() const {
    return o.tile == ROWS ? (spans() + 15) / 16 : (c.rows + 15) / 16 * across;
  }
  int64_t first(int64_t tile) const {  // span of a tile
    return o.tile == ROWS ? tile * 16 : tile / across * 16 * across + tile % across;
  }
  int64_t step() const { return o.tile == ROWS ? 1 : across; }  // from one span of a tile to the next
  int count(int64_t tile) const {                               // spans that exist, at most 16
    int64_t left = o.tile == ROWS ? spans() - tile * 16 : c.rows - tile / across * 16;
    return (int)std::min<int64_t>(16, left);
  }
};

// The first element and the length of a span, in a matrix whose rows do not end with a whole span.
struct Edge {
  int64_t at;
  int count;
  Edge(int64_t span, Shape s) {
    int64_t column = span % s.across * 16;
    at = span / s.across * s.columns + column;
    count = (int)std::min<int64_t>(16, s.columns - column);
  }
};
APART F load_edge(const void *x, Edge edge, int dtype) {
  if (edge.count == 16) return load(x, edge.at, dtype);
  int size = dtype == FP32 ? 4 : 2;
  F buffer = all(0.f);
  memcpy(&buffer, (const char *)x + edge.at * size, edge.count * size);
  return load(&buffer, 0, dtype);
}
APART void store_edge(void *y, Edge edge, F v, int dtype) {
  if (edge.count == 16) return store(y, edge.at, v, dtype);
  int size = dtype == FP32 ? 4 : 2;
  F buffer;
  store(&buffer, 0, v, dtype);
  memcpy((char *)y + edge.at * size, &buffer, edge.count * size);
}
INLINE F load_span(Shape s, const void *x, int64_t span, int dtype) {
  return s.columns == s.across * 16 ? load(x, span * 16, dtype) : load_edge(x, Edge(span, s), dtype);
}

// Calls work(shape, dtype, second matrix) with arguments that compilers can move out of its loops.
template <typename Work>
INLINE void with_dtype(const Task &t, int dtype, const float *other, Work work) {
  Shape shape = t;
  if (dtype == FP32) return work(shape, FP32, other);
  if (dtype == BF16) return work(shape, BF16, other);
  work(shape, FP16, other);
}

template <int S>
INLINE void largest_of_pairs(I *a) {
  for (int i = 0; i < S; i++) {
    exchange<S>(a[i], a[i + S]);
    a[i] = larger(a[i], a[i + S]);
  }
}

// The largest magnitude of each block. Compared as integers, NaN is larger than all numbers.
INLINE F block_amax(const F *m, int tile) {
  I a[16];
  for (int r = 0; r < 16; r++) a[r] = bits(absolute(m[r]));
  if (tile == ROWS) {
    largest_of_pairs<8>(a);
    largest_of_pairs<4>(a);
    largest_of_pairs<2>(a);
    largest_of_pairs<1>(a);
    return number(a[0]);
  }
  for (int r = 1; r < 16; r++) a[0] = larger(a[0], a[r]);
  return number(tile == SQUARES ? all(largest_lane(a[0])) : a[0]);
}

struct Scales {
  F scale, inverse, decode;
};

INLINE Scales make_scale(F wanted, F decode, const Options &o) {
  F w = pick(wanted > FLT_TOP, number(all(0x7fc00000)), at_most(wanted, 448.f));
  F scale = e4m3(w, o.up);
  F decoded = o.two_level ? scale * decode : scale;
  return {scale, at_most(all(1.f) / decoded, FLT_TOP), decode};
}

INLINE I whole(F x, float top, float units) { return to_int(at_most(x, top) * units); }

// Errors of a candidate scale; `a`: magnitudes, one block per lane; `owed`: -a in units of scales.
template <bool CLAMP>
INLINE I error_of(const F *a, const F *owed, Scales s, F to_base, const Options &o) {
  I error = all(0);
  for (int e = 0; e < 16; e++) {
    F scaled = a[e] * s.inverse;
    F code = nearest(CLAMP ? at_most(scaled, 6.f) : scaled);
    F off = exact_fma(code, s.scale, owed[e]) * to_base, square = off * off;
    error = error + to_int(CLAMP ? at_most(square, o.largest_error) : square);
  }
  return error;
}

// The candidate scale with the least error; `m`: elements, one block per lane.
INLINE Scales least_error(const F *m, F amax, F encode, F decode, const Options &o) {
  F base = amax / all(6.f), a[16], owed[16];
  if (o.two_level) base = base * encode;
  F to_base = all(1.f) / pick(base < o.smallest_base, all(o.smallest_base), base);
  to_base = to_base * o.error_root;  // a power of two, which scales squares to whole units
  for (int e = 0; e < 16; e++) {
    a[e] = absolute(m[e]);
    owed[e] = (o.two_level ? at_most(a[e] * encode, FLT_TOP) : a[e]) * -1.f;
  }
  // Candidates that are normal numbers are at most 1/16 below and 1/8 above base * factor. So scaled
  // elements are below 7, which rounds to 6, and errors are below 1.9 * base: no clamp acts.
  I tame = ((base > .02f) & (base < 450.f) & (decode > 1e-30f)) | (amax == all(0.f));
  bool clamp = largest_lane(tame) == 0;
  Scales best = {};
  I least = all(0);
  for (int k = 0; k < o.tried; k++) {
    Scales s = make_scale(base * o.factors[k], decode, o);
    I error = clamp ? error_of<true>(a, owed, s, to_base, o) : error_of<false>(a, owed, s, to_base, o);
    if (o.tile == SQUARES) error = all(sum_lanes(error));
    I better = k ? error < least : all(-1);
    best = {pick(better, s.scale, best.scale), pick(better, s.inverse, best.inverse), decode};
    least = pick(better, error, least);
  }
  return best;
}

// MS-EDEN's corrected scale; `m`: elements, one block per lane.
INLINE F corrected(const F *m, Scales s, F noise, const Options &o) {
  I energy = all(0), projection = all(0);
  for (int e = 0; e < 16; e++) {
    F a = absolute(m[e] * s.inverse), code = nearest(at_most(a, 6.f));
    energy = energy + whole(a * a, o.largest_product, o.product_units);
    projection = projection + whole(a * code, o.largest_product, o.product_units);
  }
  if (o.tile == SQUARES) energy = all(sum_lanes(energy)), projection = all(sum_lanes(projection));
  F shadow = to_float(projection);
  I usable = (shadow > 0.f) & (s.scale > 0.f);
  F value = at_most(s.scale * pick(usable, to_float(energy) / shadow, all(1.f)), 448.f);
  I normal = value >= 0.015625f;
  F floor = to_float(to_int(value * 512.f)) * (1 / 512.f);
  F below = pick(normal, number(bits(value) & ~((1 << 20) - 1)), pick(value == value, floor, value));
  F gap = pick(normal, number(bits(value) & 0x7f800000) * .125f, all(1 / 512.f));
  return pick(noise * gap < value - below, below + gap, below);
}

INLINE F encode_of(F largest, const Options &o) {
  return pick(largest == all(0.f), all(1.f), at_most(all(o.largest_value) / largest, FLT_TOP));
}

INLINE Scales scales_of(const Task &t, int64_t tile, const F *m, int count) {
  const Options &o = t.o;
  F blocks[16], encode = all(t.encode), decode = all(t.decode);
  bool transposed = o.tile == ROWS && o.rule != ABSMAX;
  if (transposed) {
    std::copy(m, m + 16, blocks);
    transpose(blocks);
    m = blocks;
  }
  F amax = block_amax(m, transposed ? COLUMNS : o.tile);
  if (o.two_level && o.by_row) {
    float rows[16] = {};
    for (int r = 0; r < count; r++) rows[r] = t.c.given[(tile * 16 + r) / t.across];
    encode = encode_of(load(rows, 0, FP32), o);
    decode = all(1.f) / encode;
  }
  if (o.rule == TRIED) return least_error(m, amax, encode, decode, o);
  if (o.rule == EDEN) amax = amax * o.clip;
  F to_code = all(o.to_code);
  Scales s = make_scale(amax * (o.two_level ? encode * to_code : to_code), decode, o);
  if (o.rule == EDEN) {
    // Noise has one number per block, drawn in groups of 16; a square uses one lane of its group.
    int64_t group = o.tile == SQUARES ? tile / 16 : tile;
    I lanes = t.lanes;
    if (o.tile == SQUARES) lanes = bits(all(lane(number(lanes), tile % 16)));
    uint32_t block = mix((uint32_t)group + t.c.first) + t.c.second;
    s.scale = corrected(m, s, uniform(all((int32_t)block), lanes), o);
  }
  return s;
}

struct Tile {
  F m[16];  // elements, later their values
  Scales s;
  float scale[16], inverse[16], decode[16];  // for row blocks only
  I codes[16];
};

// The functions for tiles are not inlined: each is compiled once, and keeps its choices out of its
// loops.
APART void read_tile(const Task &t, int64_t first, int count, F *m) {
  int64_t step = t.step();
  with_dtype(t, t.o.in, t.c.minus, [=, x = t.c.x](Shape s, int dtype, const float *minus) {
    for (int r = 0; r < count; r++) {
      int64_t span = first + r * step;
      // Ahead of the processor's own prefetching, which stops at the end of each page.
      if (step == 1 && dtype == FP32) __builtin_prefetch((const float *)x + (span + 128) * 16);
      F v = load_span(s, x, span, dtype);
      m[r] = minus ? v - load_span(s, minus, span, FP32) : v;
    }
  });
  std::fill(m + count, m + 16, all(0.f));
}

APART void write_tile(const Task &t, int64_t first, int count, const F *m) {
  int64_t step = t.step();
  with_dtype(t, t.o.out, t.c.plus, [=, y = t.c.y](Shape s, int dtype, const float *plus) {
    for (int r = 0; r < count; r++) {
      int64_t span = first + r * step;
      F v = m[r];
      if (plus) v = at_most(v, FLT_TOP) + load_span(s, plus, span, FP32);
      if (s.columns == s.across * 16)
        store(y, span * 16, v, dtype);
      else
        store_edge(y, Edge(span, s), v, dtype);
    }
  });
}

APART void prepare(const Task &t, int64_t tile, Tile &w, int count) {
  w.s = scales_of(t, tile, w.m, count);
  if (t.o.tile != ROWS) return;
  store(w.scale, 0, w.s.scale, FP32);
  store(w.inverse, 0, w.s.inverse, FP32);
  store(w.decode, 0, w.s.decode, FP32);
  if (!t.o.by_row) return;
  for (int r = 0; r < count; r++)
    if ((tile * 16 + r) % t.across == 0) t.c.decode[(tile * 16 + r) / t.across] = w.decode[r];
}

// Values go to `out`, if it is not null, in rows of 16 that are `apart` elements apart.
template <bool ROW, bool STOCHASTIC>
APART void round_tile(const Task &t, int64_t first, int count, Tile &w, float *out, int64_t apart) {
  int64_t step = t.step();
  I lanes = t.lanes;
  int32_t blocks[16];
  if (STOCHASTIC) {
    I span = times(t.numbers, (uint32_t)step) + (int32_t)(first + t.c.first);
    store(blocks, 0, number(mix(span) + (int32_t)t.c.second), FP32);
  }
  bool outer = t.o.two_level && t.o.scaled, pack = t.c.codes;
  Scales s = w.s;
  for (int r = 0; r < count; r++) {
    F y = w.m[r] * (ROW ? all(w.inverse[r]) : s.inverse), a = at_most(absolute(y), 6.f);
    if (STOCHASTIC) {
      a = stochastic(a, uniform(all(blocks[r]), lanes));
    } else {
      a = nearest(a);
    }
    if (pack) w.codes[r] = e2m1_codes(a, y);
    if (!out) continue;
    F v = number(bits(a) | (bits(y) & (int32_t)0x80000000)) * (ROW ? all(w.scale[r]) : s.scale);
    store(out, r * apart, outer ? v * (ROW ? all(w.decode[r]) : s.decode) : v, FP32);
  }
}

APART void write_codes(const Task &t, int64_t tile, Tile &w, int count) {
  uint8_t *out = t.c.codes;
  I bytes = e4m3_bytes(w.s.scale);
  for (int r = count; r < 16; r++) w.codes[r] = all(0);
  if (t.o.tile == ROWS) {
    uint8_t all_bytes[16];
    narrow(all_bytes, bytes);
    if (count < 16) all_bytes[count] = 0;
    for (int r = 0; r < count; r += 2) {
      narrow(out + (tile * 16 + r) * 8, w.codes[r] | left(w.codes[r + 1], 4));
      memcpy(t.c.scale + tile * 16 + r, all_bytes + r, 2);
    }
    return;
  }
  int64_t group = tile / t.across, column = tile % t.across;
  for (int r = 0; r < 8; r++)
    narrow(out + ((group * 8 + r) * t.across + column) * 16, w.codes[r] | left(w.codes[r + 8], 4));
  if (t.o.tile == SQUARES)
    t.c.scale[tile] = (uint8_t)bytes.p[0][0];
  else
    narrow(t.c.scale + tile * 16, bytes);
}

static void quantize_tile(const Task &t, int64_t tile) {
  Tile w;
  int count = t.count(tile);
  int64_t first = t.first(tile);
  bool direct = t.c.y && t.o.out == FP32 && !t.c.plus && t.columns == t.across * 16;
  bool row = t.o.tile == ROWS;
  auto round = row ? t.o.stochastic ? round_tile<true, true> : round_tile<true, false>
               : t.o.stochastic ? round_tile<false, true> : round_tile<false, false>;
  read_tile(t, first, count, w.m);
  prepare(t, tile, w, count);
  if (direct)
    round(t, first, count, w, (float *)t.c.y + first * 16, t.step() * 16);
  else
    round(t, first, count, w, t.c.y ? (float *)w.m : nullptr, 16);
  if (t.c.codes) write_codes(t, tile, w, count);
  if (t.c.y && !direct) write_tile(t, first, count, w.m);
}

INLINE void unpack_tile(const Task &t, int64_t tile) {
  const Options &o = t.o;
  int count = t.count(tile);
  F s = all(0.f);
  float scale[16] = {};
  if (o.tile == ROWS) {
    uint8_t bytes[16] = {};
    for (int r = 0; r < count; r++) bytes[r] = t.c.scale[tile * 16 + r];
    store(scale, 0, e4m3_values(widen(bytes)), FP32);
  } else if (o.tile == SQUARES) {
    s = e4m3_values(all((int32_t)t.c.scale[tile]));
  } else {
    s = e4m3_values(widen(t.c.scale + tile * 16));
  }
  const uint8_t *x = (const uint8_t *)t.c.x;
  int64_t group = tile / t.across, column = tile % t.across;
  F m[16];
  for (int r = 0; r < count; r++) {
    bool row = o.tile == ROWS, upper = row ? r % 2 : r > 7;
    int64_t at = row ? (tile * 16 + r) / 2 : (group * 8 + r % 8) * t.across + column;
    I code = widen(x + at * 16);
    code = upper ? right(code, 4) : code & 15;
    F v = e2m1_values(code) * (row ? all(scale[r]) : s);
    if (t.c.given) v = v * all(t.c.given[o.by_row ? (tile * 16 + r) / t.across : 0]);
    m[r] = v;
  }
  write_tile(t, t.first(tile), count, m);
}

// GOMP_parallel of the OpenMP library that torch uses. Other threads would wait for the cores that
// torch's threads keep busy between operations.
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
static Parallel parallel;

template <typename Work>
static void share(int64_t tiles, int threads, Work work, int64_t least = 32) {
  int64_t parts = parallel ? std::max<int64_t>(1, std::min<int64_t>(threads, tiles / least)) : 1;
  std::atomic<int64_t> next{0};
  auto take = [&] {
    for (int64_t i; (i = next++) < parts;) work(i, tiles * i / parts, tiles * (i + 1) / parts);
  };
  if (parts == 1) return take();
  parallel([](void *all) { (*(decltype(take) *)all)(); }, &take, (unsigned)parts, 0);
}

static I numbers() {
  I r;
  EACH for (int j = 0; j < W; j++) r.p[i][j] = i * W + j;
  return r;
}
static I lane_hashes() { return mix(numbers()); }

static Task task_of(const Options *options, const Call *call) {
  return {{call->columns, (call->columns + 15) / 16}, *options, *call, lane_hashes(), numbers(), 1, 1};
}

static float largest_of(const Task &t, int threads) {
  std::vector<int32_t> found(std::max(threads, 1));
  int32_t *at = found.data();
  share(t.spans(), threads, [&t, at](int64_t part, int64_t from, int64_t to) {
    with_dtype(t, t.o.in, t.c.minus, [=, x = t.c.x](Shape s, int dtype, const float *minus) {
      I best = all(0);
      for (int64_t span = from; span < to; span++) {
        F v = load_span(s, x, span, dtype);
        if (minus) v = v - load_span(s, minus, span, FP32);
        best = larger(best, bits(absolute(v)));
      }
      at[part] = largest_lane(best);
    });
  }, 16 * 32);
  union {
    int32_t bits;
    float number;
  } largest = {*std::max_element(found.begin(), found.end())};
  return largest.number;
}

extern "C" {
void use_openmp(Parallel entry) { parallel = entry; }
void quantize(const Options *options, const Call *call, int threads) {
  Task t = task_of(options, call);
  if (t.o.two_level && !t.o.by_row) {
    float largest = t.c.given ? *t.c.given : largest_of(t, threads);
    t.encode = lane(encode_of(all(largest), t.o), 0);
    *t.c.decode = t.decode = 1.f / t.encode;
  }
  share(t.tiles(), threads, [&t](int64_t, int64_t from, int64_t to) {
    for (int64_t tile = from; tile < to; tile++) quantize_tile(t, tile);
  });
}
void draw(float *out, int64_t rows, int64_t width, uint32_t first, uint32_t second, int threads) {
  I lanes = lane_hashes();
  Shape shape = {width, (width + 15) / 16};
  share(rows * shape.across, threads, [=](int64_t, int64_t from, int64_t to) {
    for (int64_t span = from; span < to; span++) {
      F noise = uniform(all((int32_t)(mix((uint32_t)span + first) + second)), lanes);
      store_edge(out, Edge(span, shape), noise, FP32);
    }
  });
}
void unpack(const Options *options, const Call *call, int threads) {
  Task t = task_of(options, call);
  share(t.tiles(), threads, [&t](int64_t, int64_t from, int64_t to) {
    for (int64_t tile = from; tile < to; tile++) unpack_tile(t, tile);
  });
}
}
