// The current CUDA stream of torch, and its workspace.

#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#if __has_include(<c10/cuda/impl/cuda_cmake_macros.h>)
#include <c10/cuda/CUDAStream.h>
#else  // Without a CUDA build of torch, this code can be compiled but not run.
#include <c10/core/impl/VirtualGuardImpl.h>
#endif

#include <map>
#include <mutex>
#include <utility>

namespace zb {

inline cudaStream_t current_stream(const c10::Device& device) {
#if __has_include(<c10/cuda/impl/cuda_cmake_macros.h>)
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#else
  return static_cast<cudaStream_t>(c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
#endif
}

// The workspace of a stream, which must be the current one: kernels of one stream run one after the other, so they share
// it. It is kept, because to allocate 32 MiB for each call would split large free blocks where memory is scarcest.
inline at::Tensor workspace_of(const c10::Device& device, cudaStream_t stream, size_t bytes) {
  const auto allocate = [&] {
    return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device));
  };
  // What is allocated during a capture belongs to the graph, which may be replayed on another stream.
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) return allocate();
  static std::mutex mutex;
  // Never destroyed: at the exit of the process, CUDA may end before.
  static auto& kept = *new std::map<std::pair<c10::DeviceIndex, cudaStream_t>, at::Tensor>;
  const std::lock_guard<std::mutex> lock(mutex);
  at::Tensor& workspace = kept[{device.index(), stream}];
  if (!workspace.defined()) workspace = allocate();
  return workspace;
}

}  // namespace zb
