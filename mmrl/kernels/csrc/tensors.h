// Tensors as LibTorch's stable ABI hands them over, and the checks that cpu.cpp and cuda.cu share. Shapes and dtypes
// were checked in Python with an error for the user; here they are checked again so that no call can reach memory that
// is not there.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <tuple>
#include <vector>

#include "arithmetic.h"

namespace mmrl {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
constexpr ScalarType FLOAT = ScalarType::Float;

inline Tensor fresh(const Tensor& like, std::vector<int64_t> size, ScalarType dtype = FLOAT) {
  return torch::stable::new_empty(like, size, dtype);
}

// [rows, columns] with adjacent columns, on the device of `like`; rows may lie anywhere.
inline void check_rows(const Tensor& t, const char* name, ScalarType dtype, int64_t rows, int64_t columns,
                       const Tensor& like) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, " has the wrong dtype");
  STD_TORCH_CHECK(t.dim() == 2 && t.size(0) == rows && t.size(1) == columns, name, " has the wrong shape");
  STD_TORCH_CHECK(columns <= 1 || t.stride(1) == 1, name, " must have adjacent columns");
  STD_TORCH_CHECK(t.device() == like.device(), name, " is on another device");
}

// contiguous, of `size` elements
inline void check_flat(const Tensor& t, const char* name, ScalarType dtype, int64_t size, const Tensor& like) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, " has the wrong dtype");
  STD_TORCH_CHECK(t.numel() == size && t.is_contiguous(), name, " has the wrong shape");
  STD_TORCH_CHECK(t.device() == like.device(), name, " is on another device");
}

template <class T>
struct Rows {
  T* data = nullptr;
  int64_t stride = 0;

  Rows() = default;
  explicit Rows(const Tensor& t) : data(static_cast<T*>(t.data_ptr())), stride(t.stride(0)) {}
  explicit Rows(const MaybeTensor& t) {
    if (t) *this = Rows(*t);
  }
};

template <class T>
T* flat(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

// What denoise_step and denoise_logprob share; `next` is the noise in the former.
struct DenoiseShape {
  int64_t rows, size;

  DenoiseShape(const Tensor& x, const Tensor& v, const Tensor& next, const Tensor& a_x, const Tensor& a_v,
               const Tensor& std)
      : rows(x.size(0)), size(x.dim() == 2 ? x.size(1) : 0) {
    check_rows(x, "x", FLOAT, rows, size, v);
    check_rows(v, "v", v.scalar_type(), rows, size, v);
    check_rows(next, "x_next", FLOAT, rows, size, v);
    check_flat(a_x, "a_x", FLOAT, rows, v);
    check_flat(a_v, "a_v", FLOAT, rows, v);
    check_flat(std, "std", FLOAT, rows, v);
  }
  void also(const MaybeTensor& t, const char* name, ScalarType dtype, const Tensor& like) const {
    if (t) check_rows(*t, name, dtype, rows, size, like);
  }
};

// Logits [..., V] of two or three axes, the last one adjacent; no copy is made of a slice.
struct LogitsShape {
  int64_t rows, inner, outer_stride, inner_stride, vocabulary;

  LogitsShape(const Tensor& logits, const Tensor& targets) {
    STD_TORCH_CHECK(logits.dim() == 2 || logits.dim() == 3, "logits must have two or three axes");
    const int64_t last = logits.dim() - 1;
    vocabulary = logits.size(last);
    STD_TORCH_CHECK(vocabulary > 0, "logits has no columns");
    STD_TORCH_CHECK(vocabulary == 1 || logits.stride(last) == 1, "logits must have adjacent columns");
    inner = logits.size(last - 1);
    inner_stride = logits.stride(last - 1);
    outer_stride = last == 2 ? logits.stride(0) : 0;
    rows = last == 2 ? logits.size(0) * inner : inner;
    check_flat(targets, "targets", ScalarType::Long, rows, logits);
  }
  HD int64_t offset(int64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

}  // namespace mmrl
