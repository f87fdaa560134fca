// Any operator as a command. See operator.cpp and shape.cpp.
#pragma once

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "window.h"

namespace neuron {

// What is known of an operator from its schema, looked up once.
struct OperatorInfo {
  explicit OperatorInfo(const c10::OperatorHandle&);
  static const OperatorInfo& of(const c10::OperatorHandle&);

  const c10::OperatorHandle handle;
  const char* name; // "aten::add.Tensor"
  size_t arguments, returns;
  std::vector<bool> written; // of each argument: whether the operator writes it in place
  std::vector<bool> resized; // ... and gives it the size of its result: `out=`
  std::vector<int> alias; // of each return: the argument that it is, or -1 where it is fresh
  int generator = -1, device = -1; // the argument of that type
  bool writes_any = false;
  bool overwrites = false; // whether what it writes, it writes whole
  bool random = false;
  bool takes_host_indices = false;
  bool waits = false; // its result depends on data, or is no tensor
  int output_size = -1; // the argument by which the caller may say what depends on data
  std::optional<c10::OperatorHandle> out; // writes into given tensors what this one returns
};

// One call of an operator: its arguments, and what follows from them.
struct Call {
  Call(const OperatorInfo&, torch::jit::Stack* stack); // takes the arguments off the stack

  template <class F> // f(tensor, argument, place in its list or -1)
  void for_each_tensor(const F& f) const;

  const OperatorInfo& info;
  std::vector<c10::IValue> values;
  bool waits() const; // whether the shape of the result depends on data

  const bool grad; // whether gradients are wanted: some of the CPU's kernels ask
  int device = -1;
  bool seen_host = false; // a tensor of the host with dimensions that the operator may take
};

// The metadata of one fresh result, or of what an `out=` argument is to become.
struct Shape {
  bool defined = true;
  bool conj = false, neg = false;
  c10::ScalarType dtype = c10::kFloat;
  std::vector<int64_t> size, stride;
};

// What a call gives: for each return that is no argument, its tensors (a list has any number).
struct Result {
  struct Return {
    bool list = false;
    std::vector<Shape> shapes;
  };
  std::vector<Return> returns; // empty where the return is an argument
  std::vector<std::optional<Shape>> outs; // of each argument that is resized
};

// The metadata of a call's results, before anything is computed; null where only running it tells.
// Throws what torch says of bad arguments.
std::shared_ptr<const Result> infer(const Call&);

// A call's arguments with each tensor of the device replaced.
template <class F> // f(tensor, argument) -> tensor
torch::jit::Stack with_tensors(const Call& call, const F& f);

// How many calls ran on the host because the device lacks the operator, by name.
std::vector<std::pair<std::string, int64_t>> host_operators();

template <class F>
void Call::for_each_tensor(const F& f) const {
  for (size_t i = 0; i < values.size(); i++) {
    const c10::IValue& value = values[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) f(value.toTensor(), i, -1);
    } else if (value.isTensorList()) {
      int place = 0;
      for (const at::Tensor& tensor : value.toTensorVector()) f(tensor, i, place++);
    } else if (value.isOptionalTensorList()) {
      int place = 0;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        if (tensor.has_value() && tensor->defined()) f(*tensor, i, place);
        place++;
      }
    }
  }
}

template <class F>
torch::jit::Stack with_tensors(const Call& call, const F& f) {
  torch::jit::Stack stack;
  stack.reserve(call.values.size());
  for (size_t i = 0; i < call.values.size(); i++) {
    const c10::IValue& value = call.values[i];
    if (value.isTensor() && value.toTensor().defined()) {
      stack.emplace_back(f(value.toTensor(), i));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(f(tensor, i));
      stack.emplace_back(std::move(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(
            tensor.has_value() && tensor->defined() ? std::optional(f(*tensor, i)) : tensor);
      stack.emplace_back(std::move(list));
    } else {
      stack.push_back(value);
    }
  }
  return stack;
}

} // namespace neuron
