// The mathematics of every operator, once: included by cpu.cpp, by cuda.cu and by emulated.cpp, which runs the CUDA
// blocks thread by thread on the CPU.
//
// F is a float, or 16 floats at a time (Lanes). Products and sums are rounded one by one (no contraction into fused
// multiply-adds), so that every machine computes the same mean from the same inputs, and the same one as PyTorch.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __FMA__
#include <immintrin.h>
#endif

#ifdef __CUDACC__
#define HD __host__ __device__ __forceinline__
#else
#define HD inline __attribute__((always_inline))
#endif

namespace mmrl {

// A row is cut into chunks of this many elements, whatever the batch, the threads or the device; the sums of the
// chunks are added in order.
constexpr int64_t CHUNK = 8192;
constexpr int THREADS = 256;  // of a CUDA block
constexpr int PACK = 8;       // consecutive elements that a CUDA thread takes at a time

HD int64_t chunks_of(int64_t size) { return (size + CHUNK - 1) / CHUNK; }

// ---- 16-bit numbers -------------------------------------------------------------------------------------------------

struct Bfloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// ---- exponential ----------------------------------------------------------------------------------------------------

HD int32_t bits_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
HD float float_of(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

#ifndef __CUDACC__
constexpr int64_t LANES = 16;
typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t LanesInt __attribute__((vector_size(64)));
HD LanesInt bits_of(Lanes x) { return (LanesInt)x; }
HD Lanes float_of(LanesInt x) { return (Lanes)x; }
#endif

// exp(x), 0 below -87.3, inf above 88.7, NaN for NaN; relative error below 2e-7.
template <class F>
HD F exponential(F x) {
#ifdef __CUDA_ARCH__
  return x < -87.3f ? 0.0f : __expf(x);
#else
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
  const F shifted = x * 1.44269504f + magic;
  const F n = shifted - magic;
  const F r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // the first product is exact
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const F y = p * (r * r) + r + 1.0f;
  // 2^n in two factors, because n reaches 128.
  const auto whole = bits_of(shifted) - bits_of(magic);
  const auto half = whole >> 1;
  F result = y * float_of((half + 127) << 23) * float_of((whole - half + 127) << 23);
  result = x < -87.3f ? F{} : result;
  return x > 88.72f ? F{} + INFINITY : result;
#endif
}

// a b + c rounded once where the processor can. Only for exponentials: transition means round after each operation.
HD float multiply_add(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}
#ifndef __CUDACC__
HD Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  typedef float Half8 __attribute__((vector_size(32)));
  Half8 x[2], y[2], z[2];
  memcpy(x, &a, 64), memcpy(y, &b, 64), memcpy(z, &c, 64);
  for (int i = 0; i < 2; ++i) x[i] = (Half8)_mm256_fmadd_ps((__m256)x[i], (__m256)y[i], (__m256)z[i]);
  memcpy(&a, x, 64);
  return a;
#else
  return a * b + c;
#endif
}
#endif

// exp(x) for x in [-87.3, 0] or NaN; relative error below 2e-7, and exactly 1 at 0.
template <class F>
HD F exponential_below_1(F x) {
#ifdef __CUDA_ARCH__
  return __expf(x);
#else
  const F none = F{}, magic = none + 12583039.0f;  // 1.5 * 2^23 + 127: the low bits then hold the exponent's field
  const F shifted = multiply_add(x, none + 1.44269504f, magic);
  const F n = shifted - magic;
  const F r = multiply_add(n, none + 2.12194440e-4f, multiply_add(n, none - 0.693359375f, x));
  F p = multiply_add(r, none + 1.9875691500e-4f, none + 1.3981999507e-3f);
  p = multiply_add(p, r, none + 8.3334519073e-3f);
  p = multiply_add(p, r, none + 4.1665795894e-2f);
  p = multiply_add(p, r, none + 1.6666665459e-1f);
  p = multiply_add(p, r, none + 5.0000001201e-1f);
  return (multiply_add(p, r * r, r) + 1.0f) * float_of(bits_of(shifted) << 23);
#endif
}

// ---- denoising: mean = a_x x + a_v v, x' = mean + std noise ---------------------------------------------------------

struct Coefficients {
  float a_x, a_v, std;
};

template <class F>
HD F transition_mean(Coefficients c, F x, F v) {
  return c.a_x * x + c.a_v * v;
}

// What one row's likelihood, log-ratio and divergence are made of, summed over its elements.
template <class F>
struct DenoiseSums {
  F square{}, ratio{}, distance{};

  HD void likelihood(F gap) { square += gap * gap; }  // gap = x' - mean
  // log Normal(x'; mean) - log Normal(x'; mean_old) in its direct form, times 2 std^2; moved = mean - mean_old
  HD void log_ratio(F gap, F moved) { ratio += moved * (2.0f * gap + moved); }
  HD void divergence(F v, F v_ref) {
    const F apart = v - v_ref;
    distance += apart * apart;
  }
  template <class G>
  HD void add(const DenoiseSums<G>& other) {
    square += other.square;
    ratio += other.ratio;
    distance += other.distance;
  }
};

struct DenoiseRow {
  float logp, ratio, kl;
};

// `size` elements were summed; their mean is reported, or their sum.
HD DenoiseRow finish_denoise(const DenoiseSums<double>& sums, Coefficients c, int64_t size, bool sum) {
  if (c.std == 0) return {0, 0, 0};  // a deterministic step is no decision
  if (!(c.std > 0)) return {NAN, NAN, NAN};
  const double d = static_cast<double>(size), s = c.std, scale = (sum ? 1.0 : 1.0 / d) / (2 * s * s);
  const double constant = (sum ? d : 1.0) * (log(s) + 0.91893853320467274178);  // log sqrt(2 pi)
  return {static_cast<float>(-sums.square * scale - constant), static_cast<float>(sums.ratio * scale),
          static_cast<float>(sums.distance * scale * c.a_v * c.a_v)};
}

// d/dv of g_logp logp + g_ratio log_ratio + g_kl kl = towards (x' - mean) + apart (v - v_ref)
struct DenoiseSlope {
  float towards, apart;
};

HD DenoiseSlope denoise_slope(Coefficients c, float g_logp, float g_ratio, float g_kl, int64_t size, bool sum) {
  if (c.std == 0) return {0, 0};
  const double s = c.std, scale = c.std > 0 ? (sum ? 1.0 : 1.0 / static_cast<double>(size)) / (s * s) : NAN;
  const double g = static_cast<double>(g_logp) + g_ratio;
  return {static_cast<float>(g * c.a_v * scale), static_cast<float>(g_kl * scale * c.a_v * c.a_v)};
}

template <class F>
HD F denoise_gradient(DenoiseSlope slope, F next, F mean, F v, F v_ref) {
  return slope.towards * (next - mean) + slope.apart * (v - v_ref);
}

// ---- tokens: softmax of z = logit / temperature ---------------------------------------------------------------------

// Of some columns: the largest z, and with e = exp(z - peak) the sums of e, (z - peak) e and e^2. Measuring from the
// peak keeps the entropy exact when all logits are shifted.
template <class G>
struct Softmax {
  G peak = -INFINITY, sum{}, slope{}, square{};
};

// d, but at least -87: what is further below, -inf too, adds e^-87 = 2e-38 to a sum of at least 1. NaN stays NaN.
template <class F>
HD F bounded(F d) {
  return d < -87.0f ? F{} - 87.0f : d;
}

template <class F, class G>
HD void softmax_add(F z, float peak, G& sum, G& slope, G& square) {
  const F d = bounded(z - peak), e = exponential_below_1(d);
  sum += e;
  slope = multiply_add(d, e, slope);
  square = multiply_add(e, e, square);
}

// Measured from `peak`, which is at least the own peak.
template <class G>
HD Softmax<G> rebased(const Softmax<G>& a, G peak) {
  const G shift = a.peak - peak;
  if (!(shift < 0) || a.peak == -INFINITY) return a.peak == peak ? a : Softmax<G>{peak, a.sum, a.slope, a.square};
  const G c = shift < G(-700) ? G(0) : static_cast<G>(exp(shift));
  return {peak, c * a.sum, c * (a.slope + shift * a.sum), c * c * a.square};
}

template <class G>
HD Softmax<G> merged(const Softmax<G>& a, const Softmax<G>& b) {
  const G peak = a.peak < b.peak ? b.peak : a.peak;
  const Softmax<G> p = rebased(a, peak), q = rebased(b, peak);
  return {peak, p.sum + q.sum, p.slope + q.slope, p.square + q.square};
}

struct TokenRow {
  float logp, entropy, square, peak, log_sum;
};

HD TokenRow finish_token(const Softmax<double>& s, float target) {
  const double log_sum = log(s.sum);
  return {static_cast<float>(target - s.peak - log_sum), static_cast<float>(log_sum - s.slope / s.sum),
          static_cast<float>(s.square / (s.sum * s.sum)), static_cast<float>(s.peak), static_cast<float>(log_sum)};
}

struct TokenSlope {
  float g_logp, g_entropy, g_square, entropy, square, peak, log_sum;
};

// d/dz of g_logp logp + g_entropy entropy + g_square square, at columns that are not the target; there add g_logp.
template <class F>
HD F token_gradient(const TokenSlope& s, F z) {
  const F exact = z - s.peak - s.log_sum, logp = bounded(exact);
  const F e = exponential_below_1(logp), p = exact < -87.0f ? F{} : e;  // nothing to the impossible
  return p * (2.0f * s.g_square * (p - s.square) - s.g_entropy * (logp + s.entropy) - s.g_logp);
}

// ---- groups ---------------------------------------------------------------------------------------------------------

enum Baseline : int64_t { MEAN, LEAVE_ONE_OUT, NONE };
enum Scale : int64_t { GROUP_STD, BATCH_STD, UNSCALED };

HD double widened(float x) { return x; }
#ifndef __CUDACC__
typedef float Eight __attribute__((vector_size(32)));
typedef double Wide __attribute__((vector_size(64)));
HD Wide widened(Eight x) { return __builtin_convertvector(x, Wide); }
#endif

// sum_k w_k r_k; NaN where a component that counts is NaN
HD float combined(const float* rewards, const float* weights, int64_t components) {
  double total = 0;
  for (int64_t k = 0; k < components; ++k)
    if (weights[k] != 0) total += static_cast<double>(weights[k]) * rewards[k];
  return static_cast<float>(total);
}

// Of the scored values of a group; F is a float and D a double, or both are eight of them.
template <class F, class D>
struct SpreadOf {
  D count{}, sum{}, squares{};
  F low = F{} + INFINITY, high = F{} - INFINITY;

  HD void look(F r) {
    const D wide = widened(r), one = D{} + 1.0, none = D{};
    count += wide == wide ? one : none;
    sum += wide == wide ? wide : none;
    low = r < low ? r : low;
    high = r > high ? r : high;
  }
  HD void gap(F r, double mean) {
    const D apart = widened(r) - mean, none = D{};
    squares += apart == apart ? apart * apart : none;
  }
  HD void add(const SpreadOf& o) {
    count += o.count;
    sum += o.sum;
    squares += o.squares;
    low = o.low < low ? o.low : low;
    high = o.high > high ? o.high : high;
  }
  HD bool equal() const { return !(high > low); }
  HD double mean() const { return count == 0 ? 0 : equal() ? low : sum / count; }
  HD double std() const { return equal() ? 0 : sqrt(squares / (count - 1)); }
};
using Spread = SpreadOf<float, double>;

// What is subtracted from the rewards of a group, and what then multiplies them.
struct GroupLine {
  double baseline, factor;
};

HD GroupLine line_of(const Spread& group, double scale_std, int64_t baseline, int64_t scale, double eps) {
  double factor = 1;
  if (baseline == LEAVE_ONE_OUT && group.count > 1) factor = group.count / (group.count - 1);
  if (baseline != NONE && group.equal()) factor = 0;
  if (scale != UNSCALED) factor = scale_std > 0 ? factor / (scale_std + eps) : 0;
  return {baseline == NONE ? 0 : group.mean(), factor};
}

HD float advantage_of(float r, GroupLine line) {
  return r == r ? static_cast<float>((r - line.baseline) * line.factor) : 0;
}
#ifndef __CUDACC__
HD Eight advantage_of(Eight r, GroupLine line) {
  const Eight moved = __builtin_convertvector((widened(r) - line.baseline) * line.factor, Eight);
  return r == r ? moved : Eight{};
}
#endif

// ---- returns --------------------------------------------------------------------------------------------------------

// A_t = add + carry A_{t+1}
template <class F>
struct Affine {
  F add{}, carry = F{} + 1.0f;
};

// Where nothing is carried what comes later makes no difference, even if it is not finite.
template <class F>
HD F carried_on(F add, F carry, F later) {
  const F sum = add + carry * later;
  return carry == 0.0f ? add : sum;
}

// first(second(A)); a carry is finite
template <class F>
HD Affine<F> after(Affine<F> first, Affine<F> second) {
  return {carried_on(first.add, first.carry, second.add), first.carry * second.carry};
}

HD float chosen(bool which, float a, float b) { return which ? a : b; }
#ifndef __CUDACC__
typedef uint8_t LanesByte __attribute__((vector_size(16)));
typedef uint16_t LanesShort __attribute__((vector_size(32)));
HD LanesInt widened(LanesByte x) {  // in two steps: in one, compilers take the bytes one by one
  return __builtin_convertvector(__builtin_convertvector(x, LanesShort), LanesInt);
}
HD Lanes chosen(LanesByte which, Lanes a, Lanes b) { return widened(which) != 0 ? a : b; }
#endif

// F is a float with M a bool, or 16 floats with M 16 bytes of 0 or 1. A step outside the mask, and one that ends an
// episode, carries nothing.
template <class F, class M>
struct GaeStep {
  F reward, value, next_value, bootstrap;
  M counted, next_counted, terminated, truncated;  // next_counted is 0 at the last step

  HD M runs_on() const { return counted & next_counted & (terminated ^ 1) & (truncated ^ 1); }
  HD M is_cut() const { return counted & (terminated ^ 1) & (truncated | (next_counted ^ 1)); }
  HD F delta(float gamma) const {
    const F none = F{}, ahead = chosen(runs_on(), next_value, chosen(is_cut(), bootstrap, none));
    return chosen(counted, reward + gamma * ahead - value, none);
  }
  HD F carry(float decay) const { return chosen(runs_on(), F{} + decay, F{}); }
};

struct GaeRow {
  const float *reward, *value, *bootstrap;
  const bool *terminated, *truncated, *counted;
  int64_t steps;

  HD GaeStep<float, bool> at(int64_t t) const {
    const bool last = t + 1 == steps;
    return {reward[t],  value[t],      last ? 0.0f : value[t + 1], bootstrap ? bootstrap[t] : NAN,
            counted[t], !last && counted[t + 1], terminated[t], truncated[t]};
  }
  // of one lane of a warp; before the first step it changes nothing
  HD Affine<float> lane(int64_t t, float gamma, float decay) const {
    return t < 0 ? Affine<float>{} : Affine<float>{at(t).delta(gamma), at(t).carry(decay)};
  }
};

// ---- surrogate: -min(r A, clamp(r, low, high) A) --------------------------------------------------------------------

enum Reduction : int64_t { TOKEN_MEAN, SEQUENCE_MEAN, SEQUENCE_SUM };

template <class F>
struct SurrogateSums {
  F value{}, ratio{}, low{}, high{}, count{};

  HD void look(F log_ratio, F a, F counted, float bottom, float top) {
    const F r = exponential(log_ratio), one = F{} + 1.0f, none = F{};
    const F floored = r < bottom ? F{} + bottom : r;
    const F clamped = floored > top ? F{} + top : floored;
    const F whole = r * a, held = clamped * a;
    const F lesser = held < whole ? held : whole;
    value -= counted != 0.0f ? lesser : none;
    ratio += counted != 0.0f ? r : none;
    const F is_low = r < bottom ? one : none, is_high = r > top ? one : none;
    low += a < 0.0f ? is_low * counted : none;
    high += a > 0.0f ? is_high * counted : none;
    count += counted;
  }
  template <class G>
  HD void add(const SurrogateSums<G>& o) {
    value += o.value;
    ratio += o.ratio;
    low += o.low;
    high += o.high;
    count += o.count;
  }
};

template <class F>
HD F surrogate_gradient(float g, F log_ratio, F a, F counted, float bottom, float top) {
  const F r = exponential(log_ratio), none = F{};
  const F slope = -g * (r * a);
  // Outside the bounds the clamped branch is flat; it is taken unless it is the larger one.
  const F below = a >= 0.0f ? slope : none, above = a <= 0.0f ? slope : none;
  const F floored = r < bottom ? below : slope;
  const F held = r > top ? above : floored;
  return counted != 0.0f ? held : none;
}

// Factor of one row's sum, before the division by the denominator.
HD double row_factor(double count, int64_t reduction) {
  return reduction == SEQUENCE_MEAN ? 1.0 / (count > 1 ? count : 1) : 1.0;
}

}  // namespace mmrl
