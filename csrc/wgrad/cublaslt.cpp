#include "cublaslt.h"

#include <cublasLt.h>

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

namespace zb {
namespace {

// Everything that the choice of the kernel depends on; of pointers, only the alignment.
using Key = std::tuple<
    int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, bool, bool, Dtype, Dtype, int>;

int alignment(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return address % 16 == 0 ? 16 : address % 8 == 0 ? 8 : address % 4 == 0 ? 4 : 2;
}

int alignment(const Gemm& gemm) {
  const int a = alignment(gemm.input.data), b = alignment(gemm.grad_output.data), c = alignment(gemm.main_grad);
  return a < b ? (a < c ? a : c) : (b < c ? b : c);
}

Key key_of(const Gemm& gemm, int device, bool sums_bias) {
  return {device,
          gemm.tokens,
          gemm.in,
          gemm.out,
          gemm.input.leading,
          gemm.grad_output.leading,
          gemm.main_grad_leading,
          gemm.input.is_row_major,
          gemm.grad_output.is_row_major,
          sums_bias,
          gemm.allows_tf32,
          gemm.operands,
          gemm.grad,
          alignment(gemm)};
}

cudaDataType_t type_of(Dtype dtype) {
  return dtype == Dtype::kFloat ? CUDA_R_32F : dtype == Dtype::kBFloat16 ? CUDA_R_16BF : CUDA_R_16F;
}

// A kernel selected by cuBLASLt, with the descriptors that every call needs.
struct Kernel {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  bool is_found = false;

  Kernel(cublasLtHandle_t handle, const Gemm& gemm, bool sums_bias) {
    // cuBLAS is column-major: it sees main_grad^T (in, out) += input^T (in, tokens) grad_output (tokens, out).
    const cublasOperation_t transa = gemm.input.is_row_major ? CUBLAS_OP_N : CUBLAS_OP_T;
    const cublasOperation_t transb = gemm.grad_output.is_row_major ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cudaDataType_t operands = type_of(gemm.operands);
    const cublasComputeType_t compute = gemm.operands == Dtype::kFloat && gemm.allows_tf32
                                            ? CUBLAS_COMPUTE_32F_FAST_TF32
                                            : CUBLAS_COMPUTE_32F;
    cublasLtMatmulPreference_t preference = nullptr;
    bool good = cublasLtMatmulDescCreate(&operation, compute, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS;
    good = good && set(CUBLASLT_MATMUL_DESC_TRANSA, transa) && set(CUBLASLT_MATMUL_DESC_TRANSB, transb);
    if (sums_bias) {
      const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BGRADB;
      const cudaDataType_t sums = CUDA_R_32F;
      const void* where = gemm.bias_sum;
      good = good && set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue) &&
             set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, sums) && set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, where);
    }
    good = good && layout(&a, operands, gemm.input.is_row_major, gemm.in, gemm.tokens, gemm.input.leading) &&
           layout(&b, operands, !gemm.grad_output.is_row_major, gemm.tokens, gemm.out, gemm.grad_output.leading) &&
           layout(&c, type_of(gemm.grad), true, gemm.in, gemm.out, gemm.main_grad_leading) &&
           cublasLtMatmulPreferenceCreate(&preference) == CUBLAS_STATUS_SUCCESS;
    good = good && limit(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes) &&
           limit(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(alignment(gemm))) &&
           limit(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(alignment(gemm))) &&
           limit(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(alignment(gemm))) &&
           limit(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(alignment(gemm)));
    cublasLtMatmulHeuristicResult_t best{};
    int num_found = 0;
    is_found = good &&
               cublasLtMatmulAlgoGetHeuristic(
                   handle, operation, a, b, c, c, preference, 1, &best, &num_found) == CUBLAS_STATUS_SUCCESS &&
               num_found > 0;
    algorithm = best.algo;
    if (preference != nullptr) cublasLtMatmulPreferenceDestroy(preference);
  }

  ~Kernel() {
    for (cublasLtMatrixLayout_t matrix : {a, b, c})
      if (matrix != nullptr) cublasLtMatrixLayoutDestroy(matrix);
    if (operation != nullptr) cublasLtMatmulDescDestroy(operation);
  }

  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  template <typename T>
  bool set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    return cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)) == CUBLAS_STATUS_SUCCESS;
  }

 private:
  // Layout of a matrix that enters the product as (rows, columns); stored like this if `as_seen`, else transposed.
  static bool layout(
      cublasLtMatrixLayout_t* made, cudaDataType_t type, bool as_seen, int64_t rows, int64_t columns, int64_t leading) {
    return cublasLtMatrixLayoutCreate(made, type, as_seen ? rows : columns, as_seen ? columns : rows, leading) ==
           CUBLAS_STATUS_SUCCESS;
  }

  template <typename T>
  static bool limit(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    return cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)) == CUBLAS_STATUS_SUCCESS;
  }
};

// Maximum number of cached kernels. A model needs a few dozen; experts need more, since their token counts vary.
constexpr size_t kMostKernels = 4096;

class Kernels {
 public:
  cublasLtHandle_t handle = nullptr;
  std::mutex mutex;  // a kernel's descriptor has the pointer of the bias until the kernel is queued

  static Kernels& of(int device) {
    static std::mutex guard;
    static std::map<int, std::unique_ptr<Kernels>> kernels;
    const std::lock_guard<std::mutex> lock(guard);
    std::unique_ptr<Kernels>& found = kernels[device];
    if (found == nullptr) {
      found = std::make_unique<Kernels>();
      cublasLtCreate(&found->handle);
    }
    return *found;
  }

  Kernel& get(const Gemm& gemm, int device, bool sums_bias) {
    if (chosen_.size() >= kMostKernels) chosen_.clear();
    std::unique_ptr<Kernel>& found = chosen_[key_of(gemm, device, sums_bias)];
    if (found == nullptr) found = std::make_unique<Kernel>(handle, gemm, sums_bias);
    return *found;
  }

 private:
  std::map<Key, std::unique_ptr<Kernel>> chosen_;
};

}  // namespace

const char* queue_gemm(const Gemm& gemm, int device, cudaStream_t stream, void* workspace, bool* sums_bias) {
  Kernels& kernels = Kernels::of(device);
  if (kernels.handle == nullptr) return "cuBLASLt cannot be initialized on this device";
  const std::lock_guard<std::mutex> lock(kernels.mutex);
  *sums_bias = gemm.bias_sum != nullptr && kernels.get(gemm, device, true).is_found;
  Kernel& kernel = kernels.get(gemm, device, *sums_bias);
  if (!kernel.is_found) return "cuBLASLt has no kernel for these shapes and dtypes";
  if (*sums_bias) {
    const void* where = gemm.bias_sum;
    kernel.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, where);
  }
  const float one = 1;
  const cublasStatus_t status = cublasLtMatmul(
      kernels.handle, kernel.operation, &one, gemm.input.data, kernel.a, gemm.grad_output.data, kernel.b, &one,
      gemm.main_grad, kernel.c, gemm.main_grad, kernel.c, &kernel.algorithm, workspace, kWorkspaceBytes, stream);
  return status == CUBLAS_STATUS_SUCCESS ? nullptr : cublasLtGetStatusString(status);
}

}  // namespace zb
