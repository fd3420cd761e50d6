// A fake cuBLASLt that computes on the CPU. It interprets matrix layouts as the library does (column-major, with
// leading dimensions), so that a wrong transpose or stride is detected without a GPU. Of the reductions that it is
// allowed, it chooses the least exact, and it insists on the alignments that it was promised.

#include "fake_cublaslt.h"

#include <cublasLt.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace {

struct Operation {
  cublasOperation_t transa = CUBLAS_OP_N, transb = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  float* bias = nullptr;
  bool is_tf32 = false;
};

struct Preference {
  uint64_t workspace = 0;
  uint32_t alignments[4] = {256, 256, 256, 256};  // of A, B, C and D; the library's defaults
  uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
};

// What the heuristic writes to cublasLtMatmulAlgo_t, which only the library reads.
struct Algorithm {
  uint32_t alignments[4];
  uint32_t rounds_parts;
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

struct Layout {
  cudaDataType type;
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

float load(const void* data, cudaDataType type, int64_t index) {
  if (type == CUDA_R_32F) return static_cast<const float*>(data)[index];
  if (type != CUDA_R_16BF) std::abort();
  const uint32_t bits = uint32_t(static_cast<const uint16_t*>(data)[index]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds to the nearest bfloat16, to the even one of two.
uint16_t bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void store(void* data, cudaDataType type, int64_t index, float value) {
  if (type == CUDA_R_32F) static_cast<float*>(data)[index] = value;
  else static_cast<uint16_t*>(data)[index] = bfloat16(value);
}

float rounded(float value, cudaDataType type) {
  alignas(4) char data[4];
  store(data, type, 0, value);
  return load(data, type, 0);
}

Fault fault = kNone;
int num_calls = 0;
uint32_t last_alignments[4];
bool was_tf32 = false;

uint64_t inner_size(const Layout& a, const Operation& operation) { return operation.transa ? a.rows : a.columns; }

}  // namespace

extern "C" {

void fake_set_fault(int wanted) { fault = static_cast<Fault>(wanted); }

int fake_num_calls() { return num_calls; }

void fake_get_alignments(uint32_t* four) { std::copy_n(last_alignments, 4, four); }

int fake_was_tf32() { return was_tf32; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(1);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute, cudaDataType_t) {
  auto* operation = new Operation;
  operation->is_tf32 = compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  *made = reinterpret_cast<cublasLtMatmulDesc_t>(operation);
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
    cublasLtMatrixLayout_t* made, cudaDataType type, uint64_t rows, uint64_t columns, int64_t leading) {
  if (leading < static_cast<int64_t>(rows)) return CUBLAS_STATUS_INVALID_VALUE;
  *made = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, columns, leading});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(const cublasLtMatrixLayout_t layout) {
  delete &as<Layout>(layout);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  *made = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete &as<Preference>(preference);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t handle, cublasLtMatmulPreferenceAttributes_t attribute, const void* value, size_t size) {
  Preference& preference = as<Preference>(handle);
  if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) assign(preference.workspace, value, size);
  else if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) assign(preference.reductions, value, size);
  else if (attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES) assign(preference.alignments[0], value, size);
  else if (attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES) assign(preference.alignments[1], value, size);
  else if (attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES) assign(preference.alignments[2], value, size);
  else if (attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES) assign(preference.alignments[3], value, size);
  else return CUBLAS_STATUS_INVALID_VALUE;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t la, cublasLtMatrixLayout_t lb,
    cublasLtMatrixLayout_t lc, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t handle, int,
    cublasLtMatmulHeuristicResult_t* found, int* num_found) {
  const Preference& preference = as<Preference>(handle);
  const Operation& operation = as<Operation>(desc);
  const Layout &a = as<Layout>(la), &b = as<Layout>(lb), &c = as<Layout>(lc);
  const bool fit = (operation.transa ? a.columns : a.rows) == c.rows &&
                   (operation.transb ? b.rows : b.columns) == c.columns &&
                   (operation.transb ? b.columns : b.rows) == inner_size(a, operation);
  *num_found = fit && fault != kNothingFound &&
               !(fault == kNoBiasKernel && operation.epilogue == CUBLASLT_EPILOGUE_BGRADB);
  Algorithm& algorithm = as<Algorithm>(&found->algo);
  std::copy_n(preference.alignments, 4, algorithm.alignments);
  algorithm.rounds_parts =
      preference.reductions & (CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE);
  found->state = CUBLAS_STATUS_SUCCESS;
  return fit ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a_data, cublasLtMatrixLayout_t la,
    const void* b_data, cublasLtMatrixLayout_t lb, const void* beta, const void* c_data, cublasLtMatrixLayout_t lc,
    void* d_data, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t* algo, void*, size_t, cudaStream_t) {
  const Operation& operation = as<Operation>(desc);
  const Layout &a = as<Layout>(la), &b = as<Layout>(lb), &c = as<Layout>(lc);
  const Algorithm& algorithm = as<const Algorithm>(algo);
  const bool sums_bias = operation.epilogue == CUBLASLT_EPILOGUE_BGRADB;
  ++num_calls;
  std::copy_n(algorithm.alignments, 4, last_alignments);
  was_tf32 = operation.is_tf32;
  if (fault == kExecutionFails) return CUBLAS_STATUS_EXECUTION_FAILED;
  if (fault == kEverythingRefused || (fault == kBiasRefused && sums_bias)) return CUBLAS_STATUS_NOT_SUPPORTED;
  const void* const pointers[] = {a_data, b_data, c_data, d_data};
  for (int i = 0; i < 4; ++i)
    if (reinterpret_cast<uintptr_t>(pointers[i]) % algorithm.alignments[i]) return CUBLAS_STATUS_INVALID_VALUE;
  const auto at = [](const void* data, const Layout& layout, bool transposed, uint64_t i, uint64_t j) {
    return load(data, layout.type, transposed ? j + i * layout.leading : i + j * layout.leading);
  };
  const uint64_t size = inner_size(a, operation);
  for (uint64_t j = 0; j < c.columns; ++j) {
    float sum_of_b = 0;
    for (uint64_t k = 0; k < size; ++k) sum_of_b += at(b_data, b, operation.transb, k, j);
    if (sums_bias) operation.bias[j] = sum_of_b;
    for (uint64_t i = 0; i < c.rows; ++i) {
      float parts[2] = {0, 0};
      for (uint64_t k = 0; k < size; ++k)
        parts[2 * k >= size] += at(a_data, a, operation.transa, i, k) * at(b_data, b, operation.transb, k, j);
      if (algorithm.rounds_parts)
        for (float& part : parts) part = rounded(part, c.type);
      const float product = parts[0] + parts[1];
      store(
          d_data, c.type, i + j * c.leading,
          *static_cast<const float*>(alpha) * product + *static_cast<const float*>(beta) * at(c_data, c, false, i, j));
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}

const char* cublasLtGetStatusString(cublasStatus_t) { return "refused"; }

}  // extern "C"
