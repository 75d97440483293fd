// The operators on CUDA. A block takes one chunk of a row and writes its sums; a second, small kernel adds the chunks
// of every row in order. No atomics: the same inputs give the same bits, whatever else is in the batch.
#include <cuda_runtime.h>

#include "block.h"
#include "tensors.h"

// Lets the library load where there is no GPU build of torch (its kernels cannot be called there).
#pragma weak aoti_torch_get_current_cuda_stream

namespace mmrl {
namespace {

constexpr int WARPS = THREADS / WARP;

// ---- host side ------------------------------------------------------------------------------------------------------

class OnDevice {  // makes the tensor's device current while a kernel is launched
 public:
  explicit OnDevice(const Tensor& t) {
    cudaGetDevice(&before_);
    cudaSetDevice(t.get_device_index());
    void* stream = nullptr;
    aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream);
    stream_ = static_cast<cudaStream_t>(stream);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  operator cudaStream_t() const { return stream_; }
  static void check() {
    const cudaError_t error = cudaGetLastError();
    STD_TORCH_CHECK(error == cudaSuccess, "CUDA kernel launch: ", cudaGetErrorString(error));
  }

 private:
  int before_ = 0;
  cudaStream_t stream_ = nullptr;
};

template <class Work>
void for_dtype(const Tensor& t, const char* name, Work work) {
  switch (t.scalar_type()) {
    case ScalarType::Float: work(float{}); break;
    case ScalarType::Half: work(Half{}); break;
    case ScalarType::BFloat16: work(Bfloat16{}); break;
    default: STD_TORCH_CHECK(false, name, " must be float32, bfloat16 or float16");
  }
  OnDevice::check();
}

// Whether every row starts at a multiple of 16 bytes.
template <class T>
bool is_aligned(const T* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * static_cast<int64_t>(sizeof(T)) % 16 == 0;
}
template <class T>
bool is_aligned(const Rows<T>& rows) {
  return is_aligned(rows.data, rows.stride);
}

unsigned blocks(int64_t n) {
  STD_TORCH_CHECK(n < (int64_t{1} << 31), "too many rows for one launch: ", n, " blocks");
  return static_cast<unsigned>(n);
}
unsigned blocks_of_threads(int64_t n) { return blocks((n + THREADS - 1) / THREADS); }

template <class S>
Tensor workspace(const Tensor& like, int64_t parts) {
  static_assert(sizeof(S) % sizeof(double) == 0);
  return fresh(like, {parts, static_cast<int64_t>(sizeof(S) / sizeof(double))}, ScalarType::Double);
}

// ---- meeting of threads ---------------------------------------------------------------------------------------------

template <class S>
__device__ S from_lane_below(const S& s, int offset) {
  static_assert(sizeof(S) % 4 == 0);
  S other;
  uint32_t words[sizeof(S) / 4];
  memcpy(words, &s, sizeof(S));
#pragma unroll
  for (uint32_t& word : words) word = __shfl_down_sync(0xffffffffu, word, offset);
  memcpy(&other, words, sizeof(S));
  return other;
}

// What all threads have, merged; thread 0 holds the result.
template <class S>
__device__ S met(S s) {
  __shared__ S of_warps[WARPS];
#pragma unroll
  for (int offset = WARP / 2; offset; offset /= 2) meet(s, from_lane_below(s, offset));
  __syncthreads();  // of_warps may still be read from a meeting before this one
  if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = s;
  __syncthreads();
  if (threadIdx.x < WARP) {
    s = of_warps[threadIdx.x % WARPS];
#pragma unroll
    for (int offset = WARPS / 2; offset; offset /= 2) meet(s, from_lane_below(s, offset));
  }
  return s;
}

struct Part {  // the chunk of a block
  int64_t row, begin, end;

  __device__ explicit Part(int64_t size) {
    const int64_t chunks = chunks_of(size), chunk = blockIdx.x % chunks;
    row = blockIdx.x / chunks;
    begin = chunk * CHUNK;
    end = begin + CHUNK < size ? begin + CHUNK : size;
  }
};

// ---- denoising ------------------------------------------------------------------------------------------------------

struct PerRow {
  const float *a_x, *a_v, *std;
  __device__ Coefficients at(int64_t row) const { return {a_x[row], a_v[row], std[row]}; }
};

template <class T>
struct DenoiseInputs {
  Rows<const float> x, next, mean_old;
  Rows<const T> v, v_old, v_ref;
  float *stepped, *mean;
  PerRow coefficients;
  int64_t size;
  bool aligned;

  __device__ DenoiseView<T> at(int64_t row) const {
    return {x.data + row * x.stride,
            next.data + row * next.stride,
            v.data + row * v.stride,
            mean_old.data ? mean_old.data + row * mean_old.stride : nullptr,
            v_old.data ? v_old.data + row * v_old.stride : nullptr,
            v_ref.data ? v_ref.data + row * v_ref.stride : nullptr,
            stepped ? stepped + row * size : nullptr,
            mean ? mean + row * size : nullptr,
            aligned};
  }
};

template <class T>
DenoiseInputs<T> denoise_inputs(const Tensor& x, const Tensor& v, const Tensor& next, const Tensor& a_x,
                                const Tensor& a_v, const Tensor& std, const MaybeTensor& mean_old,
                                const MaybeTensor& v_old, const MaybeTensor& v_ref, int64_t size) {
  DenoiseInputs<T> in{Rows<const float>(x),
                      Rows<const float>(next),
                      Rows<const float>(mean_old),
                      Rows<const T>(v),
                      Rows<const T>(v_old),
                      Rows<const T>(v_ref),
                      nullptr,
                      nullptr,
                      {flat<const float>(a_x), flat<const float>(a_v), flat<const float>(std)},
                      size,
                      false};
  in.aligned = is_aligned(in.x) && is_aligned(in.next) && is_aligned(in.mean_old) && is_aligned(in.v) &&
               is_aligned(in.v_old) && is_aligned(in.v_ref);
  return in;
}

template <class T, bool STEP>
__global__ void __launch_bounds__(THREADS) denoise_chunks(DenoiseInputs<T> in, DenoiseSums<double>* parts) {
  const Part part(in.size);
  const DenoiseView<T> row = in.at(part.row);
  const Coefficients c = in.coefficients.at(part.row);
  const int thread = static_cast<int>(threadIdx.x);
  const DenoiseSums<float> sums = met(STEP ? step_thread(row, c, part.begin, part.end, thread)
                                           : denoise_thread(row, c, part.begin, part.end, thread));
  if (threadIdx.x == 0) parts[blockIdx.x] = {sums.square, sums.ratio, sums.distance};
}

__global__ void __launch_bounds__(THREADS)
denoise_rows(const DenoiseSums<double>* parts, PerRow coefficients, int64_t rows, int64_t size, bool sum, float* logp,
             float* ratio, float* kl) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x, chunks = chunks_of(size);
  if (row >= rows) return;
  DenoiseSums<double> whole;
  for (int64_t c = 0; c < chunks; ++c) whole.add(parts[row * chunks + c]);
  const DenoiseRow result = finish_denoise(whole, coefficients.at(row), size, sum);
  logp[row] = result.logp;
  ratio[row] = result.ratio;
  kl[row] = result.kl;
}

template <class T, bool STEP>
std::tuple<Tensor, Tensor, Tensor> run_denoise(const DenoiseInputs<T>& in, const Tensor& like, int64_t rows, bool sum) {
  const OnDevice stream(like);
  const int64_t parts = rows * chunks_of(in.size);
  const Tensor space = workspace<DenoiseSums<double>>(like, parts);
  auto* sums = static_cast<DenoiseSums<double>*>(space.data_ptr());
  const Tensor logp = fresh(like, {rows}), ratio = fresh(like, {rows}), kl = fresh(like, {rows});
  denoise_chunks<T, STEP><<<blocks(parts), THREADS, 0, stream>>>(in, sums);
  denoise_rows<<<blocks_of_threads(rows), THREADS, 0, stream>>>(sums, in.coefficients, rows, in.size, sum,
                                                                flat<float>(logp), flat<float>(ratio), flat<float>(kl));
  return {logp, ratio, kl};
}

std::tuple<Tensor, Tensor, Tensor> denoise_step(Tensor x, Tensor v, Tensor noise, Tensor a_x, Tensor a_v, Tensor std,
                                                bool sum, bool keep_mean) {
  const DenoiseShape shape(x, v, noise, a_x, a_v, std);
  const Tensor next = fresh(x, {shape.rows, shape.size});
  const Tensor mean = fresh(x, {keep_mean ? shape.rows : 0, shape.size});
  Tensor logp;
  for_dtype(v, "v", [&](auto tag) {
    using T = decltype(tag);
    auto in = denoise_inputs<T>(x, v, noise, a_x, a_v, std, std::nullopt, std::nullopt, std::nullopt, shape.size);
    in.stepped = flat<float>(next);
    in.mean = keep_mean ? flat<float>(mean) : nullptr;
    in.aligned = in.aligned && is_aligned(in.stepped, shape.size) && is_aligned(in.mean, shape.size);
    logp = std::get<0>(run_denoise<T, true>(in, x, shape.rows, sum));
  });
  return {next, logp, mean};
}

std::tuple<Tensor, Tensor, Tensor> denoise_logprob(Tensor x, Tensor v, Tensor next, Tensor a_x, Tensor a_v, Tensor std,
                                                   MaybeTensor mean_old, MaybeTensor v_old, MaybeTensor v_ref,
                                                   bool sum) {
  const DenoiseShape shape(x, v, next, a_x, a_v, std);
  shape.also(mean_old, "mean_old", FLOAT, v);
  shape.also(v_old, "v_old", v.scalar_type(), v);
  shape.also(v_ref, "v_ref", v.scalar_type(), v);
  std::tuple<Tensor, Tensor, Tensor> result;
  for_dtype(v, "v", [&](auto tag) {
    using T = decltype(tag);
    const auto in = denoise_inputs<T>(x, v, next, a_x, a_v, std, mean_old, v_old, v_ref, shape.size);
    result = run_denoise<T, false>(in, x, shape.rows, sum);
  });
  return result;
}

HD void narrowed(float x, float& out) { out = x; }
__device__ __forceinline__ void narrowed(float x, Half& out) { out.bits = __half_as_ushort(__float2half_rn(x)); }
__device__ __forceinline__ void narrowed(float x, Bfloat16& out) {
  out.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

template <class T>
__global__ void __launch_bounds__(THREADS)
denoise_gradients(DenoiseInputs<T> in, const float* g_logp, const float* g_ratio, const float* g_kl, bool sum, T* out) {
  const Part part(in.size);
  const DenoiseView<T> row = in.at(part.row);
  const Coefficients c = in.coefficients.at(part.row);
  const DenoiseSlope slope =
      denoise_slope(c, g_logp[part.row], g_ratio[part.row], g_kl[part.row], in.size, sum);
  for (int64_t i = part.begin + threadIdx.x * PACK; i < part.end; i += THREADS * PACK) {
    const Packed<float> x = load_pack(row.x, i, part.end, row.aligned);
    const Packed<float> next = load_pack(row.next, i, part.end, row.aligned);
    const Packed<T> v = load_pack(row.v, i, part.end, row.aligned);
    Packed<T> ref = v, gradient;
    if (row.v_ref) ref = load_pack(row.v_ref, i, part.end, row.aligned);
#pragma unroll
    for (int j = 0; j < PACK; ++j) {
      const float velocity = to_float(v.element[j]), mean = transition_mean(c, x.element[j], velocity);
      narrowed(denoise_gradient(slope, next.element[j], mean, velocity, to_float(ref.element[j])), gradient.element[j]);
    }
    store_pack(out + part.row * in.size, i, part.end, row.aligned, gradient);
  }
}

Tensor denoise_logprob_backward(Tensor g_logp, Tensor g_ratio, Tensor g_kl, Tensor x, Tensor v, Tensor next,
                                Tensor a_x, Tensor a_v, Tensor std, MaybeTensor v_ref, bool sum) {
  const DenoiseShape shape(x, v, next, a_x, a_v, std);
  shape.also(v_ref, "v_ref", v.scalar_type(), v);
  for (const Tensor* g : {&g_logp, &g_ratio, &g_kl}) check_flat(*g, "gradient", FLOAT, shape.rows, v);
  const Tensor gradient = fresh(v, {shape.rows, shape.size}, v.scalar_type());
  const OnDevice stream(v);
  for_dtype(v, "v", [&](auto tag) {
    using T = decltype(tag);
    auto in = denoise_inputs<T>(x, v, next, a_x, a_v, std, std::nullopt, std::nullopt, v_ref, shape.size);
    in.aligned = in.aligned && is_aligned(flat<T>(gradient), shape.size);
    denoise_gradients<T><<<blocks(shape.rows * chunks_of(shape.size)), THREADS, 0, stream>>>(
        in, flat<const float>(g_logp), flat<const float>(g_ratio), flat<const float>(g_kl), sum, flat<T>(gradient));
  });
  return gradient;
}

// ---- tokens ---------------------------------------------------------------------------------------------------------

template <class T>
struct TokenInputs {
  const T* logits;
  const int64_t* targets;
  LogitsShape shape;
  float scale;
  bool aligned;

  TokenInputs(const Tensor& l, const Tensor& t, const LogitsShape& s, double inverse_temperature)
      : logits(flat<const T>(l)),
        targets(flat<const int64_t>(t)),
        shape(s),
        scale(static_cast<float>(inverse_temperature)),
        aligned(is_aligned(logits, s.outer_stride) && is_aligned(logits, s.inner_stride)) {}
};

template <class T>
__global__ void __launch_bounds__(THREADS) token_chunks(TokenInputs<T> in, Softmax<double>* parts) {
  const Part part(in.shape.vocabulary);
  const Softmax<float> s = met(token_thread(in.logits + in.shape.offset(part.row), in.scale, part.begin, part.end,
                                            in.aligned, static_cast<int>(threadIdx.x)));
  if (threadIdx.x == 0) parts[blockIdx.x] = {s.peak, s.sum, s.slope, s.square};
}

template <class T>
__global__ void __launch_bounds__(THREADS)
token_rows(const Softmax<double>* parts, TokenInputs<T> in, float* logp, float* entropy, float* square, float* peak,
           float* log_sum) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int64_t chunks = chunks_of(in.shape.vocabulary);
  if (row >= in.shape.rows) return;
  Softmax<double> whole;
  for (int64_t c = 0; c < chunks; ++c) whole = merged(whole, parts[row * chunks + c]);
  const int64_t y = in.targets[row];
  const bool known = 0 <= y && y < in.shape.vocabulary;
  const float target = known ? to_float(in.logits[in.shape.offset(row) + y]) * in.scale : NAN;
  const TokenRow r = finish_token(whole, target);
  logp[row] = r.logp;
  entropy[row] = r.entropy;
  square[row] = r.square;
  peak[row] = r.peak;
  log_sum[row] = r.log_sum;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> token_logprob(Tensor logits, Tensor targets,
                                                                 double inverse_temperature) {
  const LogitsShape shape(logits, targets);
  const auto per_row = [&] { return fresh(logits, {shape.rows}); };
  const Tensor logp = per_row(), entropy = per_row(), square = per_row(), peak = per_row(), log_sum = per_row();
  const int64_t parts = shape.rows * chunks_of(shape.vocabulary);
  const Tensor space = workspace<Softmax<double>>(logits, parts);
  auto* states = static_cast<Softmax<double>*>(space.data_ptr());
  const OnDevice stream(logits);
  for_dtype(logits, "logits", [&](auto tag) {
    using T = decltype(tag);
    const TokenInputs<T> in(logits, targets, shape, inverse_temperature);
    token_chunks<T><<<blocks(parts), THREADS, 0, stream>>>(in, states);
    token_rows<T><<<blocks_of_threads(shape.rows), THREADS, 0, stream>>>(states, in, flat<float>(logp),
                                                                         flat<float>(entropy), flat<float>(square),
                                                                         flat<float>(peak), flat<float>(log_sum));
  });
  return {logp, entropy, square, peak, log_sum};
}

struct TokenSaved {
  const float *g_logp, *g_entropy, *g_square, *entropy, *square, *peak, *log_sum;
  __device__ TokenSlope at(int64_t row) const {
    return {g_logp[row], g_entropy[row], g_square[row], entropy[row], square[row], peak[row], log_sum[row]};
  }
};

template <class T>
__global__ void __launch_bounds__(THREADS) token_gradients(TokenInputs<T> in, TokenSaved saved, T* out) {
  const Part part(in.shape.vocabulary);
  const TokenSlope slope = saved.at(part.row);
  const T* z = in.logits + in.shape.offset(part.row);
  const int64_t y = in.targets[part.row];
  for (int64_t i = part.begin + threadIdx.x * PACK; i < part.end; i += THREADS * PACK) {
    const Packed<T> pack = load_pack(z, i, part.end, in.aligned);
    Packed<T> gradient;
#pragma unroll
    for (int j = 0; j < PACK; ++j) {
      const float g = token_gradient(slope, to_float(pack.element[j]) * in.scale);
      narrowed((i + j == y ? g + slope.g_logp : g) * in.scale, gradient.element[j]);
    }
    store_pack(out + part.row * in.shape.vocabulary, i, part.end, in.aligned, gradient);
  }
}

void token_gradient_into(const Tensor& gradient, const Tensor& g_logp, const Tensor& g_entropy, const Tensor& g_square,
                         const Tensor& logits, const Tensor& targets, const Tensor& entropy, const Tensor& square,
                         const Tensor& peak, const Tensor& log_sum, double inverse_temperature) {
  const LogitsShape shape(logits, targets);
  for (const Tensor* t : {&g_logp, &g_entropy, &g_square, &entropy, &square, &peak, &log_sum})
    check_flat(*t, "gradient", FLOAT, shape.rows, logits);
  const TokenSaved saved{flat<const float>(g_logp),  flat<const float>(g_entropy), flat<const float>(g_square),
                         flat<const float>(entropy), flat<const float>(square),    flat<const float>(peak),
                         flat<const float>(log_sum)};
  const OnDevice stream(logits);
  for_dtype(logits, "logits", [&](auto tag) {
    using T = decltype(tag);
    TokenInputs<T> in(logits, targets, shape, inverse_temperature);
    in.aligned = in.aligned && is_aligned(flat<T>(gradient), shape.vocabulary);
    token_gradients<T><<<blocks(shape.rows * chunks_of(shape.vocabulary)), THREADS, 0, stream>>>(in, saved,
                                                                                                 flat<T>(gradient));
  });
}

Tensor token_logprob_backward(Tensor g_logp, Tensor g_entropy, Tensor g_square, Tensor logits, Tensor targets,
                              Tensor entropy, Tensor square, Tensor peak, Tensor log_sum, double inverse_temperature) {
  const auto sizes = logits.sizes();
  const Tensor gradient = fresh(logits, {sizes.begin(), sizes.end()}, logits.scalar_type());
  token_gradient_into(gradient, g_logp, g_entropy, g_square, logits, targets, entropy, square, peak, log_sum,
                      inverse_temperature);
  return gradient;
}

// Into the memory of the logits, which must be contiguous.
void token_logprob_backward_(Tensor g_logp, Tensor g_entropy, Tensor g_square, Tensor logits, Tensor targets,
                             Tensor entropy, Tensor square, Tensor peak, Tensor log_sum, double inverse_temperature) {
  STD_TORCH_CHECK(logits.is_contiguous(), "logits must be contiguous to be overwritten");
  token_gradient_into(logits, g_logp, g_entropy, g_square, logits, targets, entropy, square, peak, log_sum,
                      inverse_temperature);
}

// ---- groups ---------------------------------------------------------------------------------------------------------

struct GroupInputs {
  const float *rewards, *weights;
  const int64_t* group;
  int64_t rows, components, groups, baseline, scale;
  double eps;

  __device__ float reward(int64_t row) const { return combined(rewards + row * components, weights, components); }
};

__device__ Spread spread_of(const GroupInputs& in, int64_t group, bool all) {
  __shared__ Spread result;
  Spread own;
  for (int64_t i = threadIdx.x; i < in.rows; i += THREADS)
    if (all || in.group[i] == group) own.look(in.reward(i));
  own = met(own);
  if (threadIdx.x == 0) result = own;
  __syncthreads();
  const double centre = result.mean();
  Spread squares;
  for (int64_t i = threadIdx.x; i < in.rows; i += THREADS)
    if (all || in.group[i] == group) squares.gap(in.reward(i), centre);
  squares = met(squares);
  if (threadIdx.x == 0) result.squares = squares.squares;
  __syncthreads();
  const Spread finished = result;
  __syncthreads();
  return finished;
}

// One block for each group: it looks through the ids of all rollouts, so that they may stand in any order.
__global__ void __launch_bounds__(THREADS)
group_blocks(GroupInputs in, float* advantage, float* count, float* mean, float* std) {
  const int64_t group = blockIdx.x;
  const Spread spread = spread_of(in, group, false);
  const double divisor = in.scale == BATCH_STD ? spread_of(in, group, true).std() : spread.std();
  const GroupLine line = line_of(spread, divisor, in.baseline, in.scale, in.eps);
  for (int64_t i = threadIdx.x; i < in.rows; i += THREADS) {
    const int64_t g = in.group[i];
    if (g == group) advantage[i] = advantage_of(in.reward(i), line);
    if (group == 0 && (g < 0 || g >= in.groups)) advantage[i] = NAN;  // belongs nowhere
  }
  if (threadIdx.x == 0) {
    count[group] = static_cast<float>(spread.count);
    mean[group] = static_cast<float>(spread.mean());
    std[group] = static_cast<float>(spread.std());
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> group_advantage(Tensor rewards, Tensor weights, Tensor group,
                                                           int64_t groups, int64_t baseline, int64_t scale,
                                                           double eps) {
  const int64_t rows = rewards.size(0), components = rewards.size(1);
  check_flat(rewards, "rewards", FLOAT, rows * components, rewards);
  check_flat(weights, "weights", FLOAT, components, rewards);
  check_flat(group, "group", ScalarType::Long, rows, rewards);
  const Tensor advantage = fresh(rewards, {rows}), count = fresh(rewards, {groups}), mean = fresh(rewards, {groups}),
               std = fresh(rewards, {groups});
  const GroupInputs in{flat<const float>(rewards), flat<const float>(weights), flat<const int64_t>(group),
                       rows, components, groups, baseline, scale, eps};
  const OnDevice stream(rewards);
  group_blocks<<<blocks(groups), THREADS, 0, stream>>>(in, flat<float>(advantage), flat<float>(count),
                                                       flat<float>(mean), flat<float>(std));
  OnDevice::check();
  return {advantage, count, mean, std};
}

// ---- returns --------------------------------------------------------------------------------------------------------

// One warp for each row: 32 steps at a time, from the end, by a scan of affine maps.
__global__ void __launch_bounds__(THREADS)
gae_rows(GaeRow all, int64_t rows, float gamma, float decay, float* advantages, float* returns) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / WARP, o = row * all.steps;
  const int lane = static_cast<int>(threadIdx.x % WARP);
  if (row >= rows) return;
  const GaeRow in{all.reward + o,     all.value + o,     all.bootstrap ? all.bootstrap + o : nullptr,
                  all.terminated + o, all.truncated + o, all.counted + o,
                  all.steps};
  float carried = 0;
  for (int64_t stop = all.steps; stop > 0; stop -= WARP) {
    const int64_t t = stop - 1 - lane;
    Affine<float> step = in.lane(t, gamma, decay);
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
      const Affine<float> later{__shfl_up_sync(0xffffffffu, step.add, offset),
                                __shfl_up_sync(0xffffffffu, step.carry, offset)};
      if (lane >= offset) step = after(step, later);
    }
    const float a = carried_on(step.add, step.carry, carried);
    if (t >= 0) {
      advantages[o + t] = a;
      returns[o + t] = in.counted[t] ? a + in.value[t] : 0.0f;
    }
    carried = __shfl_sync(0xffffffffu, a, WARP - 1);
  }
}

std::tuple<Tensor, Tensor> gae(Tensor rewards, Tensor values, Tensor terminated, Tensor truncated, Tensor mask,
                               MaybeTensor bootstrap, double gamma, double lam) {
  const int64_t rows = rewards.size(0), steps = rewards.size(1);
  check_flat(rewards, "rewards", FLOAT, rows * steps, rewards);
  check_flat(values, "values", FLOAT, rows * steps, rewards);
  check_flat(terminated, "terminated", ScalarType::Bool, rows * steps, rewards);
  check_flat(truncated, "truncated", ScalarType::Bool, rows * steps, rewards);
  check_flat(mask, "mask", ScalarType::Bool, rows * steps, rewards);
  if (bootstrap) check_flat(*bootstrap, "bootstrap", FLOAT, rows * steps, rewards);
  const Tensor advantages = fresh(rewards, {rows, steps}), returns = fresh(rewards, {rows, steps});
  const GaeRow all{flat<const float>(rewards),  flat<const float>(values), bootstrap ? flat<const float>(*bootstrap) : nullptr,
                   flat<const bool>(terminated), flat<const bool>(truncated), flat<const bool>(mask), steps};
  const OnDevice stream(rewards);
  gae_rows<<<blocks((rows + WARPS - 1) / WARPS), THREADS, 0, stream>>>(
      all, rows, static_cast<float>(gamma), static_cast<float>(gamma * lam), flat<float>(advantages), flat<float>(returns));
  OnDevice::check();
  return {advantages, returns};
}

// ---- surrogate ------------------------------------------------------------------------------------------------------

struct SurrogateInputs {
  const float *log_ratio, *advantages;
  const bool* mask;
  int64_t rows, steps, row_stride, step_stride;
  float bottom, top;
  bool aligned;

  SurrogateInputs(const Tensor& l, const Tensor& a, const Tensor& m, double low, double high)
      : log_ratio(flat<const float>(l)),
        advantages(flat<const float>(a)),
        mask(flat<const bool>(m)),
        rows(l.size(0)),
        steps(l.size(1)),
        row_stride(a.stride(0)),
        step_stride(a.stride(1)),
        bottom(static_cast<float>(1 - low)),
        top(static_cast<float>(1 + high)),
        // Rows of a multiple of 16 elements; the bytes of the mask are read eight at a time.
        aligned(is_aligned(log_ratio, steps) && is_aligned(mask, steps) &&
                (step_stride == 0 || is_aligned(advantages, row_stride))) {
    check_flat(l, "log_ratio", FLOAT, rows * steps, l);
    check_flat(m, "mask", ScalarType::Bool, rows * steps, l);
    STD_TORCH_CHECK(a.scalar_type() == FLOAT && a.dim() == 2 && a.size(0) == rows && a.size(1) == steps &&
                        (step_stride == 0 || step_stride == 1) && a.device() == l.device(),
                    "advantages must be float32 [B] or [B, T]");
  }

  template <class Work>
  __device__ void each(const Part& part, Work work) const {
    for (int64_t i = part.begin + threadIdx.x * PACK; i < part.end; i += THREADS * PACK) {
      const Packed<float> l = load_pack(log_ratio + part.row * steps, i, part.end, aligned);
      const Packed<bool> counted = load_pack(mask + part.row * steps, i, part.end, aligned);
      Packed<float> a;
      if (step_stride) {
        a = load_pack(advantages + part.row * row_stride, i, part.end, aligned);
      } else {
        for (float& element : a.element) element = advantages[part.row * row_stride];
      }
      work(i, l, a, counted);
    }
  }
};

__global__ void __launch_bounds__(THREADS) surrogate_chunks(SurrogateInputs in, SurrogateSums<double>* parts) {
  SurrogateSums<float> sums;
  in.each(Part(in.steps), [&](int64_t, const Packed<float>& l, const Packed<float>& a, const Packed<bool>& counted) {
#pragma unroll
    for (int j = 0; j < PACK; ++j)
      sums.look(l.element[j], a.element[j], counted.element[j] ? 1.0f : 0.0f, in.bottom, in.top);
  });
  sums = met(sums);
  if (threadIdx.x == 0) parts[blockIdx.x] = {sums.value, sums.ratio, sums.low, sums.high, sums.count};
}

struct SurrogateTotal {
  SurrogateSums<double> sums;
  double rollouts = 0;
};
__device__ __forceinline__ void meet(SurrogateTotal& a, const SurrogateTotal& b) {
  a.sums.add(b.sums);
  a.rollouts += b.rollouts;
}

__global__ void __launch_bounds__(THREADS)
surrogate_total(const SurrogateSums<double>* parts, int64_t rows, int64_t chunks, int64_t reduction,
                const double* given, double divisor, float* loss, float* stats, float* factor) {
  __shared__ double denominator;
  SurrogateTotal whole;
  for (int64_t row = threadIdx.x; row < rows; row += THREADS) {
    SurrogateSums<double> sums;
    for (int64_t c = 0; c < chunks; ++c) sums.add(parts[row * chunks + c]);
    const double f = row_factor(sums.count, reduction);
    factor[row] = static_cast<float>(f);
    whole.rollouts += sums.count > 0 ? 1.0 : 0.0;
    sums.value *= f;
    whole.sums.add(sums);
  }
  whole = met(whole);
  if (threadIdx.x == 0) {
    const double own = given ? *given : reduction == TOKEN_MEAN ? whole.sums.count : whole.rollouts;
    const double counted = whole.sums.count > 1 ? whole.sums.count : 1;
    denominator = (own > 1 ? own : 1) * divisor;
    *loss = static_cast<float>(whole.sums.value / denominator);
    stats[0] = static_cast<float>(whole.sums.ratio / counted);
    stats[1] = static_cast<float>(whole.sums.low / counted);
    stats[2] = static_cast<float>(whole.sums.high / counted);
  }
  __syncthreads();
  for (int64_t row = threadIdx.x; row < rows; row += THREADS)
    factor[row] = static_cast<float>(factor[row] / denominator);
}

std::tuple<Tensor, Tensor, Tensor> clipped_surrogate(Tensor log_ratio, Tensor advantages, Tensor mask, double low,
                                                     double high, int64_t reduction, MaybeTensor total,
                                                     double divisor) {
  const SurrogateInputs in(log_ratio, advantages, mask, low, high);
  if (total) check_flat(*total, "total", ScalarType::Double, 1, log_ratio);
  const int64_t chunks = chunks_of(in.steps);
  const Tensor loss = fresh(log_ratio, {}), stats = fresh(log_ratio, {3}), factor = fresh(log_ratio, {in.rows});
  const Tensor space = workspace<SurrogateSums<double>>(log_ratio, in.rows * chunks);
  auto* parts = static_cast<SurrogateSums<double>*>(space.data_ptr());
  const OnDevice stream(log_ratio);
  surrogate_chunks<<<blocks(in.rows * chunks), THREADS, 0, stream>>>(in, parts);
  surrogate_total<<<1, THREADS, 0, stream>>>(parts, in.rows, chunks, reduction,
                                             total ? flat<const double>(*total) : nullptr, divisor, flat<float>(loss),
                                             flat<float>(stats), flat<float>(factor));
  OnDevice::check();
  return {loss, stats, factor};
}

__global__ void __launch_bounds__(THREADS)
surrogate_gradients(SurrogateInputs in, const float* g, const float* factor, float* out) {
  const Part part(in.steps);
  const float scale = *g * factor[part.row];
  in.each(part, [&](int64_t i, const Packed<float>& l, const Packed<float>& a, const Packed<bool>& counted) {
    Packed<float> gradient;
#pragma unroll
    for (int j = 0; j < PACK; ++j)
      gradient.element[j] = surrogate_gradient(scale, l.element[j], a.element[j], counted.element[j] ? 1.0f : 0.0f,
                                               in.bottom, in.top);
    store_pack(out + part.row * in.steps, i, part.end, in.aligned, gradient);
  });
}

Tensor clipped_surrogate_backward(Tensor g, Tensor log_ratio, Tensor advantages, Tensor mask, Tensor factor,
                                  double low, double high) {
  SurrogateInputs in(log_ratio, advantages, mask, low, high);
  check_flat(g, "g", FLOAT, 1, log_ratio);
  check_flat(factor, "factor", FLOAT, in.rows, log_ratio);
  const Tensor gradient = fresh(log_ratio, {in.rows, in.steps});
  in.aligned = in.aligned && is_aligned(flat<float>(gradient), in.steps);
  const OnDevice stream(log_ratio);
  surrogate_gradients<<<blocks(in.rows * chunks_of(in.steps)), THREADS, 0, stream>>>(
      in, flat<const float>(g), flat<const float>(factor), flat<float>(gradient));
  OnDevice::check();
  return gradient;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mmrl, CUDA, m) {
  m.impl("denoise_step", TORCH_BOX(&denoise_step));
  m.impl("denoise_logprob", TORCH_BOX(&denoise_logprob));
  m.impl("denoise_logprob_backward", TORCH_BOX(&denoise_logprob_backward));
  m.impl("token_logprob", TORCH_BOX(&token_logprob));
  m.impl("token_logprob_backward", TORCH_BOX(&token_logprob_backward));
  m.impl("token_logprob_backward_", TORCH_BOX(&token_logprob_backward_));
  m.impl("group_advantage", TORCH_BOX(&group_advantage));
  m.impl("gae", TORCH_BOX(&gae));
  m.impl("clipped_surrogate", TORCH_BOX(&clipped_surrogate));
  m.impl("clipped_surrogate_backward", TORCH_BOX(&clipped_surrogate_backward));
}

}  // namespace mmrl
