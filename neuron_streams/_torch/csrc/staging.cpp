// Operators on the host where it does not reach the device's memory: on copies, whole buffers there
// and back through the transfer unit.
#include "staging.h"
#include "copy.h"

#include <cstring>

#include <ATen/ops/empty.h>

namespace neuron {

void copy_result(const at::Tensor& result, const at::Tensor& target) {
  if (result.unsafeGetTensorImpl()->has_storage() && !result._is_zerotensor() &&
      result.const_data_ptr() == target.const_data_ptr())
    return;
  if (result.strides() == target.strides() && result.is_non_overlapping_and_dense() &&
      result.is_conj() == target.is_conj() && result.is_neg() == target.is_neg() &&
      !result._is_zerotensor())
    std::memcpy(target.mutable_data_ptr(), result.const_data_ptr(), result.nbytes());
  else
    target.copy_(result);
}

at::Tensor Staging::of(const at::Tensor& tensor, bool written) {
  const Window window(tensor);
  if (window.buffer->reachable()) return window.on_host();
  Copied& found = copied(window);
  found.written |= written;
  return window.over(found.bytes.data_ptr());
}

Staging::Copied& Staging::copied(const Window& window) {
  for (Copied& known : copies_)
    if (known.buffer == window.buffer) return known;
  static const char* name = intern("copy to host");
  const size_t nbytes = window.buffer->nbytes();
  Copied made{window.buffer, at::empty({static_cast<int64_t>(nbytes)}, at::kByte)};
  Copy::End there;
  there.host = made.bytes;
  auto copy = c10::make_intrusive<Copy>(
      Copy::End::bytes_of(window.buffer, nbytes), std::move(there), name);
  finish(stream_, stream_->submit(copy));
  copies_.push_back(std::move(made));
  return copies_.back();
}

void Staging::put(const at::Tensor& result, const at::Tensor& target) {
  const Window window(target);
  if (!window.buffer->reachable()) {
    static const char* name = intern("copy from host");
    Copy::End from;
    from.host = result.detach();
    stream_->submit(
        c10::make_intrusive<Copy>(std::move(from), Copy::End::on_device(target), name));
    return;
  }
  copy_result(result, window.on_host());
}

void Staging::write_back() {
  static const char* name = intern("copy from host");
  for (Copied& copied : copies_) {
    if (!copied.written) continue;
    Copy::End from;
    from.host = copied.bytes;
    Copy::End to = Copy::End::bytes_of(copied.buffer, copied.buffer->nbytes());
    stream_->submit(c10::make_intrusive<Copy>(std::move(from), std::move(to), name));
  }
}

} // namespace neuron
