// Windows on buffers, the operators that only make another window, and those that make a tensor.
#include "window.h"
#include "copy.h"
#include "stream.h"

#include <cstring>

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace neuron {

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

size_t span(c10::IntArrayRef size, c10::IntArrayRef stride, size_t itemsize) {
  return at::detail::computeStorageNbytes(size, stride, itemsize);
}

c10::DimVector contiguous(c10::IntArrayRef size) {
  c10::DimVector strides(size.size());
  int64_t step = 1;
  for (size_t i = size.size(); i-- > 0; step *= std::max<int64_t>(size[i], 1)) strides[i] = step;
  return strides;
}

Window::Window(const at::Tensor& tensor)
    : dtype(tensor.scalar_type()), conj(tensor.is_conj()), neg(tensor.is_neg()) {
  TORCH_CHECK(
      tensor.layout() == c10::kStrided, "neuron: tensors of layout ", tensor.layout(),
      " are not supported on the device; use a strided one, or the host");
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  c10::StorageImpl& storage = *impl.unsafe_storage().unsafeGetStorageImpl();
  geometry.set_sizes(tensor.sizes());
  geometry.set_strides(tensor.strides());
  offset = impl.storage_offset();
  Buffer* found = buffer_of(storage);
  if (C10_UNLIKELY(found == nullptr && storage.nbytes() != 0 && storage.data() != nullptr))
    found = adopt(storage);
  const size_t needed =
      tensor.numel() ? static_cast<size_t>(offset) * tensor.itemsize() +
              span(tensor.sizes(), tensor.strides(), tensor.itemsize())
                     : 0;
  TORCH_CHECK(
      needed == 0 || (found != nullptr && needed <= found->nbytes()), "a tensor of size ",
      tensor.sizes(), " needs ", needed, " bytes, and its storage has ",
      found ? found->nbytes() : 0, "; it was resized or never allocated");
  if (found == nullptr) { // an empty tensor whose storage torch made without an allocator
    buffer = c10::make_intrusive<Buffer>(port(), tensor.device().index(), 0);
  } else {
    buffer = BufferPtr::reclaim_copy(found);
  }
}

at::Tensor Window::on_host() const { return over(buffer->data()); }

at::Tensor Window::over(void* memory) const {
  const auto meta = c10::scalarTypeToTypeMeta(dtype);
  // The deleter does nothing: the command keeps the buffer.
  c10::DataPtr data(memory, c10::Device(c10::kCPU));
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), buffer->nbytes(), std::move(data), nullptr, false);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), meta);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(
      geometry.sizes_arrayref(), geometry.strides_arrayref(), offset);
  if (conj) made._set_conj(true);
  if (neg) made._set_neg(true);
  return made;
}

size_t Window::nbytes() const {
  size_t count = c10::elementSize(dtype);
  for (const int64_t extent : geometry.sizes_arrayref()) count *= static_cast<size_t>(extent);
  return count;
}

bool Window::whole() const { return nbytes() == buffer->nbytes(); }

at::Tensor empty_strided(
    const PortPtr& port, int device, c10::IntArrayRef size, c10::IntArrayRef stride,
    c10::ScalarType dtype) {
  at::detail::check_size_nonnegative(size);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !c10::isQIntType(dtype), "neuron: quantized tensors (", dtype, ") are not supported on the "
      "device; keep integers and scales in tensors of their own, or quantize on the host");
  for (const int64_t step : stride)
    TORCH_CHECK(step >= 0, "Negative strides are not supported, but got: ", stride);
  const size_t nbytes = span(size, stride, c10::elementSize(dtype));
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      storage_of(allocate(port, static_cast<c10::DeviceIndex>(device), nbytes)),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(dtype));
  if (size.size() != 1 || size[0] != 0 || stride[0] != 1)
    made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return made;
}

void resize_storage(c10::StorageImpl& storage, size_t nbytes) {
  const c10::DeviceIndex device = storage.device().index();
  Buffer* before = buffer_of(storage);
  const PortPtr owner = before ? before->port() : port();
  BufferPtr fresh = allocate(owner, device, nbytes);
  const size_t kept = before ? std::min(before->nbytes(), nbytes) : 0;
  if (kept) {
    static const char* name = intern("resize_");
    Copy::End from = Copy::End::bytes_of(BufferPtr::reclaim_copy(before), kept);
    Copy::End to = Copy::End::bytes_of(fresh, kept);
    current_stream(device)->submit(
        c10::make_intrusive<Copy>(std::move(from), std::move(to), name));
  }
  c10::Storage made = storage_of(std::move(fresh));
  storage.set_data_ptr_noswap(std::move(made.unsafeGetStorageImpl()->mutable_data_ptr()));
  storage.set_nbytes(nbytes);
}

void resize_tensor(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const size_t itemsize = tensor.itemsize();
  const size_t needed = span(size, stride, itemsize) +
      static_cast<size_t>(impl.storage_offset()) * itemsize;
  c10::StorageImpl& storage = *impl.unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage.nbytes()) resize_storage(storage, needed);
  impl.set_sizes_and_strides(size, stride);
}

void wait_for(const Window& window) {
  check_fork();
  const Buffer& buffer = *window.buffer;
  const Ticket writer = buffer.writer();
  if (C10_UNLIKELY(buffer.shared.load(std::memory_order_relaxed))) {
    wait_for_device(*buffer.port(), buffer.device());
  } else if (writer.lane != 0) {
    buffer.port()->wait(writer, -1);
  }
  if (FailurePtr failure = buffer.failure()) raise_any({std::move(failure)});
}

namespace {

int index_of(std::optional<c10::Device> device) {
  return device.has_value() && device->has_index() ? device->index() : current_device();
}

c10::ScalarType chosen(std::optional<c10::ScalarType> dtype) {
  return dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
}

void refuse_pinned(std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin,
    std::optional<c10::MemoryFormat> format) {
  refuse_pinned(pin);
  TORCH_CHECK(
      layout.value_or(c10::kStrided) == c10::kStrided, "neuron: tensors of layout ", *layout,
      " are not supported on the device; use a strided one, or the host");
  at::detail::check_size_nonnegative(size);
  const c10::DimVector stride = contiguous(size);
  at::Tensor made = neuron::empty_strided(port(), index_of(device), size, stride,
                                          chosen(dtype));
  const auto wanted = format.value_or(c10::MemoryFormat::Contiguous);
  if (wanted != c10::MemoryFormat::Contiguous)
    made.unsafeGetTensorImpl()->empty_tensor_restride(wanted);
  return made;
}

// Zeros without memory, as autograd makes them; what takes one gets zeros with memory.
at::Tensor efficient_zeros(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  const c10::Device place(kDevice, static_cast<c10::DeviceIndex>(index_of(device)));
  at::native::ZeroTensorAllocator allocator(place);
  const c10::DispatchKeySet keys{c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor};
  return at::detail::empty_generic(size, &allocator, keys, chosen(dtype), std::nullopt);
}

at::Tensor empty_with_strides(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool> pin) {
  refuse_pinned(pin);
  TORCH_CHECK(
      size.size() == stride.size(), "dimensionality of sizes (", size.size(),
      ") must match dimensionality of strides (", stride.size(), ")");
  return neuron::empty_strided(port(), index_of(device), size, stride, chosen(dtype));
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  at::detail::check_size_nonnegative(size);
  if (self.sizes() != size) resize_tensor(self, size, contiguous(size));
  if (format.has_value()) {
    TORCH_CHECK(
        *format != c10::MemoryFormat::Preserve, "Unsupported memory format ", *format);
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage_(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  TORCH_CHECK(
      source.device().type() == kDevice, "Attempted to set the storage of a tensor on device \"",
      self.device(), "\" to a storage on different device \"", source.device(), "\".  This is no "
      "longer allowed; the devices must match.");
  TORCH_CHECK(offset >= 0, "Tensor: invalid storage offset ", offset);
  c10::DimVector steps = contiguous(size);
  if (stride.size() == size.size()) steps.assign(stride.begin(), stride.end());
  c10::TensorImpl& impl = *self.unsafeGetTensorImpl();
  impl.set_storage_keep_dtype(std::move(source));
  impl.set_storage_offset(offset);
  resize_tensor(self, size, steps);
  return self;
}

at::Tensor& set_whole_storage_(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor_(at::Tensor& self, const at::Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) return self;
  return set_storage_(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing_(at::Tensor& self) {
  c10::Storage none = storage_of(allocate(port(), self.device().index(), 0));
  return set_storage_(self, std::move(none), 0, {0}, {});
}

bool is_set_to(const at::Tensor& self, const at::Tensor& source) {
  return self.storage().unsafeGetStorageImpl() == source.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == source.storage_offset() && self.sizes() == source.sizes() &&
      self.strides() == source.strides();
}

// Parameters keep their identity when a module moves between the host and a device.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  auto dense = [](const at::Tensor& x) {
    return x.layout() == c10::kStrided && (x.is_cpu() || is_ours(x));
  };
  return dense(self) && dense(from);
}

// Torch's encoder asks whether a padded batch could be a nested tensor, which the device does not
// have: it then computes on the padded batch, and what it gives for padding is not zero.
bool nested_from_mask_left_aligned(const at::Tensor&, const at::Tensor&) { return false; }

// Nothing to note but a bad stream: pending commands keep the memory that they name.
void record_stream(at::Tensor&, c10::Stream stream) { state_of(stream); }

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("_efficientzerotensor", TORCH_FN(efficient_zeros));
  m.impl("empty_strided", TORCH_FN(empty_with_strides));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor_));
  m.impl("set_", TORCH_FN(set_nothing_));
  m.impl("is_set_to", TORCH_FN(is_set_to));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_nested_tensor_from_mask_left_aligned", TORCH_FN(nested_from_mask_left_aligned));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
}

} // namespace neuron
