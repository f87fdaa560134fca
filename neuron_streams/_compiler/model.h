// A stand-in for AOTInductor's model base, for code that AOTInductor generates.
//
// Our programs pass weights as inputs, so nothing of its machinery for constants is used, yet it
// makes nine tenths of the compile time of a library (7 s of 8). The names are AOTInductor's own:
// what it generates compiles against this file unchanged, and the C functions at the end are the
// part of its interface that the chain runner calls.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/csrc/inductor/aoti_runtime/arrayref_tensor.h>
#include <torch/csrc/inductor/aoti_runtime/constant_type.h>
#include <torch/csrc/inductor/aoti_runtime/device_utils.h>
#include <torch/csrc/inductor/aoti_runtime/scalar_to_tensor.h>
#include <torch/csrc/inductor/aoti_runtime/thread_local.h>
#include <torch/csrc/inductor/aoti_runtime/utils.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <c10/util/generic_math.h>

namespace torch::aot_inductor {

using ConstantMap = std::unordered_map<std::string, AtenTensorHandle>;

struct AOTInductorModelKernelsBase {
  virtual ~AOTInductorModelKernelsBase() = default;
};

class AOTInductorModelBase {
 public:
  AOTInductorModelBase(
      size_t inputs,
      size_t outputs,
      size_t,
      const std::string&,
      std::optional<std::string>,
      bool)
      : inputs_info_(inputs), outputs_info_(outputs) {}

 protected:
  struct Info {
    const char* name;
  };

  void update_constants_map(std::shared_ptr<ConstantMap>) {}
  void update_constants_array(std::shared_ptr<std::vector<ConstantHandle>>) {}

  std::vector<Info> inputs_info_;
  std::vector<Info> outputs_info_;
  std::string in_spec_;
  std::string out_spec_;
  int32_t device_idx_ = -1;
};

class AOTInductorModel : public AOTInductorModelBase {
 public:
  AOTInductorModel(
      std::shared_ptr<ConstantMap>,
      std::shared_ptr<std::vector<ConstantHandle>>,
      const std::string&,
      std::optional<std::string>);
  ConstantMap const_run_impl(DeviceStreamType, AOTIProxyExecutorHandle, bool = false);
  void _const_run_impl(
      std::vector<AtenTensorHandle>&,
      DeviceStreamType,
      AOTIProxyExecutorHandle);
  void run_impl(AtenTensorHandle*, AtenTensorHandle*, DeviceStreamType, AOTIProxyExecutorHandle);

 private:
  std::unique_ptr<AOTInductorModelKernelsBase> kernels_;
};

} // namespace torch::aot_inductor

static thread_local std::string last_error;

template <typename Body>
static int32_t guarded(Body&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "unknown exception";
  }
  return 1;
}

struct NoGrad {
  bool before = aoti_torch_grad_mode_is_enabled();
  NoGrad() {
    aoti_torch_grad_mode_set_enabled(false);
  }
  ~NoGrad() {
    aoti_torch_grad_mode_set_enabled(before);
  }
};

extern "C" {

using torch::aot_inductor::AOTInductorModel;

int32_t AOTInductorModelContainerCreateWithDevice(
    AOTInductorModel** model,
    size_t,
    const char* device,
    const char*) {
  return guarded([&] { *model = new AOTInductorModel(nullptr, nullptr, device, std::nullopt); });
}

int32_t AOTInductorModelContainerDelete(AOTInductorModel* model) {
  return guarded([&] { delete model; });
}

int32_t AOTInductorModelContainerRun(
    AOTInductorModel* model,
    AtenTensorHandle* inputs,
    size_t,
    AtenTensorHandle* outputs,
    size_t,
    torch::aot_inductor::DeviceStreamType stream,
    AOTIProxyExecutorHandle proxy) {
  return guarded([&] {
    NoGrad no_grad;
    model->run_impl(inputs, outputs, stream, proxy);
  });
}

int32_t AOTInductorGetLastError(const char** words) {
  *words = last_error.c_str();
  return 0;
}
}
