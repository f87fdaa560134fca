// Autocast: which operators run in the lower precision, which in float32, which in the widest type
// of their arguments. The lists are torch's own for CUDA; a test compares them with its header,
// <ATen/autocast_mode.h>, which takes seconds to compile and so is not included.
#include "window.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, DeviceType device_type);
} // namespace at::autocast

namespace neuron {

namespace {

enum class CastPolicy { lower_precision, float32, float32_dtype, promote };

// In the dtype of the autocast.
constexpr const char* kLowerPrecision[] = {
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
    "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot",
    "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention"};

// In float32.
// `norm` without a dtype is here, where torch appends one, since it returns that of its argument.
constexpr const char* kFloat32[] = {
    "norm.Scalar", "norm.ScalarOpt_dim",
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p",
    "reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
    "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm",
    "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"};

// With dtype=float32 where the caller names none.
constexpr const char* kFloat32Dtype[] = {
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum",
    "sum.dim_IntList"};

// In the widest dtype of the arguments.
constexpr const char* kPromote[] = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
    "index_put", "tensordot", "scatter_add"};

bool eligible(const at::Tensor& tensor) {
  return is_ours(tensor) && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble;
}

// Applies f to each tensor among the arguments of a call.
template <class F>
void replace_tensors(torch::jit::Stack& stack, size_t count, const F& f) {
  for (size_t i = stack.size() - count; i < stack.size(); i++) {
    c10::IValue& value = stack[i];
    if (value.isTensor() && value.toTensor().defined()) {
      value = f(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(f(tensor));
      value = std::move(list);
    }
  }
}

at::ScalarType widest(const torch::jit::Stack& stack, size_t count) {
  at::ScalarType found = at::autocast::get_autocast_dtype(kDevice);
  auto look = [&](const at::Tensor& tensor) {
    if (eligible(tensor) && tensor.scalar_type() == at::kFloat) found = at::kFloat;
  };
  for (size_t i = stack.size() - count; i < stack.size(); i++) {
    if (stack[i].isTensor()) look(stack[i].toTensor());
    else if (stack[i].isTensorList())
      for (const at::Tensor& tensor : stack[i].toTensorVector()) look(tensor);
  }
  return found;
}

// An operator that takes a dtype computes in it: float32 where the caller named none.
bool set_dtype(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i].name() != "dtype") continue;
    c10::IValue& value = stack[stack.size() - arguments.size() + i];
    const c10::IValue& first = stack[stack.size() - arguments.size()];
    if (value.isNone() && first.isTensor() && eligible(first.toTensor()))
      value = static_cast<int64_t>(at::kFloat);
    return true;
  }
  return false;
}

template <CastPolicy policy>
void cast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastPrivateUse1);
  at::ScalarType target = at::kFloat;
  bool apply = true;
  if constexpr (policy == CastPolicy::lower_precision)
    target = at::autocast::get_autocast_dtype(kDevice);
  else if constexpr (policy == CastPolicy::promote)
    target = widest(*stack, count);
  else if constexpr (policy == CastPolicy::float32_dtype)
    apply = !set_dtype(op, *stack);
  if (apply)
    replace_tensors(*stack, count, [&](const at::Tensor& tensor) {
      return eligible(tensor) ? at::autocast::cached_cast(target, tensor, kDevice) : tensor;
    });
  op.callBoxed(stack);
}

void refuse(const c10::OperatorHandle&, torch::jit::Stack*) {
  TORCH_CHECK(
      false, "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
      "autocast.\nMany models use a sigmoid layer right before the binary cross entropy layer.\n"
      "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_"
      "logits\nor torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and "
      "BCEWithLogits are\nsafe to autocast.");
}

template <CastPolicy policy, size_t count>
void impl(torch::Library& m, const char* const (&names)[count]) {
  for (const char* name : names)
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<policy>>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  impl<CastPolicy::lower_precision>(m, kLowerPrecision);
  impl<CastPolicy::float32>(m, kFloat32);
  impl<CastPolicy::float32_dtype>(m, kFloat32Dtype);
  impl<CastPolicy::promote>(m, kPromote);
  m.impl("binary_cross_entropy", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

} // namespace

} // namespace neuron
