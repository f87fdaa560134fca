// Attention takes the path that it takes on the CPU, so that it is the CPU's to the last bit.
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>

namespace at::native {

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &_fused_sdp_choice_cpp)

} // namespace at::native
