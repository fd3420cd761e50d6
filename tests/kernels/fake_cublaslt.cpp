// Tests csrc/wgrad/cublaslt.cpp with a fake cuBLASLt that computes on the CPU. The fake interprets matrix layouts as the
// library does (column-major, with leading dimensions), so that a wrong transpose or stride is detected without a GPU.

#include <cublasLt.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../csrc/wgrad/cublaslt.h"

namespace {

struct Operation {
  cublasOperation_t transa = CUBLAS_OP_N, transb = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  float* bias = nullptr;
};

struct Layout {
  uint64_t rows, columns;
  int64_t leading;
};

template <typename T, typename Handle>
T& as(Handle handle) {
  return *reinterpret_cast<T*>(handle);
}

template <typename T>
void assign(T& attribute, const void* value, size_t size) {
  if (size != sizeof(T)) std::abort();
  std::memcpy(&attribute, value, size);
}

uint64_t inner_size(const Layout& a, const Operation& operation) { return operation.transa ? a.rows : a.columns; }

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(1);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t, cudaDataType_t) {
  *made = reinterpret_cast<cublasLtMatmulDesc_t>(new Operation);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
  delete &as<Operation>(operation);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(
    cublasLtMatmulDesc_t handle, cublasLtMatmulDescAttributes_t attribute, const void* value, size_t size) {
  Operation& operation = as<Operation>(handle);
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) assign(operation.transa, value, size);
  else if (attribute == CUBLASLT_MATMUL_DESC_TRANSB) assign(operation.transb, value, size);
  else if (attribute == CUBLASLT_MATMUL_DESC_EPILOGUE) assign(operation.epilogue, value, size);
  else if (attribute == CUBLASLT_MATMUL_DESC_BIAS_POINTER) assign(operation.bias, value, size);
  else if (attribute != CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE) return CUBLAS_STATUS_INVALID_VALUE;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(
    cublasLtMatrixLayout_t* made, cudaDataType, uint64_t rows, uint64_t columns, int64_t leading) {
  if (leading < static_cast<int64_t>(rows)) return CUBLAS_STATUS_INVALID_VALUE;
  *made = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{rows, columns, leading});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(const cublasLtMatrixLayout_t layout) {
  delete &as<Layout>(layout);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t*) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t attribute, const void*, size_t size) {
  const bool is_bytes = attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
  return size == (is_bytes ? 8 : 4) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t la, cublasLtMatrixLayout_t lb,
    cublasLtMatrixLayout_t lc, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
    cublasLtMatmulHeuristicResult_t*, int* num_found) {
  const Operation& operation = as<Operation>(desc);
  const Layout &a = as<Layout>(la), &b = as<Layout>(lb), &c = as<Layout>(lc);
  const bool fit = (operation.transa ? a.columns : a.rows) == c.rows &&
                   (operation.transb ? b.rows : b.columns) == c.columns &&
                   (operation.transb ? b.columns : b.rows) == inner_size(a, operation);
  *num_found = fit;
  return fit ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a_data, cublasLtMatrixLayout_t la,
    const void* b_data, cublasLtMatrixLayout_t lb, const void* beta, const void* c_data, cublasLtMatrixLayout_t lc,
    void* d_data, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t) {
  const Operation& operation = as<Operation>(desc);
  const Layout &a = as<Layout>(la), &b = as<Layout>(lb), &c = as<Layout>(lc);
  const auto at = [](const void* data, const Layout& layout, bool transposed, uint64_t i, uint64_t j) {
    return static_cast<const float*>(data)[transposed ? j + i * layout.leading : i + j * layout.leading];
  };
  for (uint64_t j = 0; j < c.columns; ++j) {
    float sum_of_b = 0;
    for (uint64_t k = 0; k < inner_size(a, operation); ++k) sum_of_b += at(b_data, b, operation.transb, k, j);
    if (operation.epilogue == CUBLASLT_EPILOGUE_BGRADB) operation.bias[j] = sum_of_b;
    for (uint64_t i = 0; i < c.rows; ++i) {
      float product = 0;
      for (uint64_t k = 0; k < inner_size(a, operation); ++k)
        product += at(a_data, a, operation.transa, i, k) * at(b_data, b, operation.transb, k, j);
      static_cast<float*>(d_data)[i + j * c.leading] =
          *static_cast<const float*>(alpha) * product + *static_cast<const float*>(beta) * at(c_data, c, false, i, j);
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}

const char* cublasLtGetStatusString(cublasStatus_t) { return "refused"; }

}  // extern "C"

// A matrix (rows, columns) of small integers, row- or column-major, with `pad` elements between its rows or columns.
struct Filled {
  int64_t leading;
  bool is_row_major;
  std::vector<float> data;

  Filled(int64_t rows, int64_t columns, bool row_major, int64_t pad)
      : leading((row_major ? columns : rows) + pad), is_row_major(row_major) {
    data.assign(leading * (row_major ? rows : columns), 99);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) at(i, j) = std::rand() % 7 - 3;
  }

  float& at(int64_t i, int64_t j) { return data[is_row_major ? i * leading + j : i + j * leading]; }
  zb::Matrix matrix() const { return {data.data(), leading, is_row_major}; }
};

bool is_right(int64_t tokens, int64_t in, int64_t out, bool x_row_major, bool dy_row_major, int64_t pad, bool bias) {
  Filled x(tokens, in, x_row_major, pad), dy(tokens, out, dy_row_major, pad), grad(out, in, true, pad);
  Filled expected = grad;
  std::vector<float> sums(out, -1), expected_sums(out, bias ? 0 : -1);
  for (int64_t o = 0; o < out; ++o)
    for (int64_t k = 0; k < tokens; ++k) {
      if (bias) expected_sums[o] += dy.at(k, o);
      for (int64_t i = 0; i < in; ++i) expected.at(o, i) += dy.at(k, o) * x.at(k, i);
    }
  float* where = bias ? sums.data() : nullptr;
  constexpr zb::Dtype kFloat = zb::Dtype::kFloat;
  const zb::Gemm gemm{
      x.matrix(), dy.matrix(), grad.data.data(), grad.leading, where, tokens, in, out, kFloat, kFloat, false};
  bool sums_bias = false;
  const char* problem = zb::queue_gemm(gemm, 0, nullptr, nullptr, &sums_bias);
  return problem == nullptr && sums_bias == bias && grad.data == expected.data && sums == expected_sums;
}

int main() {
  int wrong = 0;
  for (int64_t tokens : {1, 3, 5})
    for (int64_t in : {1, 2, 5})
      for (int64_t out : {1, 3, 4})
        for (int flags = 0; flags < 16; ++flags)
          wrong += !is_right(tokens, in, out, flags & 1, flags & 2, flags & 4 ? 2 : 0, flags & 8);
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}
