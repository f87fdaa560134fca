// The metadata of an operator's results, before they are computed.
//
// A call is looked up by its operator and the metadata of its arguments. What is not known yet is
// asked of torch's meta kernels. Those differ from the CPU's here and there, and do not know which
// dtypes a CPU kernel lacks, so the first call of an operator with given dtypes is also tried on
// small stand-ins on the host: what is wrong is then raised at the call, in torch's own words, and
// where the two disagree the CPU is right from then on.
#include "operator.h"

#include <algorithm>
#include <cstring>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

namespace neuron {

namespace {

// -- the key of a call --------------------------------------------------------------------------

template <class T>
void put(std::string& key, T word) {
  key.append(reinterpret_cast<const char*>(&word), sizeof word);
}

void put_tensor(std::string& key, const at::Tensor& tensor, bool sizes) {
  put(key, static_cast<int8_t>(tensor.scalar_type()));
  put(key, static_cast<int8_t>(tensor.device().type()));
  put(key, static_cast<int8_t>(tensor.dim()));
  const int wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  put(key, static_cast<int8_t>(wrapped | tensor.is_conj() << 1 | tensor.is_neg() << 2));
  if (!sizes) return;
  for (const int64_t extent : tensor.sizes()) put(key, extent);
  for (const int64_t step : tensor.strides()) put(key, step);
}

bool put_value(std::string& key, const c10::IValue& value, bool sizes) {
  if (value.isNone()) {
    put(key, 'n');
  } else if (value.isInt()) {
    put(key, 'i');
    if (sizes) put(key, value.toInt());
  } else if (value.isDouble()) {
    put(key, 'd');
    if (sizes) put(key, value.toDouble());
  } else if (value.isBool()) {
    put(key, value.toBool() ? 't' : 'f');
  } else if (value.isComplexDouble()) {
    put(key, 'c');
    if (sizes) put(key, value.toComplexDouble());
  } else if (value.isString()) {
    put(key, 's');
    key += value.toStringRef();
    put(key, '\0');
  } else if (value.isDevice()) {
    put(key, 'D');
    put(key, static_cast<int8_t>(value.toDevice().type()));
  } else if (value.isIntList()) {
    put(key, 'I');
    put(key, value.toIntVector().size());
    if (sizes)
      for (const int64_t x : value.toIntVector()) put(key, x);
  } else if (value.isDoubleList()) {
    put(key, 'F');
    for (const double x : value.toDoubleVector()) put(key, x);
    put(key, 'F');
  } else if (value.isBoolList()) {
    put(key, 'B');
    for (const bool x : value.toBoolList()) put(key, x ? 't' : 'f');
  } else if (value.isGenerator()) {
    put(key, 'G');
  } else if (value.isList()) {
    put(key, 'L');
    put(key, value.toListRef().size());
    for (const c10::IValue& item : value.toListRef())
      if (!put_value(key, item, sizes)) return false;
  } else {
    return false; // nothing that could be compared
  }
  return true;
}

// Which tensors share memory, where any is written, and which share it with themselves: torch
// refuses some of that.
void put_sharing(std::string& key, const Call& call) {
  std::vector<const c10::StorageImpl*> seen;
  call.for_each_tensor([&](const at::Tensor& tensor, size_t argument, int) {
    if (call.info.written[argument]) put(key, at::has_internal_overlap(tensor));
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    const auto found = std::find(seen.begin(), seen.end(), storage);
    put(key, static_cast<int32_t>(found - seen.begin()));
    if (found == seen.end()) seen.push_back(storage);
    else put(key, tensor.storage_offset());
  });
}

// False where a call has no key. Without sizes it is the key of all calls with these dtypes.
bool write_key(std::string& key, const Call& call, bool sizes) {
  key.clear();
  put(key, static_cast<const void*>(&call.info));
  put(key, call.grad);
  for (const c10::IValue& value : call.values) {
    if (value.isTensor()) {
      put(key, 'T');
      if (value.toTensor().defined()) put_tensor(key, value.toTensor(), sizes);
    } else if (value.isTensorList()) {
      put(key, 'l');
      for (const at::Tensor& tensor : value.toTensorVector()) put_tensor(key, tensor, sizes);
      put(key, 'e');
    } else if (value.isOptionalTensorList()) {
      put(key, 'o');
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        put(key, tensor.has_value() && tensor->defined() ? 'T' : 'n');
        if (tensor.has_value() && tensor->defined()) put_tensor(key, *tensor, sizes);
      }
      put(key, 'e');
    } else if (!put_value(key, value, sizes)) {
      return false;
    }
  }
  if (call.info.writes_any) put_sharing(key, call);
  return true;
}

// -- running a call on other tensors ------------------------------------------------------------

// Operators that refuse zeros, as pivots or as probabilities.
bool wants_ones(const Call& call) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::linalg_lu_solve", "aten::lu_unpack", "aten::linalg_ldl_solve", "aten::multinomial"};
  return names->count(call.info.handle.operator_name().name);
}

// Tensors without memory, or of zeros or ones on the host, with the metadata of those of a call and
// the same storages in common.
class StandIns {
 public:
  StandIns(c10::DeviceType type, bool ones) : type_(type), ones_(ones && type == c10::kCPU) {}

  at::Tensor operator()(const at::Tensor& tensor) {
    if (!is_ours(tensor)) {
      // A number or the indices of the host are what they are; meta kernels take both.
      return type_ == c10::kMeta && tensor.dim() > 0 ? make(tensor) : tensor;
    }
    auto found = made_.find(tensor.unsafeGetTensorImpl());
    if (found != made_.end()) return found->second;
    return made_[tensor.unsafeGetTensorImpl()] = make(tensor);
  }

 private:
  at::Tensor make(const at::Tensor& tensor) {
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    c10::Storage& common = storages_[storage];
    if (!common) {
      const size_t nbytes = storage->nbytes();
      c10::Allocator* allocator = c10::GetAllocator(type_);
      common = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), nbytes, allocator->allocate(nbytes), allocator,
          /*resizable=*/true);
      if (type_ == c10::kCPU && nbytes) std::memset(common.mutable_data(), 0, nbytes);
    }
    const auto key =
        type_ == c10::kMeta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(common), c10::DispatchKeySet(key), tensor.dtype());
    c10::TensorImpl* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    if (tensor.is_conj()) made._set_conj(true);
    if (tensor.is_neg()) made._set_neg(true);
    if (ones_) made.fill_(1);
    return made;
  }

  const c10::DeviceType type_;
  const bool ones_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> made_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
};

Shape shape_of(const at::Tensor& tensor) {
  Shape shape;
  shape.defined = tensor.defined();
  if (!shape.defined) return shape;
  TORCH_CHECK_NOT_IMPLEMENTED(
      !tensor.is_nested(), "neuron: nested tensors are not supported on the device; use padding, or ",
      "the host");
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == c10::kStrided, "neuron: tensors of layout ", tensor.layout(),
      " are not supported on the device; use a strided one, or the host");
  shape.conj = tensor.is_conj();
  shape.neg = tensor.is_neg();
  shape.dtype = tensor.scalar_type();
  shape.size = tensor.sizes().vec();
  shape.stride = tensor.strides().vec();
  return shape;
}

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

Result run_on(const Call& call, c10::DeviceType type) {
  c10::InferenceMode guard;
  c10::AutoGradMode mode(call.grad);
  Quiet quiet; // what there is to warn of, the call itself warns of
  c10::WarningUtils::WarningHandlerGuard warnings(&quiet);
  StandIns stand_ins(type, wants_ones(call));
  torch::jit::Stack stack =
      with_tensors(call, [&](const at::Tensor& tensor, size_t) { return stand_ins(tensor); });
  const OperatorInfo& info = call.info;
  if (info.device >= 0) stack[static_cast<size_t>(info.device)] = c10::Device(type);
  if (info.generator >= 0) {
    auto& generator = stack[static_cast<size_t>(info.generator)];
    if (type == c10::kCPU) generator = at::detail::createCPUGenerator();
    else generator = c10::IValue();
  }
  std::vector<at::Tensor> outs(info.arguments);
  for (size_t i = 0; i < info.arguments; i++)
    if (info.resized[i] && stack[i].isTensor()) outs[i] = stack[i].toTensor();
  info.handle.callBoxed(stack);

  Result result;
  for (size_t i = 0; i < info.returns; i++) {
    Result::Return found;
    const c10::IValue& value = stack[i];
    if (info.alias[i] < 0 && value.isTensorList()) {
      found.list = true;
      for (const at::Tensor& tensor : value.toTensorVector())
        found.shapes.push_back(shape_of(tensor));
    } else if (info.alias[i] < 0) {
      found.shapes.push_back(shape_of(value.toTensor()));
    }
    result.returns.push_back(std::move(found));
  }
  result.outs.resize(info.arguments);
  for (size_t i = 0; i < info.arguments; i++)
    if (outs[i].defined()) result.outs[i] = shape_of(outs[i]);
  return result;
}

bool same(const Shape& a, const Shape& b) {
  if (a.defined != b.defined) return false;
  if (!a.defined) return true;
  if (a.dtype != b.dtype || a.size != b.size || a.conj != b.conj || a.neg != b.neg) return false;
  for (size_t i = 0; i < a.size.size(); i++) // the stride of one element, or of none, is nothing
    if (a.size[i] == 0) return true;
  for (size_t i = 0; i < a.size.size(); i++)
    if (a.size[i] != 1 && a.stride[i] != b.stride[i]) return false;
  return true;
}

bool same(const Result& a, const Result& b) {
  for (size_t i = 0; i < a.returns.size(); i++) {
    if (a.returns[i].shapes.size() != b.returns[i].shapes.size()) return false;
    for (size_t k = 0; k < a.returns[i].shapes.size(); k++)
      if (!same(a.returns[i].shapes[k], b.returns[i].shapes[k])) return false;
  }
  for (size_t i = 0; i < a.outs.size(); i++)
    if (a.outs[i].has_value() && !same(*a.outs[i], *b.outs[i])) return false;
  return true;
}

// -- what is known ------------------------------------------------------------------------------

constexpr size_t kMostKnown = 1 << 15;
// Elements of all tensors of a call that may be tried: the first with its dtypes; each new shape.
constexpr int64_t kSmallEnough = 1 << 16, kTiny = 1 << 12;

struct Known {
  std::shared_mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const Result>> results; // null: must be run
  std::unordered_set<std::string> tried; // keys without sizes
  std::unordered_set<const OperatorInfo*> without_meta; // the CPU is asked each time
};
Known& known() {
  static auto* made = new Known;
  return *made;
}

int64_t elements_of(const Call& call) {
  int64_t elements = 0;
  call.for_each_tensor([&](const at::Tensor& tensor, size_t, int) {
    if (is_ours(tensor)) Window checked(tensor); // what stands in has no more memory than it
    elements += static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
  });
  return elements;
}

// Operators that compare the values of arguments with the sizes of others: nothing to stand in for.
bool compares_values(const Call& call) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::segment_reduce", "aten::_segment_reduce_backward"};
  return names->count(call.info.handle.operator_name().name);
}

// What a CPU kernel says of dtypes that it lacks, as opposed to what it says of zeros.
bool is_about_types(const std::string& words) {
  for (const char* part : {"not implemented for", "not supported", "expected", "Expected", "must",
                           "dtype", "only supports", "does not support", "expects", "cannot",
                           "can't be cast", "unsupported operation", "should be greater"})
    if (words.find(part) != std::string::npos) return true;
  return false;
}

std::shared_ptr<const Result> ask(const Call& call) {
  Known& all = known();
  std::string types;
  const bool has_key = write_key(types, call, false);
  bool tried, trusted;
  {
    std::shared_lock lock(all.mutex);
    tried = has_key && all.tried.count(types);
    trusted = !all.without_meta.count(&call.info);
  }
  std::shared_ptr<const Result> meta;
  std::exception_ptr refusal;
  if (trusted) {
    try {
      meta = std::make_shared<Result>(run_on(call, c10::kMeta));
    } catch (const c10::NotImplementedError&) {
      trusted = false;
    } catch (...) {
      refusal = std::current_exception();
    }
  }
  const int64_t elements = elements_of(call);
  if (trusted && !refusal && elements > (tried ? kTiny : kSmallEnough)) return meta;
  // The CPU on stand-ins. It also has better words for what meta refused.
  std::shared_ptr<const Result> cpu;
  try {
    cpu = std::make_shared<Result>(run_on(call, c10::kCPU));
  } catch (const c10::Error& error) {
    const bool about_types = is_about_types(error.what_without_backtrace());
    if (refusal || (about_types && !compares_values(call))) throw;
  } catch (...) {
    if (refusal) throw;
  }
  if (refusal && !cpu) std::rethrow_exception(refusal);
  std::unique_lock lock(all.mutex);
  if (cpu && meta && has_key) all.tried.insert(std::move(types));
  if (!meta || (cpu && !same(*meta, *cpu))) all.without_meta.insert(&call.info);
  return cpu ? cpu : meta;
}

} // namespace

std::shared_ptr<const Result> infer(const Call& call) {
  thread_local std::string key;
  Known& all = known();
  const bool has_key = write_key(key, call, true);
  if (has_key) {
    std::shared_lock lock(all.mutex);
    auto found = all.results.find(key);
    if (found != all.results.end()) return found->second;
  }
  const std::string mine = key; // the kernels below may come here again
  std::shared_ptr<const Result> result = ask(call);
  if (has_key) {
    std::unique_lock lock(all.mutex);
    if (all.results.size() >= kMostKnown) all.results.clear();
    all.results[mine] = result;
  }
  return result;
}

} // namespace neuron
