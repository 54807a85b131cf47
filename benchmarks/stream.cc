// y = 2 x for f32, a memory-bound kernel: one load and one store for each element.

#include <cstddef>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Stream(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  const float* from = x.typed_data();
  float* to = y->typed_data();
  const std::size_t count = x.element_count();
  for (std::size_t i = 0; i < count; ++i) to[i] = 2.0f * from[i];
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    stream, Stream, ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
