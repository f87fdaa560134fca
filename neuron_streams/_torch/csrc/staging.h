// Tensors of a device for the host to work on. See staging.cpp.
#pragma once

#include "stream.h"
#include "window.h"

namespace neuron {

// Puts a result of the CPU where it belongs on the host, if it is not there already.
void copy_result(const at::Tensor& result, const at::Tensor& target);

// What an operator on the host reads and writes. Where the host reaches the device's memory that is
// the memory itself; else copies of whole buffers, so that tensors which share memory still do.
class Staging {
 public:
  explicit Staging(StreamPtr stream) : stream_(std::move(stream)) {}

  // The host's tensor for one of the device; waits for what was written to it.
  at::Tensor of(const at::Tensor&, bool written);
  // Puts a result of the host where a device tensor is.
  void put(const at::Tensor& result, const at::Tensor& target);
  // Sends back what was written.
  void write_back();

 private:
  struct Copied {
    BufferPtr buffer;
    at::Tensor bytes;
    bool written = false;
  };
  Copied& copied(const Window&);

  StreamPtr stream_;
  std::vector<Copied> copies_;
};

} // namespace neuron
