// The operators on the CPU: rows and chunks go to PyTorch's threads, columns to vector lanes.
#include "block.h"
#include "lanes.h"
#include "tensors.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace mmrl {
namespace {

using torch::stable::parallel_for;

constexpr int64_t BLOCK = 2048;   // elements summed in lanes before the sum goes to a double; they fit in the L1 cache
constexpr int64_t GRAIN = 32768;  // elements that are worth a thread

// A result whose memory, where it is large, comes in pages of 2 MiB: zeroing 4 KiB at a time, as it is first touched, costs
// as much as many a kernel.
Tensor result(const Tensor& like, std::vector<int64_t> size, ScalarType dtype = FLOAT) {
  const Tensor t = fresh(like, size, dtype);
#ifdef __linux__
  constexpr uintptr_t PAGE = 2 << 20;
  const uintptr_t start = reinterpret_cast<uintptr_t>(t.data_ptr()), end = start + t.numel() * t.element_size();
  const uintptr_t first = (start + PAGE - 1) / PAGE * PAGE, last = end / PAGE * PAGE;
  if (last > first + PAGE) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // a hint
#endif
  return t;
}

int64_t grain(int64_t elements) { return std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, elements)); }

template <class Work>
void for_dtype(const Tensor& t, const char* name, Work work) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return work(float{});
    case ScalarType::Half: return work(Half{});
    case ScalarType::BFloat16: return work(Bfloat16{});
    default: STD_TORCH_CHECK(false, name, " must be float32, bfloat16 or float16");
  }
}

void check_std(const Tensor& std, int64_t rows) {
  const float* s = flat<const float>(std);
  for (int64_t i = 0; i < rows; ++i) STD_TORCH_CHECK(s[i] >= 0, "std must not be negative, row ", i, " has ", s[i]);
}

// Calls work(row, chunk, begin, end) for all chunks of all rows, in any order.
template <class Work>
void for_chunks(int64_t rows, int64_t size, Work work) {
  const int64_t chunks = chunks_of(size);
  parallel_for(0, rows * chunks, grain(std::min(size, CHUNK)), [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const int64_t begin = i % chunks * CHUNK;
      work(i / chunks, i % chunks, begin, std::min(begin + CHUNK, size));
    }
  });
}

// Calls work(i, count) for every 16 elements, at most, of [begin, end).
template <class Work>
HD void for_lanes(int64_t begin, int64_t end, Work work) {
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) work(i, LANES);
  if (i < end) work(i, end - i);
}

// ---- denoising ------------------------------------------------------------------------------------------------------

struct DenoiseOutput {
  Tensor logp, ratio, kl;
};

DenoiseOutput finish(const std::vector<DenoiseSums<double>>& parts, const Coefficients* coefficients,
                     const Tensor& like, int64_t rows, int64_t size, bool sum) {
  DenoiseOutput out{fresh(like, {rows}), fresh(like, {rows}), fresh(like, {rows})};
  const int64_t chunks = chunks_of(size);
  for (int64_t row = 0; row < rows; ++row) {
    DenoiseSums<double> whole;
    for (int64_t c = 0; c < chunks; ++c) whole.add(parts[row * chunks + c]);
    const DenoiseRow result = finish_denoise(whole, coefficients[row], size, sum);
    flat<float>(out.logp)[row] = result.logp;
    flat<float>(out.ratio)[row] = result.ratio;
    flat<float>(out.kl)[row] = result.kl;
  }
  return out;
}

std::vector<Coefficients> coefficients_of(const Tensor& a_x, const Tensor& a_v, const Tensor& std, int64_t rows) {
  std::vector<Coefficients> c(rows);
  for (int64_t i = 0; i < rows; ++i)
    c[i] = {flat<const float>(a_x)[i], flat<const float>(a_v)[i], flat<const float>(std)[i]};
  return c;
}

std::tuple<Tensor, Tensor, Tensor> denoise_step(Tensor x, Tensor v, Tensor noise, Tensor a_x, Tensor a_v, Tensor std,
                                                bool sum, bool keep_mean) {
  const DenoiseShape shape(x, v, noise, a_x, a_v, std);
  check_std(std, shape.rows);
  const auto coefficients = coefficients_of(a_x, a_v, std, shape.rows);
  const Tensor next = result(x, {shape.rows, shape.size});
  const Tensor means = result(x, {keep_mean ? shape.rows : 0, shape.size});
  std::vector<DenoiseSums<double>> parts(shape.rows * chunks_of(shape.size));
  for_dtype(v, "v", [&](auto tag) {
    using T = decltype(tag);
    const Rows<const float> xs(x), noises(noise);
    const Rows<const T> vs(v);
    for_chunks(shape.rows, shape.size, [&](int64_t row, int64_t chunk, int64_t begin, int64_t end) {
      const Coefficients c = coefficients[row];
      const float *xr = xs.data + row * xs.stride, *nr = noises.data + row * noises.stride;
      const T* vr = vs.data + row * vs.stride;
      float* out = flat<float>(next) + row * shape.size;
      float* mean_out = keep_mean ? flat<float>(means) + row * shape.size : nullptr;
      DenoiseSums<double> whole;
      for (int64_t block = begin; block < end; block += BLOCK) {
        DenoiseSums<Lanes> sums;
        for_lanes(block, std::min(block + BLOCK, end), [&](int64_t i, int64_t n) INLINE {
          const Lanes mean = transition_mean(c, load(xr + i, n), load(vr + i, n));
          const Lanes stepped = mean + c.std * load(nr + i, n);
          store(out + i, n, stepped);
          if (mean_out) store(mean_out + i, n, mean);
          sums.likelihood(stepped - mean);
        });
        whole.add(total(sums));
      }
      parts[row * chunks_of(shape.size) + chunk] = whole;
    });
  });
  return {next, finish(parts, coefficients.data(), x, shape.rows, shape.size, sum).logp, means};
}

std::tuple<Tensor, Tensor, Tensor> denoise_logprob(Tensor x, Tensor v, Tensor next, Tensor a_x, Tensor a_v, Tensor std,
                                                   MaybeTensor mean_old, MaybeTensor v_old, MaybeTensor v_ref,
                                                   bool sum) {
  const DenoiseShape shape(x, v, next, a_x, a_v, std);
  shape.also(mean_old, "mean_old", FLOAT, v);
  shape.also(v_old, "v_old", v.scalar_type(), v);
  shape.also(v_ref, "v_ref", v.scalar_type(), v);
  check_std(std, shape.rows);
  const auto coefficients = coefficients_of(a_x, a_v, std, shape.rows);
  std::vector<DenoiseSums<double>> parts(shape.rows * chunks_of(shape.size));
  for_dtype(v, "v", [&](auto tag) {
    using T = decltype(tag);
    const Rows<const float> xs(x), nexts(next), old_means(mean_old);
    const Rows<const T> vs(v), olds(v_old), refs(v_ref);
    for_chunks(shape.rows, shape.size, [&](int64_t row, int64_t chunk, int64_t begin, int64_t end) {
      const Coefficients c = coefficients[row];
      const float *xr = xs.data + row * xs.stride, *nr = nexts.data + row * nexts.stride;
      const float* mr = old_means.data ? old_means.data + row * old_means.stride : nullptr;
      const T* vr = vs.data + row * vs.stride;
      const T* olr = olds.data ? olds.data + row * olds.stride : nullptr;
      const T* rr = refs.data ? refs.data + row * refs.stride : nullptr;
      DenoiseSums<double> whole;
      for (int64_t block = begin; block < end; block += BLOCK) {
        DenoiseSums<Lanes> sums;
        for_lanes(block, std::min(block + BLOCK, end), [&](int64_t i, int64_t n) INLINE {
          const Lanes xi = load(xr + i, n), vi = load(vr + i, n), ni = load(nr + i, n);
          const Lanes mean = transition_mean(c, xi, vi);
          const Lanes gap = ni - mean;
          sums.likelihood(gap);
          if (mr) sums.log_ratio(gap, mean - load(mr + i, n));
          if (olr) sums.log_ratio(gap, c.a_v * (vi - load(olr + i, n)));
          if (rr) sums.divergence(vi, load(rr + i, n));
        });
        whole.add(total(sums));
      }
      parts[row * chunks_of(shape.size) + chunk] = whole;
    });
  });
  const DenoiseOutput out = finish(parts, coefficients.data(), x, shape.rows, shape.size, sum);
  return {out.logp, out.ratio, out.kl};
}

Tensor denoise_logprob_backward(Tensor g_logp, Tensor g_ratio, Tensor g_kl, Tensor x, Tensor v, Tensor next,
                                Tensor a_x, Tensor a_v, Tensor std, MaybeTensor v_ref, bool sum) {
  const DenoiseShape shape(x, v, next, a_x, a_v, std);
  shape.also(v_ref, "v_ref", v.scalar_type(), v);
  check_flat(g_logp, "g_logp", FLOAT, shape.rows, v);
  check_flat(g_ratio, "g_ratio", FLOAT, shape.rows, v);
  check_flat(g_kl, "g_kl", FLOAT, shape.rows, v);
  const auto coefficients = coefficients_of(a_x, a_v, std, shape.rows);
  const Tensor gradient = result(v, {shape.rows, shape.size}, v.scalar_type());
  for_dtype(v, "v", [&](auto tag) {
    using T = decltype(tag);
    const Rows<const float> xs(x), nexts(next);
    const Rows<const T> vs(v), refs(v_ref);
    for_chunks(shape.rows, shape.size, [&](int64_t row, int64_t, int64_t begin, int64_t end) {
      const Coefficients c = coefficients[row];
      const DenoiseSlope slope = denoise_slope(c, flat<const float>(g_logp)[row], flat<const float>(g_ratio)[row],
                                               flat<const float>(g_kl)[row], shape.size, sum);
      const float *xr = xs.data + row * xs.stride, *nr = nexts.data + row * nexts.stride;
      const T* vr = vs.data + row * vs.stride;
      const T* rr = refs.data ? refs.data + row * refs.stride : vr;
      T* out = flat<T>(gradient) + row * shape.size;
      for_lanes(begin, end, [&](int64_t i, int64_t n) INLINE {
        const Lanes vi = load(vr + i, n);
        const Lanes mean = transition_mean(c, load(xr + i, n), vi);
        store(out + i, n, denoise_gradient(slope, load(nr + i, n), mean, vi, load(rr + i, n)));
      });
    });
  });
  return gradient;
}

// ---- tokens ---------------------------------------------------------------------------------------------------------

template <class T>
Softmax<double> softmax_of(const T* logits, int64_t columns, float inverse_temperature, T least) {
  Softmax<double> state;
  for (int64_t block = 0; block < columns; block += BLOCK) {
    const int64_t end = std::min(block + BLOCK, columns);
    Lanes top = Lanes{} - INFINITY;
    for_lanes(block, end, [&](int64_t i, int64_t n) INLINE {
      const Lanes z = load(logits + i, n, least);
      top = z > top ? z : top;
    });
    const double peak = std::max<double>(state.peak, largest(top) * inverse_temperature);
    const float base = peak == -INFINITY ? 0.0f : static_cast<float>(peak);
    Lanes sum{}, slope{}, square{};
    for_lanes(block, end, [&](int64_t i, int64_t n) INLINE {
      __builtin_prefetch(logits + i + BLOCK);  // while this block is computed, the next one comes
      softmax_add(load(logits + i, n, least) * inverse_temperature, base, sum, slope, square);
    });
    state = rebased(state, peak);
    state.sum += total(sum);
    state.slope += total(slope);
    state.square += total(square);
  }
  return state;
}

void check_targets(const Tensor& targets, const LogitsShape& shape) {
  const int64_t* t = flat<const int64_t>(targets);
  for (int64_t i = 0; i < shape.rows; ++i)
    STD_TORCH_CHECK(0 <= t[i] && t[i] < shape.vocabulary, "targets must be in [0, ", shape.vocabulary, "), row ", i,
                    " has ", t[i]);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> token_logprob(Tensor logits, Tensor targets,
                                                                 double inverse_temperature) {
  const LogitsShape shape(logits, targets);
  check_targets(targets, shape);
  const auto per_row = [&] { return fresh(logits, {shape.rows}); };
  const Tensor logp = per_row(), entropy = per_row(), square = per_row(), peak = per_row(), log_sum = per_row();
  const float scale = static_cast<float>(inverse_temperature);
  for_dtype(logits, "logits", [&](auto tag) {
    using T = decltype(tag);
    const T* data = flat<const T>(logits);
    parallel_for(0, shape.rows, grain(shape.vocabulary), [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row) {
        const T* z = data + shape.offset(row);
        const float target = to_float(z[flat<const int64_t>(targets)[row]]) * scale;
        const TokenRow r = finish_token(softmax_of(z, shape.vocabulary, scale, least<T>()), target);
        flat<float>(logp)[row] = r.logp;
        flat<float>(entropy)[row] = r.entropy;
        flat<float>(square)[row] = r.square;
        flat<float>(peak)[row] = r.peak;
        flat<float>(log_sum)[row] = r.log_sum;
      }
    });
  });
  return {logp, entropy, square, peak, log_sum};
}

void token_gradient_into(const Tensor& gradient, const Tensor& g_logp, const Tensor& g_entropy, const Tensor& g_square,
                         const Tensor& logits, const Tensor& targets, const Tensor& entropy, const Tensor& square,
                         const Tensor& peak, const Tensor& log_sum, double inverse_temperature) {
  const LogitsShape shape(logits, targets);
  check_targets(targets, shape);
  const Tensor* rows[] = {&g_logp, &g_entropy, &g_square, &entropy, &square, &peak, &log_sum};
  for (const Tensor* t : rows) check_flat(*t, "gradient", FLOAT, shape.rows, logits);
  const float scale = static_cast<float>(inverse_temperature);
  for_dtype(logits, "logits", [&](auto tag) {
    using T = decltype(tag);
    const T* data = flat<const T>(logits);
    parallel_for(0, shape.rows, grain(shape.vocabulary), [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row) {
        const auto at = [&](const Tensor& t) { return flat<const float>(t)[row]; };
        const TokenSlope s{at(g_logp), at(g_entropy), at(g_square), at(entropy), at(square), at(peak), at(log_sum)};
        const T* z = data + shape.offset(row);
        T* out = flat<T>(gradient) + row * shape.vocabulary;
        const int64_t y = flat<const int64_t>(targets)[row];
        const Lanes target = Lanes{} + to_float(z[y]) * scale;  // before it may be overwritten
        for_lanes(0, shape.vocabulary, [&](int64_t i, int64_t n) INLINE {
          store(out + i, n, token_gradient(s, load(z + i, n) * scale) * scale);
        });
        // The target's column once more, with its own term.
        store(out + y, 1, (token_gradient(s, target) + s.g_logp) * scale);
      }
    });
  });
}

Tensor token_logprob_backward(Tensor g_logp, Tensor g_entropy, Tensor g_square, Tensor logits, Tensor targets,
                              Tensor entropy, Tensor square, Tensor peak, Tensor log_sum, double inverse_temperature) {
  const auto sizes = logits.sizes();
  const Tensor gradient = result(logits, {sizes.begin(), sizes.end()}, logits.scalar_type());
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

// Where each run of equal ids ends. A run is looked for where it ends if it is as long as the one before.
std::vector<int64_t> runs_of(const int64_t* ids, int64_t rows) {
  std::vector<int64_t> ends;
  ends.reserve(rows / 8);
  for (int64_t from = 0, length = 1; from < rows;) {
    int64_t to = from + 1, differ = 0;
    if (from + length <= rows) {
      for (int64_t i = from; i < from + length; ++i) differ |= ids[i] ^ ids[from];
      if (!differ) to = from + length;
    }
    while (to < rows && ids[to] == ids[from]) ++to;
    ends.push_back(to);
    length = to - from;
    from = to;
  }
  return ends;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> group_advantage(Tensor rewards, Tensor weights, Tensor group,
                                                           int64_t groups, int64_t baseline, int64_t scale,
                                                           double eps) {
  const int64_t rows = rewards.size(0), components = rewards.size(1);
  check_flat(rewards, "rewards", FLOAT, rows * components, rewards);
  check_flat(weights, "weights", FLOAT, components, rewards);
  check_flat(group, "group", ScalarType::Long, rows, rewards);
  const int64_t* g = flat<const int64_t>(group);
  const Tensor advantage = fresh(rewards, {rows}), count = fresh(rewards, {groups}), mean = fresh(rewards, {groups}),
               std = fresh(rewards, {groups});
  const float *r = flat<const float>(rewards), *w = flat<const float>(weights);
  std::vector<float> sums;
  if (components > 1 || w[0] != 1) {
    sums.resize(rows);
    for (int64_t i = 0; i < rows; ++i) sums[i] = combined(r + i * components, w, components);
  }
  const float* reward = sums.empty() ? r : sums.data();
  // Calls look(eight rewards) from row `from` to row `to`; NaN, which is not scored, fills the last ones.
  const auto for_rewards = [=](int64_t from, int64_t to, auto look) INLINE {
    int64_t i = from;
    for (; i + 8 <= to; i += 8) look(raw<Eight>(reward + i));
    if (i < to) look(load_eight(reward + i, to - i, rows - i, NAN));
  };
  // Rows of one group mostly stand together; work(from, to, group) is called for each run of them.
  const std::vector<int64_t> ends = runs_of(g, rows);
  for (int64_t from = 0, run = 0; from < rows; from = ends[run++])
    STD_TORCH_CHECK(0 <= g[from] && g[from] < groups, "group must be in [0, ", groups, "), row ", from, " has ",
                    g[from]);
  const auto for_runs = [&](auto work) INLINE {
    int64_t from = 0;
    for (const int64_t to : ends) {
      work(from, to, g[from]);
      from = to;
    }
  };
  const auto look_at = [&](int64_t from, int64_t to) INLINE {
    SpreadOf<Eight, Wide> own;
    for_rewards(from, to, [&](Eight some) INLINE { own.look(some); });
    return total(own);
  };
  const auto squares_of = [&](int64_t from, int64_t to, double centre) INLINE {
    SpreadOf<Eight, Wide> own;
    for_rewards(from, to, [&](Eight some) INLINE { own.gap(some, centre); });
    return total(own.squares);
  };
  float *const counts = flat<float>(count), *const means = flat<float>(mean), *const stds = flat<float>(std);
  const auto tell = [&](int64_t id, const Spread& own) INLINE {
    counts[id] = static_cast<float>(own.count);
    means[id] = static_cast<float>(own.mean());
    stds[id] = static_cast<float>(own.std());
  };
  float* const out = flat<float>(advantage);
  const auto write = [&](int64_t from, int64_t to, GroupLine line) INLINE {
    int64_t i = from;
    for (; i + 8 <= to; i += 8) narrow(out + i, advantage_of(raw<Eight>(reward + i), line));
    for (; i < to; ++i) out[i] = advantage_of(reward[i], line);
  };
  // Where no group stands in two places its rows are done with while they are at hand.
  std::vector<bool> met(groups);
  bool apart = scale == BATCH_STD;
  for_runs([&](int64_t, int64_t, int64_t id) INLINE {
    apart |= met[id];
    met[id] = true;
  });
  if (!apart) {
    for (int64_t i = 0; i < groups; ++i)
      if (!met[i]) tell(i, Spread{});
    for_runs([&](int64_t from, int64_t to, int64_t id) INLINE {
      Spread own = look_at(from, to);
      own.squares = squares_of(from, to, own.mean());
      tell(id, own);
      write(from, to, line_of(own, own.std(), baseline, scale, eps));
    });
    return {advantage, count, mean, std};
  }
  std::vector<Spread> spread(groups);
  std::vector<GroupLine> line(groups);
  for_runs([&](int64_t from, int64_t to, int64_t id) INLINE { spread[id].add(look_at(from, to)); });
  for_runs([&](int64_t from, int64_t to, int64_t id) INLINE {
    spread[id].squares += squares_of(from, to, spread[id].mean());
  });
  Spread batch;
  if (scale == BATCH_STD) {
    for (const Spread& s : spread) batch.add(s);
    SpreadOf<Eight, Wide> all;
    const double centre = batch.mean();
    for_rewards(0, rows, [&](Eight some) INLINE { all.gap(some, centre); });
    batch.squares = total(all.squares);
  }
  for (int64_t i = 0; i < groups; ++i) {
    line[i] = line_of(spread[i], scale == BATCH_STD ? batch.std() : spread[i].std(), baseline, scale, eps);
    tell(i, spread[i]);
  }
  for_runs([&](int64_t from, int64_t to, int64_t id) INLINE { write(from, to, line[id]); });
  return {advantage, count, mean, std};
}

// ---- returns --------------------------------------------------------------------------------------------------------

// Sixteen steps of a row from `t` on, `count` of them within it.
HD GaeStep<Lanes, LanesByte> lanes_of(const GaeRow& row, int64_t t, int64_t count) {
  const int64_t behind = std::min(count, row.steps - t - 1);  // that have a next step
  return {load(row.reward + t, count),
          load(row.value + t, count),
          load(row.value + t + 1, behind),
          row.bootstrap ? load(row.bootstrap + t, count) : Lanes{} + NAN,
          load_flags(row.counted + t, count),
          load_flags(row.counted + t + 1, behind),
          load_flags(row.terminated + t, count),
          load_flags(row.truncated + t, count)};
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
  const Tensor advantages = result(rewards, {rows, steps}), returns = result(rewards, {rows, steps});
  const float discount = static_cast<float>(gamma), decay = static_cast<float>(gamma * lam);
  const GaeRow all{flat<const float>(rewards),   flat<const float>(values),
                   bootstrap ? flat<const float>(*bootstrap) : nullptr,
                   flat<const bool>(terminated), flat<const bool>(truncated), flat<const bool>(mask), steps};
  const auto row_at = [=](int64_t row) {
    const int64_t o = row * steps;
    return GaeRow{all.reward + o,     all.value + o,     all.bootstrap ? all.bootstrap + o : nullptr,
                  all.terminated + o, all.truncated + o, all.counted + o, steps};
  };
  float *const advantage_out = flat<float>(advantages), *const return_out = flat<float>(returns);
  if (!bootstrap) {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t t = 0; t < steps; ++t)
        STD_TORCH_CHECK(!row_at(row).at(t).is_cut(), "gae: the episode at row ", row, ", step ", t,
                        " is cut off without termination; give bootstrap [B, T]");
  }
  parallel_for(0, rows, grain(steps), [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r) {
      const GaeRow row = row_at(r);
      Lanes carried{};
      for (int64_t t = (steps - 1) / LANES * LANES; t >= 0; t -= LANES) {
        const int64_t count = std::min(LANES, steps - t);
        const auto step = lanes_of(row, t, count);
        Affine<Lanes> scan{step.delta(discount), step.carry(decay)};
        scan = after(scan, shifted<1>(scan));
        scan = after(scan, shifted<2>(scan));
        scan = after(scan, shifted<4>(scan));
        scan = after(scan, shifted<8>(scan));
        const Lanes a = carried_on(scan.add, scan.carry, carried);
        carried = Lanes{} + a[0];
        store(advantage_out + r * steps + t, count, a);
        store(return_out + r * steps + t, count, a + chosen(step.counted, step.value, Lanes{}));
      }
    }
  });
  return {advantages, returns};
}

// ---- surrogate ------------------------------------------------------------------------------------------------------

// Advantages [B, T], or [B, 1] spread over T by a stride of 0.
struct Advantages {
  const float* data;
  int64_t row_stride, step_stride;

  explicit Advantages(const Tensor& t)
      : data(flat<const float>(t)), row_stride(t.stride(0)), step_stride(t.stride(1)) {}
  HD Lanes at(int64_t row, int64_t i, int64_t n) const {
    return step_stride ? load(data + row * row_stride + i, n) : Lanes{} + data[row * row_stride];
  }
};

void check_surrogate(const Tensor& log_ratio, const Tensor& advantages, const Tensor& mask) {
  const int64_t rows = log_ratio.size(0), steps = log_ratio.size(1);
  check_flat(log_ratio, "log_ratio", FLOAT, rows * steps, log_ratio);
  check_flat(mask, "mask", ScalarType::Bool, rows * steps, log_ratio);
  STD_TORCH_CHECK(advantages.scalar_type() == FLOAT && advantages.dim() == 2 && advantages.size(0) == rows &&
                      advantages.size(1) == steps && (advantages.stride(1) == 0 || advantages.stride(1) == 1),
                  "advantages must be float32 [B] or [B, T]");
}

std::tuple<Tensor, Tensor, Tensor> clipped_surrogate(Tensor log_ratio, Tensor advantages, Tensor mask, double low,
                                                     double high, int64_t reduction, MaybeTensor total_,
                                                     double divisor) {
  check_surrogate(log_ratio, advantages, mask);
  const int64_t rows = log_ratio.size(0), steps = log_ratio.size(1), chunks = chunks_of(steps);
  const Advantages a(advantages);
  const float bottom = static_cast<float>(1 - low), top = static_cast<float>(1 + high);
  std::vector<SurrogateSums<double>> parts(rows * chunks);
  for_chunks(rows, steps, [&](int64_t row, int64_t chunk, int64_t begin, int64_t end) {
    const float* ratio = flat<const float>(log_ratio) + row * steps;
    const bool* counted = flat<const bool>(mask) + row * steps;
    for (int64_t block = begin; block < end; block += BLOCK) {
      SurrogateSums<Lanes> sums;
      for_lanes(block, std::min(block + BLOCK, end), [&](int64_t i, int64_t n) INLINE {
        sums.look(load(ratio + i, n), a.at(row, i, n), load(counted + i, n), bottom, top);
      });
      parts[row * chunks + chunk].add(total(sums));
    }
  });
  const Tensor loss = fresh(log_ratio, {}), stats = fresh(log_ratio, {3}), factor = fresh(log_ratio, {rows});
  SurrogateSums<double> whole;
  double rollouts = 0;
  for (int64_t row = 0; row < rows; ++row) {
    SurrogateSums<double> sums;
    for (int64_t c = 0; c < chunks; ++c) sums.add(parts[row * chunks + c]);
    const double f = row_factor(sums.count, reduction);
    flat<float>(factor)[row] = static_cast<float>(f);
    rollouts += sums.count > 0;
    sums.value *= f;
    whole.add(sums);
  }
  const double own = reduction == TOKEN_MEAN ? whole.count : rollouts;
  const double total = (total_ ? std::max(*flat<const double>(*total_), 1.0) : std::max(own, 1.0)) * divisor;
  const double counted = std::max(whole.count, 1.0);
  *flat<float>(loss) = static_cast<float>(whole.value / total);
  for (int64_t row = 0; row < rows; ++row)
    flat<float>(factor)[row] = static_cast<float>(flat<float>(factor)[row] / total);
  flat<float>(stats)[0] = static_cast<float>(whole.ratio / counted);
  flat<float>(stats)[1] = static_cast<float>(whole.low / counted);
  flat<float>(stats)[2] = static_cast<float>(whole.high / counted);
  return {loss, stats, factor};
}

Tensor clipped_surrogate_backward(Tensor g, Tensor log_ratio, Tensor advantages, Tensor mask, Tensor factor,
                                  double low, double high) {
  check_surrogate(log_ratio, advantages, mask);
  const int64_t rows = log_ratio.size(0), steps = log_ratio.size(1);
  check_flat(g, "g", FLOAT, 1, log_ratio);
  check_flat(factor, "factor", FLOAT, rows, log_ratio);
  const Advantages a(advantages);
  const float bottom = static_cast<float>(1 - low), top = static_cast<float>(1 + high);
  const Tensor gradient = result(log_ratio, {rows, steps});
  for_chunks(rows, steps, [&](int64_t row, int64_t, int64_t begin, int64_t end) {
    const float scale = *flat<const float>(g) * flat<const float>(factor)[row];
    const float* ratio = flat<const float>(log_ratio) + row * steps;
    const bool* counted = flat<const bool>(mask) + row * steps;
    float* out = flat<float>(gradient) + row * steps;
    for_lanes(begin, end, [&](int64_t i, int64_t n) INLINE {
      store(out + i, n,
            surrogate_gradient(scale, load(ratio + i, n), a.at(row, i, n), load(counted + i, n), bottom, top));
    });
  });
  return gradient;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mmrl, CPU, m) {
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
