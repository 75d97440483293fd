// What one thread of a CUDA block does, for cuda.cu and for its emulation in emulated.cpp. A block of THREADS takes a
// chunk of a row, each thread PACK adjacent elements at a time; the threads' results are merged by a tree.
#pragma once
#include "arithmetic.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace mmrl {

constexpr int WARP = 32;

HD float to_float(float x) { return x; }
HD float to_float(Bfloat16 x) { return float_of(static_cast<int32_t>(static_cast<uint32_t>(x.bits) << 16)); }
HD float to_float(Half x) {
#ifdef __CUDACC__
  return __half2float(__ushort_as_half(x.bits));
#else
  _Float16 h;
  memcpy(&h, &x, sizeof h);
  return static_cast<float>(h);
#endif
}

template <class T>
struct alignas(sizeof(T) * PACK < 16 ? sizeof(T) * PACK : 16) Packed {
  T element[PACK];
};

// PACK elements from p[i]; beyond `end` they are `fill`. `aligned` rows are read 16 bytes at a time.
template <class T>
HD Packed<T> load_pack(const T* p, int64_t i, int64_t end, bool aligned, T fill = T{}) {
  if (aligned && i + PACK <= end) return *reinterpret_cast<const Packed<T>*>(p + i);
  Packed<T> pack;
  for (int j = 0; j < PACK; ++j) pack.element[j] = i + j < end ? p[i + j] : fill;
  return pack;
}

template <class T>
HD void store_pack(T* p, int64_t i, int64_t end, bool aligned, const Packed<T>& pack) {
  if (aligned && i + PACK <= end) {
#ifdef __CUDA_ARCH__
    // At once: nvcc would store elements of 16 bits one by one, and words of them too.
    if constexpr (sizeof(T) == 2) {
      const auto word = [&](int k) {
        return pack.element[2 * k].bits | static_cast<uint32_t>(pack.element[2 * k + 1].bits) << 16;
      };
      __stwb(reinterpret_cast<uint4*>(p + i), make_uint4(word(0), word(1), word(2), word(3)));
      return;
    }
#endif
    *reinterpret_cast<Packed<T>*>(p + i) = pack;
    return;
  }
  for (int j = 0; j < PACK; ++j)
    if (i + j < end) p[i + j] = pack.element[j];
}

template <class T>
struct DenoiseView {  // one row; `next` is the noise of a step; the last five may be null
  const float *x, *next;
  const T* v;
  const float* mean_old;
  const T *v_old, *v_ref;
  float *stepped, *mean;
  bool aligned;
};

template <class T>
HD DenoiseSums<float> denoise_thread(const DenoiseView<T>& row, Coefficients c, int64_t begin, int64_t end, int thread) {
  DenoiseSums<float> sums;
  for (int64_t i = begin + thread * PACK; i < end; i += THREADS * PACK) {
    const Packed<float> x = load_pack(row.x, i, end, row.aligned), next = load_pack(row.next, i, end, row.aligned);
    const Packed<T> v = load_pack(row.v, i, end, row.aligned);
    Packed<float> old{};
    Packed<T> v_old = v, v_ref = v;
    if (row.mean_old) old = load_pack(row.mean_old, i, end, row.aligned);
    if (row.v_old) v_old = load_pack(row.v_old, i, end, row.aligned);
    if (row.v_ref) v_ref = load_pack(row.v_ref, i, end, row.aligned);
    for (int j = 0; j < PACK; ++j) {
      const float velocity = to_float(v.element[j]);
      const float mean = transition_mean(c, x.element[j], velocity), gap = next.element[j] - mean;
      sums.likelihood(gap);
      if (row.mean_old) sums.log_ratio(gap, mean - old.element[j]);
      if (row.v_old) sums.log_ratio(gap, c.a_v * (velocity - to_float(v_old.element[j])));
      if (row.v_ref) sums.divergence(velocity, to_float(v_ref.element[j]));
    }
  }
  return sums;
}

template <class T>
HD DenoiseSums<float> step_thread(const DenoiseView<T>& row, Coefficients c, int64_t begin, int64_t end, int thread) {
  DenoiseSums<float> sums;
  for (int64_t i = begin + thread * PACK; i < end; i += THREADS * PACK) {
    const Packed<float> x = load_pack(row.x, i, end, row.aligned), noise = load_pack(row.next, i, end, row.aligned);
    const Packed<T> v = load_pack(row.v, i, end, row.aligned);
    Packed<float> mean, stepped;
    for (int j = 0; j < PACK; ++j) {
      mean.element[j] = transition_mean(c, x.element[j], to_float(v.element[j]));
      stepped.element[j] = mean.element[j] + c.std * noise.element[j];
      sums.likelihood(stepped.element[j] - mean.element[j]);
    }
    store_pack(row.stepped, i, end, row.aligned, stepped);
    if (row.mean) store_pack(row.mean, i, end, row.aligned, mean);
  }
  return sums;
}

template <class T>
HD T least();
template <>
HD float least<float>() { return -INFINITY; }
template <>
HD Half least<Half>() { return {0xfc00}; }
template <>
HD Bfloat16 least<Bfloat16>() { return {0xff80}; }

template <class T>
HD Softmax<float> token_thread(const T* logits, float scale, int64_t begin, int64_t end, bool aligned, int thread) {
  Softmax<float> state;
  for (int64_t i = begin + thread * PACK; i < end; i += THREADS * PACK) {
    const Packed<T> pack = load_pack(logits, i, end, aligned, least<T>());
    float z[PACK], peak = state.peak;
    for (int j = 0; j < PACK; ++j) {
      z[j] = to_float(pack.element[j]) * scale;
      peak = z[j] > peak ? z[j] : peak;
    }
    state = rebased(state, peak);
    const float base = peak == -INFINITY ? 0.0f : peak;
    for (int j = 0; j < PACK; ++j) softmax_add(z[j], base, state.sum, state.slope, state.square);
  }
  return state;
}

// Threads' results meet pairwise, a warp at a time and then the first of all warps.
template <class G>
HD void meet(DenoiseSums<G>& a, const DenoiseSums<G>& b) { a.add(b); }
template <class G>
HD void meet(SurrogateSums<G>& a, const SurrogateSums<G>& b) { a.add(b); }
template <class G>
HD void meet(Softmax<G>& a, const Softmax<G>& b) { a = merged(a, b); }
HD void meet(Spread& a, const Spread& b) { a.add(b); }

}  // namespace mmrl
