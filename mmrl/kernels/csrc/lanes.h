// Sixteen floats at a time, by the compiler's vector extension (one zmm, two ymm or four xmm registers): memory to lanes
// and back, sums over lanes.
#pragma once
#include "arithmetic.h"

// Of a lambda: its code goes where it is called, so that sums stay in registers.
#define INLINE __attribute__((always_inline))

namespace mmrl {

typedef _Float16 LanesHalf __attribute__((vector_size(32)));

template <class V, class T>
HD V raw(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

HD Lanes widen(const float* p) { return raw<Lanes>(p); }
HD Lanes widen(const Half* p) { return __builtin_convertvector(raw<LanesHalf>(p), Lanes); }
HD Lanes widen(const Bfloat16* p) { return float_of(__builtin_convertvector(raw<LanesShort>(p), LanesInt) << 16); }
HD Lanes widen(const bool* p) { return __builtin_convertvector(widened(raw<LanesByte>(p)), Lanes); }

HD void narrow(float* p, Lanes x) { memcpy(p, &x, sizeof x); }
HD void narrow(float* p, Eight x) { memcpy(p, &x, sizeof x); }
HD void narrow(Half* p, Lanes x) {
  const LanesHalf h = __builtin_convertvector(x, LanesHalf);
  memcpy(p, &h, sizeof h);
}
HD void narrow(Bfloat16* p, Lanes x) {  // round to nearest even; NaN stays NaN
  const LanesInt bits = bits_of(x);
  const LanesInt rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const LanesShort h = __builtin_convertvector((x == x ? rounded : (bits | 0x400000)) >> 16, LanesShort);
  memcpy(p, &h, sizeof h);
}

// `count` elements from p, the other lanes `fill`.
template <class T>
HD Lanes load(const T* p, int64_t count, T fill = T{}) {
  if (count >= LANES) {
    __builtin_prefetch(reinterpret_cast<const char*>(p) + 1024);
    return widen(p);
  }
  T padded[LANES];
  for (int64_t i = 0; i < LANES; ++i) padded[i] = i < count ? p[i] : fill;
  return widen(padded);
}

// Eight floats from p, of which `count` are wanted and `there` may be read; the others are `fill`.
HD Eight load_eight(const float* p, int64_t count, int64_t there, float fill) {
  const Eight rest = Eight{} + fill;
  Eight x = rest;
  if (there >= 8)
    x = raw<Eight>(p);
  else
    for (int64_t i = 0; i < there; ++i) x[i] = p[i];
  typedef int32_t EightInt __attribute__((vector_size(32)));
  return EightInt{0, 1, 2, 3, 4, 5, 6, 7} < static_cast<int32_t>(count < 8 ? count : 8) ? x : rest;
}

HD LanesByte load_flags(const bool* p, int64_t count) {
  if (count >= LANES) return raw<LanesByte>(p);
  LanesByte flags{};
  for (int64_t i = 0; i < count; ++i) flags[i] = p[i];
  return flags;
}

template <class T>
HD void store(T* p, int64_t count, Lanes x) {
  if (count >= LANES) return narrow(p, x);
  T padded[LANES];
  narrow(padded, x);
  for (int64_t i = 0; i < count; ++i) p[i] = padded[i];
}

inline float total(Lanes v) {
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  return v[0];
}

// The halves of a vector, in registers: taken one by one its lanes cost more than what is done with them.
template <class H, class V>
void halves(const V& v, H& first, H& second) {
  static_assert(2 * sizeof(H) == sizeof(V));
  memcpy(&first, &v, sizeof first);
  memcpy(&second, reinterpret_cast<const char*>(&v) + sizeof first, sizeof second);
}

typedef double TwoWide __attribute__((vector_size(16)));
typedef double FourWide __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));

// ((v0 + v4) + (v2 + v6)) + ((v1 + v5) + (v3 + v7))
inline double total(Wide v) {
  FourWide a, b;
  halves(v, a, b);
  TwoWide c, d;
  halves(a + b, c, d);
  c += d;
  return c[0] + c[1];
}

// The least and the largest lane of a vector without NaN.
inline float least(Eight v) {
  Four a, b;
  halves(v, a, b);
  a = b < a ? b : a;
  const float x = a[1] < a[0] ? a[1] : a[0], y = a[3] < a[2] ? a[3] : a[2];
  return y < x ? y : x;
}
inline float largest(Eight v) { return -least(-v); }

// v from lane BY on; the last lanes are `fill`.
template <int BY>
HD Lanes shifted(Lanes v, float fill) {
#ifdef __clang__
  Lanes out = Lanes{} + fill;
  for (int i = 0; i + BY < LANES; ++i) out[i] = v[i + BY];
  return out;
#else
  LanesInt from;
  for (int i = 0; i < LANES; ++i) from[i] = i + BY;
  return __builtin_shuffle(v, Lanes{} + fill, from);
#endif
}

template <int BY>
HD Affine<Lanes> shifted(const Affine<Lanes>& a) {
  return {shifted<BY>(a.add, 0.0f), shifted<BY>(a.carry, 1.0f)};
}

inline float largest(Lanes v) {
  float top = v[0];
  for (int i = 1; i < LANES; ++i) top = v[i] > top ? v[i] : top;
  return top;
}

inline DenoiseSums<double> total(const DenoiseSums<Lanes>& s) {
  return {total(s.square), total(s.ratio), total(s.distance)};
}
inline Spread total(const SpreadOf<Eight, Wide>& s) {
  return {total(s.count), total(s.sum), total(s.squares), least(s.low), largest(s.high)};
}
inline SurrogateSums<double> total(const SurrogateSums<Lanes>& s) {
  return {total(s.value), total(s.ratio), total(s.low), total(s.high), total(s.count)};
}

}  // namespace mmrl
