// Windows on buffers: what a command takes along of a device tensor. See window.cpp.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/DimVector.h>

#include "core.h"

namespace neuron {

// A strided window: a copy of a tensor's metadata and a reference to its buffer, so that neither
// `.data =` nor `set_` nor `resize_` of the tensor changes what a queued command sees.
struct Window {
  BufferPtr buffer;
  c10::ScalarType dtype = c10::kFloat;
  c10::impl::SizesAndStrides geometry;
  int64_t offset = 0; // in elements
  bool conj = false, neg = false;

  Window() = default;
  explicit Window(const at::Tensor& device_tensor); // throws where it reaches out of its storage

  // The host's tensor over the same memory. For whoever runs the command, or has waited.
  at::Tensor on_host() const;
  at::Tensor over(void* memory) const; // the same over a copy of the buffer, which must outlive it
  size_t nbytes() const;
  bool whole() const; // whether writing it overwrites every byte of the buffer
};

// The bytes that a window of these sizes and strides spans.
size_t span(c10::IntArrayRef size, c10::IntArrayRef stride, size_t itemsize);

c10::DimVector contiguous(c10::IntArrayRef size); // strides, in elements

// An empty device tensor. Its memory is there at once; what it holds is not defined.
at::Tensor empty_strided(
    const PortPtr&, int device, c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType);

// Gives a storage another size; what is queued keeps the memory of before.
void resize_storage(c10::StorageImpl&, size_t nbytes);
// Gives a tensor another size, and its storage if that has less.
void resize_tensor(const at::Tensor&, c10::IntArrayRef size, c10::IntArrayRef stride);

// Waits until a window's memory holds what was written to it; throws what poisons it.
void wait_for(const Window&);

bool is_ours(const at::Tensor&);

} // namespace neuron
