// Executables: one command for a whole compiled model.
#include "execute.h"
#include "copy.h"
#include "random.h"

#include <cstring>

#include <ATen/EmptyTensor.h>
#include <c10/core/InferenceMode.h>

// The chain runner, ../../_runtime/chain.c.
extern "C" int64_t ns_run(const void* program, void* const* inputs, void** results);
extern "C" const char* ns_complaint(void);

namespace neuron {

Execute::Execute(std::shared_ptr<const Loaded> loaded_, Unit unit)
    : Command(Kind::Execute, unit, loaded_->name), loaded(std::move(loaded_)) {}

namespace {

void keep(const at::Tensor& result, const Form& form, const Buffer& target) {
  TORCH_CHECK(
      result.nbytes() == form.nbytes, "an output has ", result.nbytes(), " bytes, and ",
      form.nbytes, " were promised");
  if (!form.nbytes) return;
  const at::Tensor whole = result.contiguous();
  std::memcpy(target.data(), whole.const_data_ptr(), form.nbytes);
}

at::Tensor host_tensor(void* data, const Form& form) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), form.nbytes, c10::DataPtr(data, c10::Device(c10::kCPU)),
      nullptr, false);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(form.dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(form.size, form.stride);
  return made;
}

} // namespace

void Execute::run() {
  std::vector<void*> data;
  for (const Input& input : inputs)
    data.push_back(static_cast<char*>(input.buffer->data()) + input.offset);
  std::vector<at::Tensor> made;
  if (loaded->program != nullptr) {
    std::vector<void*> results(loaded->outputs.size());
    const int64_t failed = ns_run(loaded->program, data.data(), results.data());
    if (failed) {
      const std::string words = ns_complaint();
      TORCH_CHECK(
          false, name, ": ",
          words.empty() ? "it failed and does not say why; there may be no memory left" : words);
    }
    for (void* result : results) {
      auto* tensor = static_cast<at::Tensor*>(result); // what an AtenTensorHandle points to
      made.push_back(std::move(*tensor));
      delete tensor;
    }
  } else {
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < data.size(); i++)
      tensors.push_back(host_tensor(data[i], loaded->inputs[i]));
    made = run_in_python(loaded->handle, tensors, numbers);
    TORCH_CHECK(
        made.size() == outputs.size(), name, ": ", outputs.size(), " outputs were promised, ",
        made.size(), " came");
  }
  for (size_t i = 0; i < made.size(); i++) keep(made[i], loaded->outputs[i], *outputs[i]);
}

namespace {

bool fits(const at::Tensor& tensor, const Form& form) {
  if (!tensor.defined() || tensor.layout() != c10::kStrided ||
      tensor.scalar_type() != form.dtype || tensor.sizes() != form.size)
    return false;
  return !tensor.is_conj() && !tensor.is_neg();
}

bool laid_out(const at::Tensor& tensor, const Form& form) {
  return tensor.strides() == form.stride || tensor.is_contiguous();
}

// The input of a tensor of the device, or of one of the host in a buffer of its own.
std::optional<Execute::Input> input_of(
    const at::Tensor& tensor, const Form& form, const StreamPtr& stream, bool mutated) {
  if (!fits(tensor, form)) return {};
  if (is_ours(tensor)) {
    if (tensor.device().index() != stream->device || !laid_out(tensor, form)) return {};
    const size_t offset = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
    Buffer* buffer = buffer_of(*tensor.storage().unsafeGetStorageImpl());
    if (buffer == nullptr || offset + form.nbytes > buffer->nbytes()) return {};
    return Execute::Input{BufferPtr::reclaim_copy(buffer), offset};
  }
  if (mutated || !tensor.is_cpu()) return {};
  BufferPtr buffer =
      allocate(stream->port, static_cast<c10::DeviceIndex>(stream->device), form.nbytes);
  if (!buffer->reachable()) {
    Copy::End from, to;
    from.host = tensor.detach().clone(at::MemoryFormat::Contiguous);
    to.window.buffer = buffer;
    to.window.dtype = form.dtype;
    to.window.geometry.set_sizes(form.size);
    to.window.geometry.set_strides(form.stride);
    static const char* name = intern("copy from host");
    stream->submit(c10::make_intrusive<Copy>(std::move(from), std::move(to), name));
  } else if (form.nbytes && tensor.is_contiguous())
    std::memcpy(buffer->data(), tensor.const_data_ptr(), form.nbytes);
  else if (form.nbytes) {
    c10::InferenceMode guard;
    host_tensor(buffer->data(), form).copy_(tensor.detach());
  }
  return Execute::Input{std::move(buffer), 0};
}

bool share(const Execute& command, size_t a, size_t b) {
  const Execute::Input &one = command.inputs[a], &other = command.inputs[b];
  return one.buffer == other.buffer &&
      one.offset < other.offset + command.loaded->inputs[b].nbytes &&
      other.offset < one.offset + command.loaded->inputs[a].nbytes;
}

} // namespace

std::optional<std::vector<at::Tensor>> execute(
    const std::shared_ptr<const Loaded>& loaded, const std::vector<at::Tensor>& tensors) {
  const StreamPtr stream = current_stream(current_device());
  auto command = c10::make_intrusive<Execute>(loaded);
  const auto& mutated = loaded->mutated;
  for (size_t i = 0; i < tensors.size(); i++) {
    const bool updates = std::find(mutated.begin(), mutated.end(), i) != mutated.end();
    auto input = input_of(tensors[i], loaded->inputs[i], stream, updates);
    if (!input.has_value()) return {};
    command->reads.push_back(input->buffer);
    if (updates) command->mutated.push_back(input->buffer);
    command->inputs.push_back(std::move(*input));
  }
  for (const size_t i : mutated)
    for (size_t k = 0; k < tensors.size(); k++)
      if (k != i && share(*command, i, k)) return {};
  if (loaded->draws) {
    at::Generator generator = default_generator(stream->device);
    command->numbers = next_numbers(generator);
  }
  std::vector<at::Tensor> results;
  for (const Form& form : loaded->outputs) {
    at::Tensor made =
        empty_strided(stream->port, stream->device, form.size, form.stride, form.dtype);
    command->outputs.push_back(
        BufferPtr::reclaim_copy(buffer_of(*made.storage().unsafeGetStorageImpl())));
    results.push_back(std::move(made));
  }
  for (const size_t i : mutated) tensors[i].unsafeGetTensorImpl()->bump_version();
  stream->submit(command);
  return results;
}

} // namespace neuron
