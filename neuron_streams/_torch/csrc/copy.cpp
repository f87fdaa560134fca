// Copies between the host and a device, and within devices.
//
// Pageable memory of the host is read at the call, before it returns, so that the caller may change
// it at once: a fresh buffer, which no command has named yet, is written on the spot, any other
// through a command with a copy of the data. Pinned memory is read when the stream gets there, as in
// CUDA. Copies to the host are commands where its memory is pinned, as what `to("cpu",
// non_blocking=True)` makes is; pageable memory the host fills itself, once the tensor's own writer
// is done.
#include "copy.h"

#include <cstring>

#include <ATen/ops/empty_like.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace neuron {

namespace {

constexpr size_t kSmall = 1 << 16; // bytes; below, a copy costs less than waking a thread for it

bool dense_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
      a.strides() == b.strides() && a.is_non_overlapping_and_dense() &&
      a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

} // namespace

Copy::Copy(End source, End target, const char* name)
    : Command(Kind::Copy, Unit::TensorOp, name),
      source(std::move(source)),
      target(std::move(target)) {
  poisons_mutated = true;
  if (this->source.window.buffer) reads.push_back(this->source.window.buffer);
  if (this->source.pinned) reads.push_back(this->source.pinned);
  if (this->target.pinned) kept = this->target.pinned;
  if (this->target.window.buffer) {
    mutated.push_back(this->target.window.buffer);
    overwrites = this->target.window.whole();
  }
  const at::Tensor from = this->source.tensor(), to = this->target.tensor();
  plain = dense_alike(from, to);
  quick = plain && to.nbytes() <= kSmall;
}

void Copy::run() {
  const at::Tensor from = source.tensor(), to = target.tensor();
  if (plain) std::memmove(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  else to.copy_(from);
}

Copy::End Copy::End::bytes_of(BufferPtr buffer, size_t nbytes) {
  End end;
  end.window.buffer = std::move(buffer);
  end.window.dtype = c10::kByte;
  end.window.geometry.set_sizes({static_cast<int64_t>(nbytes)});
  end.window.geometry.set_strides({1});
  return end;
}

at::Tensor Copy::End::tensor() const { return host.defined() ? host : window.on_host(); }

// The host's end of a copy that waits in a stream: another tensor over the same memory, so that
// `.data =`, `set_` and `resize_` of the user's leave this one as it is.
Copy::End Copy::End::on_host(const at::Tensor& tensor) {
  End end;
  end.pinned = pinned_at(tensor.storage().data());
  if (!end.pinned) {
    end.host = tensor.detach();
    return end;
  }
  Window over;
  over.buffer = end.pinned;
  over.dtype = tensor.scalar_type();
  over.geometry.set_sizes(tensor.sizes());
  over.geometry.set_strides(tensor.strides());
  const auto* begin = static_cast<const char*>(end.pinned->data());
  const auto* first = static_cast<const char*>(tensor.const_data_ptr());
  over.offset = (first - begin) / static_cast<ptrdiff_t>(tensor.itemsize());
  over.conj = tensor.is_conj();
  over.neg = tensor.is_neg();
  end.host = over.on_host();
  return end;
}

Copy::End Copy::End::on_device(const at::Tensor& tensor) {
  End end;
  end.window = Window(tensor);
  return end;
}

void finish(const StreamPtr& stream, Ticket ticket) {
  stream->port->wait(ticket, -1);
  raise_any(stream->port->failures(ticket, ticket.value - 1));
}

namespace {

bool is_pinned(const at::Tensor& tensor) { return bool(pinned_at(tensor.storage().data())); }

void to_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  static const char* name = intern("copy from host");
  Copy::End end = Copy::End::on_device(target);
  const StreamPtr stream = current_stream(target.device().index());
  if (is_pinned(source)) {
    const Ticket ticket = stream->submit(
        c10::make_intrusive<Copy>(Copy::End::on_host(source), std::move(end), name));
    if (non_blocking) return;
    check_sync();
    finish(stream, ticket);
    return;
  }
  const Buffer& buffer = *end.window.buffer;
  if (buffer.reachable() && !buffer.named.load(std::memory_order_relaxed)) {
    c10::InferenceMode guard;
    end.window.on_host().copy_(source.detach());
    return;
  }
  Copy::End taken;
  {
    c10::InferenceMode guard;
    taken.host = at::empty_like(source, source.options().dtype(target.scalar_type()));
    taken.host.copy_(source.detach());
  }
  stream->submit(c10::make_intrusive<Copy>(std::move(taken), std::move(end), name));
  if (!non_blocking) check_sync();
}

void to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  static const char* name = intern("copy to host");
  Copy::End end = Copy::End::on_device(source);
  const bool queued = is_pinned(target);
  if (!non_blocking) check_sync();
  if (!queued && !end.window.buffer->reachable()) {
    Copy::End there;
    there.host = target.detach();
    const StreamPtr stream = current_stream(source.device().index());
    finish(stream, stream->submit(c10::make_intrusive<Copy>(std::move(end), there, name)));
    return;
  }
  if (!queued) {
    wait_for(end.window);
    at::NoGradGuard below_autograd;
    const at::Tensor from = end.window.on_host();
    target.copy_(target.is_inference() ? from : from.alias());
    return;
  }
  if (!target.is_inference()) target.unsafeGetTensorImpl()->bump_version();
  const StreamPtr stream = current_stream(source.device().index());
  const Ticket ticket =
      stream->submit(c10::make_intrusive<Copy>(std::move(end), Copy::End::on_host(target), name));
  if (!non_blocking) finish(stream, ticket);
}

// Between devices the copy starts behind the current streams of both, and what is submitted to the
// source's afterwards, which may overwrite the source, starts behind the copy.
void within_devices(const at::Tensor& source, const at::Tensor& target) {
  static const char* name = intern("copy");
  const StreamPtr stream = current_stream(target.device().index());
  auto copy = c10::make_intrusive<Copy>(
      Copy::End::on_device(source), Copy::End::on_device(target), name);
  if (source.device() == target.device()) {
    stream->submit(copy);
    return;
  }
  const StreamPtr giver = current_stream(source.device().index());
  stream->wait(giver->ticket());
  giver->wait(stream->submit(copy));
}

// Torch lets a storage be resized below what its tensors reach, and leaves the check to the reader.
void check_memory(const at::Tensor& host) {
  const size_t needed = static_cast<size_t>(host.storage_offset()) * host.itemsize() +
      span(host.sizes(), host.strides(), host.itemsize());
  TORCH_CHECK(
      host.layout() != c10::kStrided || needed <= host.storage().nbytes(), "a tensor of size ",
      host.sizes(), " needs ", needed, " bytes, and its storage has ", host.storage().nbytes(),
      "; it was resized or never allocated");
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  check_fork();
  TORCH_CHECK(source.defined() && target.defined(), "copy_: a tensor is not defined");
  if (target.numel() == 0) return target;
  for (const at::Tensor& tensor : {source, target})
    if (tensor.is_cpu()) check_memory(tensor);
  const at::Tensor from = source.sizes() == target.sizes() ? source : source.expand_as(target);
  if (!is_ours(target)) to_host(from, target, non_blocking);
  else if (!is_ours(source)) to_device(from, target, non_blocking);
  else within_devices(from, target);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const Window window(self);
  if (!window.buffer->reachable()) return self.cpu().item();
  check_sync();
  wait_for(window);
  return window.on_host().item();
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
}

// A window keeps the lazy bits of what is copied. Resolving them is a copy, which would come here.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace neuron
