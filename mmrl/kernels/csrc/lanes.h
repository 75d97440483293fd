// Sixteen floats at a time, by the compiler's vector extension (one zmm, two ymm or four xmm registers): memory to lanes
// and back, sums over lanes.
#pragma once
#include "arithmetic.h"

namespace mmrl {

typedef uint16_t LanesShort __attribute__((vector_size(32)));
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
HD Lanes widen(const bool* p) {
  return __builtin_convertvector(__builtin_convertvector(raw<LanesByte>(p), LanesInt), Lanes);
}

HD void narrow(float* p, Lanes x) { memcpy(p, &x, sizeof x); }
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
  if (count >= LANES) return widen(p);
  T padded[LANES];
  for (int64_t i = 0; i < LANES; ++i) padded[i] = i < count ? p[i] : fill;
  return widen(padded);
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

inline float largest(Lanes v) {
  float top = v[0];
  for (int i = 1; i < LANES; ++i) top = v[i] > top ? v[i] : top;
  return top;
}

inline DenoiseSums<double> total(const DenoiseSums<Lanes>& s) {
  return {total(s.square), total(s.ratio), total(s.distance)};
}
inline SurrogateSums<double> total(const SurrogateSums<Lanes>& s) {
  return {total(s.value), total(s.ratio), total(s.low), total(s.high), total(s.count)};
}

}  // namespace mmrl
