// The CUDA blocks of denoise_logprob, token_logprob and gae run thread by thread on the CPU, with the strides and the
// order of merging that a GPU has: for tests on machines without one.
#include "block.h"
#include "tensors.h"

namespace mmrl {
namespace {

template <class S>
S met(std::vector<S> of_threads) {
  for (int first = 0; first < THREADS; first += WARP)
    for (int offset = WARP / 2; offset; offset /= 2)
      for (int lane = 0; lane < offset; ++lane) meet(of_threads[first + lane], of_threads[first + lane + offset]);
  for (int offset = THREADS / WARP / 2; offset; offset /= 2)
    for (int warp = 0; warp < offset; ++warp) meet(of_threads[warp * WARP], of_threads[(warp + offset) * WARP]);
  return of_threads[0];
}

template <class Work>
void for_dtype(const Tensor& t, Work work) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return work(float{});
    case ScalarType::Half: return work(Half{});
    default: return work(Bfloat16{});
  }
}

// x, v, x_next, v_old, v_ref: [N, D] contiguous; coefficients: [N, 3]. Returns logp, log_ratio, kl: [N, 3].
Tensor denoise(Tensor x, Tensor v, Tensor next, Tensor v_old, Tensor v_ref, Tensor coefficients, bool aligned) {
  const int64_t rows = x.size(0), size = x.size(1);
  const Tensor out = fresh(x, {rows, 3});
  for_dtype(v, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t o = r * size;
      const float* c = flat<const float>(coefficients) + 3 * r;
      const DenoiseView<T> row{flat<const float>(x) + o,  flat<const float>(next) + o, flat<const T>(v) + o,
                               nullptr,                   flat<const T>(v_old) + o,    flat<const T>(v_ref) + o,
                               nullptr,                   nullptr,                     aligned};
      DenoiseSums<double> whole;
      for (int64_t begin = 0; begin < size; begin += CHUNK) {
        std::vector<DenoiseSums<float>> threads(THREADS);
        for (int t = 0; t < THREADS; ++t)
          threads[t] = denoise_thread(row, {c[0], c[1], c[2]}, begin, std::min(begin + CHUNK, size), t);
        whole.add(met(threads));
      }
      const DenoiseRow result = finish_denoise(whole, {c[0], c[1], c[2]}, size, false);
      memcpy(flat<float>(out) + 3 * r, &result, sizeof result);
    }
  });
  return out;
}

// logits: [N, V] contiguous; targets: [N]. Returns logp, entropy, sum of squares, peak, log of the sum: [N, 5].
Tensor token(Tensor logits, Tensor targets, double scale, bool aligned) {
  const int64_t rows = logits.size(0), size = logits.size(1);
  const Tensor out = fresh(logits, {rows, 5});
  for_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t r = 0; r < rows; ++r) {
      const T* z = flat<const T>(logits) + r * size;
      Softmax<double> whole;
      for (int64_t begin = 0; begin < size; begin += CHUNK) {
        std::vector<Softmax<float>> threads(THREADS);
        for (int t = 0; t < THREADS; ++t)
          threads[t] = token_thread(z, static_cast<float>(scale), begin, std::min(begin + CHUNK, size), aligned, t);
        const Softmax<float> s = met(threads);
        whole = merged(whole, Softmax<double>{s.peak, s.sum, s.slope, s.square});
      }
      const float target = to_float(z[flat<const int64_t>(targets)[r]]) * static_cast<float>(scale);
      const TokenRow result = finish_token(whole, target);
      memcpy(flat<float>(out) + 5 * r, &result, sizeof result);
    }
  });
  return out;
}

// All [B, T] contiguous. Returns advantages.
Tensor gae(Tensor rewards, Tensor values, Tensor terminated, Tensor truncated, Tensor mask, Tensor bootstrap,
           double gamma, double lam) {
  const int64_t rows = rewards.size(0), steps = rewards.size(1);
  const Tensor out = fresh(rewards, {rows, steps});
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t o = r * steps;
    const GaeRow row{flat<const float>(rewards) + o, flat<const float>(values) + o, flat<const float>(bootstrap) + o,
                     flat<const bool>(terminated) + o, flat<const bool>(truncated) + o, flat<const bool>(mask) + o,
                     steps};
    float carried = 0;
    for (int64_t stop = steps; stop > 0; stop -= WARP) {
      Affine<float> lanes[WARP];
      for (int lane = 0; lane < WARP; ++lane)
        lanes[lane] = row.lane(stop - 1 - lane, static_cast<float>(gamma), static_cast<float>(gamma * lam));
      for (int offset = 1; offset < WARP; offset *= 2)
        for (int lane = WARP - 1; lane >= offset; --lane) lanes[lane] = after(lanes[lane], lanes[lane - offset]);
      for (int lane = 0; lane < WARP; ++lane)
        if (stop - 1 - lane >= 0)
          flat<float>(out)[o + stop - 1 - lane] = carried_on(lanes[lane].add, lanes[lane].carry, carried);
      carried = carried_on(lanes[WARP - 1].add, lanes[WARP - 1].carry, carried);
    }
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(mmrl_emulated, m) {
  m.def("denoise(Tensor x, Tensor v, Tensor n, Tensor v_old, Tensor v_ref, Tensor c, bool aligned) -> Tensor");
  m.def("token(Tensor logits, Tensor targets, float scale, bool aligned) -> Tensor");
  m.def("gae(Tensor r, Tensor v, Tensor e, Tensor u, Tensor m, Tensor b, float gamma, float lam) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mmrl_emulated, CPU, m) {
  m.impl("denoise", TORCH_BOX(&denoise));
  m.impl("token", TORCH_BOX(&token));
  m.impl("gae", TORCH_BOX(&gae));
}

}  // namespace mmrl
