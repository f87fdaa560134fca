// Executables as commands. See execute.cpp.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/TensorBody.h>

#include "stream.h"
#include "window.h"

namespace neuron {

// What an executable takes or gives: contiguous, from the first element of a buffer or further on.
struct Form {
  c10::ScalarType dtype = c10::kFloat;
  std::vector<int64_t> size, stride;
  size_t nbytes = 0;
};

// An executable loaded on a device.
struct Loaded {
  Loaded() = default;
  ~Loaded() { forget(handle); }
  Loaded(const Loaded&) = delete;

  const char* name;
  std::vector<Form> inputs, outputs;
  std::vector<size_t> mutated; // the positions of the inputs that it updates in place
  const void* program = nullptr; // of the chain runner, or null:
  bool draws = false; // whether its `run` takes a generator as well
  PyObject* handle = nullptr; // what a runtime made of it; its `run` where there is no program
};

struct Execute final : Command {
  struct Input {
    BufferPtr buffer;
    size_t offset; // in bytes
  };

  explicit Execute(std::shared_ptr<const Loaded> loaded, Unit unit = Unit::Compute);
  void run() override;

  const std::shared_ptr<const Loaded> loaded;
  std::vector<Input> inputs;
  at::Generator numbers; // where it draws
};

// Submits a call to the current stream and returns its results at once. Null where an argument is
// not as expected, which is for the caller to say.
std::optional<std::vector<at::Tensor>> execute(
    const std::shared_ptr<const Loaded>&, const std::vector<at::Tensor>& tensors);

// Runs what has no program: calls `handle.run` with the GIL, and with a generator if there is one.
std::vector<at::Tensor> run_in_python(
    PyObject* handle, const std::vector<at::Tensor>& inputs, const at::Generator& numbers);

} // namespace neuron
