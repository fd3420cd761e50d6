// The current CUDA stream of torch.

#pragma once

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#if __has_include(<c10/cuda/impl/cuda_cmake_macros.h>)
#include <c10/cuda/CUDAStream.h>
#else  // Without a CUDA build of torch, this code can be compiled but not run.
#include <c10/core/impl/VirtualGuardImpl.h>
#endif

namespace zb {

inline cudaStream_t current_stream(const c10::Device& device) {
#if __has_include(<c10/cuda/impl/cuda_cmake_macros.h>)
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#else
  return static_cast<cudaStream_t>(c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
#endif
}

}  // namespace zb
