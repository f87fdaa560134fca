// Any operator as a command: its results at once, its work on the current stream.
//
// Every operator that the CPU has a kernel for is registered, so that a composite is taken apart
// just where the CPU takes it apart, and the results are the CPU's to the last bit. A worker runs
// the CPU's kernel on the memory of the device, without the GIL.
#include "operator.h"
#include "copy.h"
#include "random.h"
#include "staging.h"
#include "stream.h"

#include <map>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

// Of <ATen/native/Resize.h>, which takes seconds to compile.
namespace at::native {
TORCH_API bool resize_output_check(const Tensor& output, IntArrayRef shape);
} // namespace at::native

namespace neuron {

// -- schemas ------------------------------------------------------------------------------------

namespace {

bool writes(const c10::Argument& argument) {
  const c10::AliasInfo* info = argument.alias_info();
  if (info == nullptr) return false;
  const auto& items = info->containedTypes(); // of a list
  return info->isWrite() ||
      std::any_of(items.begin(), items.end(), [](const auto& item) { return item.isWrite(); });
}

bool is_tensor(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::TensorType::get());
}

// The overload that writes into given tensors what `handle` returns, if the CPU has a kernel for it:
// those that torch generates allocate and copy, which is no better than doing so here.
std::optional<c10::OperatorHandle> find_out(const c10::OperatorHandle& handle) {
  static const auto* overloads = [] {
    auto* made = new std::unordered_multimap<std::string, c10::OperatorName>;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames())
      made->emplace(name.name, name);
    return made;
  }();
  const c10::FunctionSchema& schema = handle.schema();
  const auto& arguments = schema.arguments();
  // A loss writes the size of its input first, even where the result is to be a number.
  for (const c10::Argument& argument : arguments)
    if (argument.name() == "reduction") return {};
  for (const c10::Argument& result : schema.returns())
    if (!is_tensor(result) || result.alias_info() != nullptr) return {};
  for (auto [at, end] = overloads->equal_range(handle.operator_name().name); at != end; ++at) {
    auto found = c10::Dispatcher::singleton().findSchema(at->second);
    if (!found || !found->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    const auto& others = found->schema().arguments();
    if (others.size() != arguments.size() + schema.returns().size()) continue;
    bool fits = true;
    for (size_t i = 0; i < others.size() && fits; i++) {
      if (i < arguments.size())
        fits = others[i].name() == arguments[i].name() &&
            *others[i].type() == *arguments[i].type() && others[i].alias_info() == nullptr;
      else
        fits = is_tensor(others[i]) && others[i].alias_info() && others[i].alias_info()->isWrite();
    }
    if (fits) return found;
  }
  return {};
}

bool is_in_place_overwrite(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::bernoulli_",
      "aten::random_", "aten::exponential_", "aten::log_normal_", "aten::cauchy_",
      "aten::geometric_"};
  return names->count(name);
}

} // namespace

OperatorInfo::OperatorInfo(const c10::OperatorHandle& handle)
    : handle(handle), name(intern(c10::toString(handle.operator_name()))) {
  const c10::FunctionSchema& schema = handle.schema();
  arguments = schema.arguments().size();
  returns = schema.returns().size();
  bool writes_out = false;
  for (size_t i = 0; i < arguments; i++) {
    const c10::Argument& argument = schema.arguments()[i];
    const bool write = writes(argument);
    written.push_back(write);
    writes_any |= write;
    resized.push_back(write && argument.kwarg_only() && is_tensor(argument));
    writes_out |= resized.back();
    const std::string type = argument.type()->str();
    if (type.find("Generator") != std::string::npos) generator = static_cast<int>(i);
    if (type == "Device" || type == "Device?") device = static_cast<int>(i);
    if (argument.name() == "output_size" && type == "int?") output_size = static_cast<int>(i);
    takes_host_indices |= argument.name() == "indices" && type.find("[]") != std::string::npos;
  }
  for (const c10::Argument& result : schema.returns()) {
    int found = -1;
    if (result.alias_info() != nullptr)
      for (size_t i = 0; i < arguments && found < 0; i++) {
        const auto* info = schema.arguments()[i].alias_info();
        if (info && info->isWrite() && info->beforeSets() == result.alias_info()->beforeSets())
          found = static_cast<int>(i);
      }
    alias.push_back(found);
    const std::string type = result.type()->str();
    if (found < 0 && type != "Tensor" && type.rfind("Tensor[]", 0) != 0) waits = true;
  }
  overwrites = writes_out || is_in_place_overwrite(handle.operator_name().name);
  random = handle.hasTag(at::Tag::nondeterministic_seeded);
  waits |= handle.hasTag(at::Tag::data_dependent_output) ||
      handle.hasTag(at::Tag::dynamic_output_shape);
  out = find_out(handle);
}

const OperatorInfo& OperatorInfo::of(const c10::OperatorHandle& handle) {
  // By schema: handles are copies. Leaked, as commands name them till the end.
  static auto* mutex = new std::shared_mutex;
  static auto* known = new std::unordered_map<const void*, std::unique_ptr<OperatorInfo>>;
  const void* key = &handle.schema();
  {
    std::shared_lock lock(*mutex);
    auto found = known->find(key);
    if (found != known->end()) return *found->second;
  }
  auto made = std::make_unique<OperatorInfo>(handle);
  std::unique_lock lock(*mutex);
  auto& slot = (*known)[key];
  if (!slot) slot = std::move(made);
  return *slot;
}

// -- calls --------------------------------------------------------------------------------------

// Torch has tensors that are known to be zero, without memory. The CPU's kernels get them with memory.
static void give_memory(const Call& call, std::vector<c10::IValue>& values) {
  bool found = false;
  call.for_each_tensor([&](const at::Tensor& tensor, size_t, int) {
    found |= tensor._is_zerotensor();
  });
  if (!found) return;
  values = with_tensors(call, [](const at::Tensor& tensor, size_t) {
    return tensor._is_zerotensor() ? at::zeros(tensor.sizes(), tensor.options()) : tensor;
  });
}

Call::Call(const OperatorInfo& info, torch::jit::Stack* stack)
    : info(info), grad(c10::GradMode::is_enabled()) {
  const auto begin = stack->end() - static_cast<ptrdiff_t>(info.arguments);
  values.assign(std::make_move_iterator(begin), std::make_move_iterator(stack->end()));
  stack->erase(begin, stack->end());
  give_memory(*this, values);
  c10::Device host(c10::kCPU);
  for_each_tensor([&](const at::Tensor& tensor, size_t argument, int place) {
    if (is_ours(tensor)) {
      const int index = tensor.device().index();
      TORCH_CHECK(
          device < 0 || device == index, "Expected all tensors to be on the same device, but found "
          "at least two devices, neuron:", device, " and neuron:", index, "!");
      device = index;
    } else if (!(info.takes_host_indices && place >= 0) &&
               (tensor.dim() > 0 || info.written[argument])) {
      seen_host = true;
      host = tensor.device();
    }
  });
  const bool named = info.device >= 0 && values[static_cast<size_t>(info.device)].isDevice();
  if (device < 0 && named) {
    const c10::Device wanted = values[static_cast<size_t>(info.device)].toDevice();
    device = wanted.has_index() ? wanted.index() : -1;
  }
  if (device < 0) device = current_device();
  TORCH_CHECK(
      !seen_host, "Expected all tensors to be on the same device, but found at least two devices, "
      "neuron:", device, " and ", host, "!");
}

// Indexing depends on data only where an index is a mask.
bool Call::waits() const {
  if (!info.waits) return false;
  if (info.output_size >= 0 && !values[static_cast<size_t>(info.output_size)].isNone())
    return false;
  if (!info.takes_host_indices) return true;
  bool masked = false;
  for_each_tensor([&](const at::Tensor& tensor, size_t argument, int place) {
    const auto dtype = tensor.scalar_type();
    masked |= argument > 0 && place >= 0 && (dtype == at::kBool || dtype == at::kByte);
  });
  return masked;
}

namespace {

// The numbers that a call draws, as a generator of the host.
std::optional<at::Generator> draw(const Call& call) {
  if (call.info.generator < 0) return {};
  const c10::IValue& given = call.values[static_cast<size_t>(call.info.generator)];
  at::Generator generator =
      given.isNone() ? default_generator(call.device) : given.toGenerator();
  TORCH_CHECK(
      generator.device().type() == kDevice, "Expected a 'neuron' device type for generator but "
      "found '", generator.device().type(), "'");
  return next_numbers(generator);
}

void check_layout(const at::Tensor& result, const Shape& promised, const char* name) {
  TORCH_CHECK(
      result.sizes() == promised.size && result.scalar_type() == promised.dtype, name,
      ": the result has the size ", result.sizes(), " and dtype ", result.scalar_type(),
      ", and ", c10::IntArrayRef(promised.size), " and ", promised.dtype, " were promised. Its "
      "size depends on data, so report it, and compute it on the host meanwhile");
}

// An operator with what it takes along of its arguments.
struct Operator final : Command {
  explicit Operator(const Call& call)
      : Command(Kind::Operator, Unit::Compute, call.info.name), info(call.info), grad(call.grad) {
    overwrites = info.overwrites;
    poisons_mutated = true;
    values.resize(call.values.size());
    for (size_t i = 0; i < values.size(); i++) {
      const c10::IValue& value = call.values[i];
      if (!holds_tensors(value)) values[i] = value;
    }
    call.for_each_tensor([&](const at::Tensor& tensor, size_t argument, int place) {
      add(tensor, argument, place);
    });
    for (size_t i = 0; i < values.size(); i++) {
      lists.push_back(0);
      if (call.values[i].isTensorList())
        lists.back() = static_cast<int>(call.values[i].toTensorVector().size()) + 1;
      else if (call.values[i].isOptionalTensorList())
        lists.back() = -static_cast<int>(call.values[i].toOptionalTensorVector().size()) - 1;
    }
    if (info.device >= 0) values[static_cast<size_t>(info.device)] = c10::Device(c10::kCPU);
    if (auto numbers = draw(call)) values[static_cast<size_t>(info.generator)] = *numbers;
  }

  // A fresh result: room for it, and its tensor.
  at::Tensor add_result(const StreamPtr& stream, const Shape& shape) {
    if (!shape.defined) {
      results.emplace_back();
      return {};
    }
    at::Tensor made =
        empty_strided(stream->port, stream->device, shape.size, shape.stride, shape.dtype);
    if (shape.conj) made._set_conj(true);
    if (shape.neg) made._set_neg(true);
    results.emplace_back(made);
    outputs.push_back(results.back().buffer);
    return made;
  }

  void run() override {
    c10::AutoGradMode mode(grad);
    torch::jit::Stack stack = arguments();
    const bool into_given = info.out.has_value() && !results.empty() &&
        std::all_of(results.begin(), results.end(), [](const Window& window) {
          return window.buffer && !window.conj && !window.neg;
        });
    if (into_given) {
      for (const Window& window : results) stack.emplace_back(window.on_host());
      info.out->callBoxed(stack);
      return;
    }
    info.handle.callBoxed(stack);
    keep(stack);
  }

  const OperatorInfo& info;
  const bool grad;
  std::vector<Result::Return> promised;

 private:
  struct Slot {
    size_t argument;
    int place; // in a list, or -1
    Window window;
    at::Tensor host; // a number, or indices, of the host
  };

  static bool holds_tensors(const c10::IValue& value) {
    return (value.isTensor() && value.toTensor().defined()) || value.isTensorList() ||
        value.isOptionalTensorList();
  }

  void add(const at::Tensor& tensor, size_t argument, int place) {
    Slot slot{argument, place, {}, {}};
    if (is_ours(tensor)) {
      slot.window = Window(tensor);
      if (info.written[argument]) mutated.push_back(slot.window.buffer);
      if (!info.written[argument] || !info.overwrites) reads.push_back(slot.window.buffer);
      if (info.overwrites && info.written[argument] && !slot.window.whole()) partial = true;
    } else {
      slot.host = tensor.detach().clone();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
        slot.host.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    if (partial) overwrites = false;
    slots.push_back(std::move(slot));
  }

  torch::jit::Stack arguments() const {
    torch::jit::Stack stack = values;
    for (size_t i = 0; i < lists.size(); i++) {
      if (lists[i] > 0) {
        c10::List<at::Tensor> list;
        list.resize(static_cast<size_t>(lists[i] - 1));
        stack[i] = std::move(list);
      } else if (lists[i] < 0) {
        c10::List<std::optional<at::Tensor>> list;
        list.resize(static_cast<size_t>(-lists[i] - 1));
        stack[i] = std::move(list);
      }
    }
    for (const Slot& slot : slots) {
      at::Tensor tensor = slot.host.defined() ? slot.host : slot.window.on_host();
      c10::IValue& value = stack[slot.argument];
      const auto place = static_cast<size_t>(slot.place);
      if (lists[slot.argument] > 0) value.toTensorList().set(place, std::move(tensor));
      else if (lists[slot.argument] < 0) value.toOptionalTensorList().set(place, tensor);
      else value = std::move(tensor);
    }
    return stack;
  }

  void keep(const torch::jit::Stack& stack) const {
    size_t at = 0;
    for (size_t i = 0; i < info.returns; i++) {
      if (info.alias[i] >= 0) continue;
      const Result::Return& expected = promised[i];
      std::vector<at::Tensor> made =
          expected.list ? stack[i].toTensorVector() : std::vector{stack[i].toTensor()};
      TORCH_CHECK(
          made.size() == expected.shapes.size(), name, ": ", expected.shapes.size(),
          " results were promised, and ", made.size(), " came");
      for (size_t k = 0; k < made.size(); k++, at++) {
        if (!results[at].buffer) continue;
        check_layout(made[k], expected.shapes[k], name);
        copy_result(made[k], results[at].on_host());
      }
    }
  }

  std::vector<c10::IValue> values;
  std::vector<int> lists; // of each argument: size + 1 of a list, negative where items may be None
  std::vector<Slot> slots;
  std::vector<Window> results;
  bool partial = false;
};

// -- operators that wait ------------------------------------------------------------------------

std::map<std::string, int64_t>& ran_on_host() {
  static auto* made = new std::map<std::string, int64_t>;
  return *made;
}
std::mutex& ran_on_host_mutex() {
  static auto* made = new std::mutex;
  return *made;
}

void count_on_host(const char* name) {
  std::lock_guard lock(ran_on_host_mutex());
  if (ran_on_host()[name]++ == 0) say_on_host(name);
}

at::Tensor to_device_tensor(
    const StreamPtr& stream, const at::Tensor& result, Staging& staging) {
  if (!result.defined()) return {};
  TORCH_CHECK_NOT_IMPLEMENTED(
      result.layout() == c10::kStrided, "neuron: tensors of layout ", result.layout(),
      " are not supported on the device; use a strided one, or the host");
  at::Tensor made = empty_strided(
      stream->port, stream->device, result.sizes(), result.strides(), result.scalar_type());
  staging.put(result, made);
  return made;
}

// Where the host does not reach the memory of the device, operators need a copy of it, which is so
// slow that it must be wanted.
void check_host_operators(const StreamPtr& stream, const char* name) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      stream->port->host_operators, name, ": a Neuron device runs compiled executables only. Put "
      "operators into a function for neuron_streams.compile, or set NEURON_STREAMS_HOST_OPERATORS=1,"
      " which runs them on the host, on copies, after all that their stream has queued");
  count_on_host(name);
}

// What the CPU's kernel checks of the result it is given, which here is another one. On copies all
// operators come here, and most of them may write over the whole of what they read.
void check_overlap(const Call& call, bool on_copies) {
  for (size_t i = 0; i < call.info.arguments; i++) {
    if (!call.info.resized[i] || !call.values[i].isTensor()) continue;
    const at::Tensor& target = call.values[i].toTensor();
    at::assert_no_internal_overlap(target);
    call.for_each_tensor([&](const at::Tensor& tensor, size_t argument, int) {
      if (call.info.resized[argument]) return;
      on_copies ? at::assert_no_partial_overlap(target, tensor)
                : at::assert_no_overlap(target, tensor);
    });
  }
}

// Runs a call on the calling thread, once the stream has done all before it: a queued reader of what
// it writes must not be overtaken.
void run_now(const Call& call, const StreamPtr& stream, torch::jit::Stack* stack) {
  const OperatorInfo& info = call.info;
  check_sync();
  stream->port->wait(stream->ticket(), -1);
  call.for_each_tensor([&](const at::Tensor& tensor, size_t, int) {
    if (is_ours(tensor)) wait_for(Window(tensor));
  });
  check_overlap(call, !stream->port->reaches_memory);
  Staging staging(stream);
  torch::jit::Stack arguments = with_tensors(call, [&](const at::Tensor& tensor, size_t argument) {
    if (!is_ours(tensor)) return tensor;
    if (info.resized[argument]) return at::empty({0}, tensor.options().device(c10::kCPU));
    return staging.of(tensor, info.written[argument]);
  });
  std::vector<at::Tensor> outs(info.arguments);
  for (size_t i = 0; i < info.arguments; i++)
    if (info.resized[i] && arguments[i].isTensor()) outs[i] = arguments[i].toTensor();
  if (info.device >= 0) arguments[static_cast<size_t>(info.device)] = c10::Device(c10::kCPU);
  if (auto numbers = draw(call)) arguments[static_cast<size_t>(info.generator)] = *numbers;
  {
    c10::InferenceMode guard;
    c10::AutoGradMode mode(call.grad);
    info.handle.callBoxed(arguments);
  }
  for (size_t i = 0; i < info.arguments; i++) {
    if (!outs[i].defined()) continue;
    const at::Tensor& target = call.values[i].toTensor();
    if (target.sizes() != outs[i].sizes()) {
      at::native::resize_output_check(target, outs[i].sizes());
      resize_tensor(target, outs[i].sizes(), outs[i].strides());
    }
    staging.put(outs[i], target);
  }
  staging.write_back();
  for (size_t i = 0; i < info.returns; i++) {
    c10::IValue& value = arguments[i];
    if (info.alias[i] >= 0) {
      stack->push_back(call.values[static_cast<size_t>(info.alias[i])]);
    } else if (value.isTensor()) {
      stack->emplace_back(to_device_tensor(stream, value.toTensor(), staging));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector())
        list.push_back(to_device_tensor(stream, tensor, staging));
      stack->emplace_back(std::move(list));
    } else {
      stack->push_back(std::move(value));
    }
  }
}

// -- the one kernel -----------------------------------------------------------------------------

void resize_outs(const Call& call, const Result& result) {
  for (size_t i = 0; i < result.outs.size(); i++) {
    if (!result.outs[i].has_value()) continue;
    const at::Tensor& target = call.values[i].toTensor();
    const Shape& wanted = *result.outs[i];
    if (target.sizes() == wanted.size) continue;
    at::native::resize_output_check(target, wanted.size);
    resize_tensor(target, wanted.size, wanted.stride);
  }
}

void enqueue(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const OperatorInfo& info = OperatorInfo::of(handle);
  const Call call(info, stack);
  const StreamPtr stream = current_stream(call.device);
  if (C10_UNLIKELY(!stream->port->reaches_memory)) {
    if (info.handle.operator_name().name == "aten::clone") { // a copy like others
      const c10::IValue& format = call.values[1];
      std::optional<c10::MemoryFormat> wanted;
      if (!format.isNone()) wanted = format.toMemoryFormat();
      stack->emplace_back(cloned(call.values[0].toTensor(), wanted));
      return;
    }
    check_host_operators(stream, info.name);
    run_now(call, stream, stack);
    return;
  }
  if (call.waits()) {
    run_now(call, stream, stack);
    return;
  }
  const std::shared_ptr<const Result> result = infer(call);
  if (!result) {
    count_on_host(info.name);
    run_now(call, stream, stack);
    return;
  }
  resize_outs(call, *result);
  auto command = c10::make_intrusive<Operator>(call);
  for (size_t i = 0; i < info.returns; i++) {
    if (info.alias[i] >= 0) {
      stack->push_back(call.values[static_cast<size_t>(info.alias[i])]);
      continue;
    }
    const Result::Return& made = result->returns[i];
    if (!made.list) {
      stack->emplace_back(command->add_result(stream, made.shapes[0]));
      continue;
    }
    c10::List<at::Tensor> list;
    for (const Shape& shape : made.shapes) list.push_back(command->add_result(stream, shape));
    stack->emplace_back(std::move(list));
  }
  command->promised = result->returns;
  stream->submit(command);
}

// Composites that choose by the device, or that know a few: taken whole, as the CPU has no kernel of
// its own for them.
bool is_taken_whole(const c10::OperatorName& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::convolution", "aten::convolution_backward", "aten::conj_physical_", "aten::mode",
      "aten::mode.values"};
  return names->count(c10::toString(name));
}

[[maybe_unused]] torch::Library& library() {
  static auto* made = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  return *made;
}

} // namespace

std::vector<std::pair<std::string, int64_t>> host_operators() {
  std::lock_guard lock(ran_on_host_mutex());
  return {ran_on_host().begin(), ran_on_host().end()};
}

// Registers the kernel for each operator of torch that the CPU has one for, and as the fallback for
// all others, those of other libraries among them.
void register_operators() {
  static bool done = false;
  if (std::exchange(done, true)) return;
  static auto* all = new torch::Library(
      torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  all->fallback(torch::CppFunction::makeFromBoxedFunction<&enqueue>());
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto found = dispatcher.findSchema(name);
    if (!found || found->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const bool wanted = found->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        is_taken_whole(name);
    if (!wanted) continue;
    const std::string text = c10::toString(name);
    library().impl(text.c_str(), torch::CppFunction::makeFromBoxedFunction<&enqueue>());
  }
}

} // namespace neuron
