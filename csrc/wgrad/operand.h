// Describes a matrix for BLAS: row-major or column-major, with a leading dimension.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace zb {

struct Operand {
  bool is_row_major;
  int64_t leading;

  explicit Operand(const at::Tensor& matrix)
      : is_row_major(is_packed(matrix, 0, 1)), leading(std::max<int64_t>(matrix.stride(is_row_major ? 0 : 1), 1)) {}

  static bool fits(const at::Tensor& matrix) { return is_packed(matrix, 0, 1) || is_packed(matrix, 1, 0); }

 private:
  // Whether the matrix has unit stride along `inner`, without overlap along `outer`.
  static bool is_packed(const at::Tensor& matrix, int64_t outer, int64_t inner) {
    return (matrix.stride(inner) == 1 || matrix.size(inner) == 1) && matrix.stride(outer) >= matrix.size(inner);
  }
};

inline at::Tensor fitting(const at::Tensor& matrix) { return Operand::fits(matrix) ? matrix : matrix.contiguous(); }

// The leading dimension of a gradient with unit stride along rows; a single row may have any leading stride.
inline int64_t leading_of(const at::Tensor& grad) { return std::max(grad.stride(0), grad.size(1)); }

}  // namespace zb
