#include "cublaslt.h"

#include <cublasLt.h>

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

namespace zb {
namespace {

// Everything that the choice of the kernel depends on; of the three pointers, only the alignments.
using Key = std::tuple<
    int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, bool, bool, Dtype, Dtype, uint32_t, uint32_t,
    uint32_t>;

// The largest power of two, at most 256, that divides the address. 256 is the largest alignment on which cuBLASLt's
// choice depends.
uint32_t alignment(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer) | 256;
  return static_cast<uint32_t>(address & (~address + 1));
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
          alignment(gemm.input.data),
          alignment(gemm.grad_output.data),
          alignment(gemm.main_grad)};
}

cudaDataType_t type_of(Dtype dtype) {
  return dtype == Dtype::kFloat ? CUDA_R_32F : dtype == Dtype::kBFloat16 ? CUDA_R_16BF : CUDA_R_16F;
}

// A kernel selected by cuBLASLt, with the descriptors that every call needs.
struct Kernel {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  // If not null, why cuBLASLt cannot compute this product.
  const char* refusal = "it has no kernel for these shapes and dtypes";

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
           limit(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(gemm.input.data)) &&
           limit(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(gemm.grad_output.data)) &&
           limit(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(gemm.main_grad)) &&
           limit(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(gemm.main_grad));
    // The other schemes add the parts of a sum over tokens in the dtype of the gradient, so they round several times.
    if (gemm.grad != Dtype::kFloat)
      good = good && limit(
                         preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                         uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    cublasLtMatmulHeuristicResult_t best{};
    int num_found = 0;
    good = good &&
           cublasLtMatmulAlgoGetHeuristic(handle, operation, a, b, c, c, preference, 1, &best, &num_found) ==
               CUBLAS_STATUS_SUCCESS &&
           num_found > 0 && best.state == CUBLAS_STATUS_SUCCESS;
    if (good) refusal = nullptr;
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

// Whether cuBLASLt rejected the arguments and queued nothing. After other errors, a part may already be on the stream.
bool is_refusal(cublasStatus_t status) {
  return status == CUBLAS_STATUS_INVALID_VALUE || status == CUBLAS_STATUS_NOT_SUPPORTED ||
         status == CUBLAS_STATUS_ARCH_MISMATCH;
}

Outcome queue(Kernel& kernel, cublasLtHandle_t handle, const Gemm& gemm, cudaStream_t stream, void* workspace) {
  if (kernel.refusal != nullptr) return {Result::kRefused, false, kernel.refusal};
  const float one = 1;
  const cublasStatus_t status = cublasLtMatmul(
      handle, kernel.operation, &one, gemm.input.data, kernel.a, gemm.grad_output.data, kernel.b, &one, gemm.main_grad,
      kernel.c, gemm.main_grad, kernel.c, &kernel.algorithm, workspace, kWorkspaceBytes, stream);
  if (status == CUBLAS_STATUS_SUCCESS) return {Result::kQueued, false, nullptr};
  const char* why = cublasLtGetStatusString(status);
  if (!is_refusal(status)) return {Result::kFailed, false, why};
  kernel.refusal = why;  // the same arguments would be refused again
  return {Result::kRefused, false, why};
}

}  // namespace

Outcome queue_gemm(const Gemm& gemm, int device, cudaStream_t stream, void* workspace) {
  Kernels& kernels = Kernels::of(device);
  if (kernels.handle == nullptr) return {Result::kRefused, false, "it cannot be initialized on this device"};
  const std::lock_guard<std::mutex> lock(kernels.mutex);
  if (gemm.bias_sum != nullptr) {
    Kernel& kernel = kernels.get(gemm, device, true);
    const void* where = gemm.bias_sum;
    if (kernel.refusal == nullptr) kernel.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, where);
    Outcome outcome = queue(kernel, kernels.handle, gemm, stream, workspace);
    outcome.sums_bias = outcome.result == Result::kQueued;
    if (outcome.result != Result::kRefused) return outcome;
  }
  return queue(kernels.get(gemm, device, false), kernels.handle, gemm, stream, workspace);
}

}  // namespace zb
