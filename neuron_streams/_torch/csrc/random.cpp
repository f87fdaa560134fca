// One generator a device: a seed, and an offset that counts the commands that have drawn from it.
//
// A command takes a generator of the host along, seeded by both at its submission. So the numbers
// depend on the order of submission, and not on how the streams interleave.
#include "random.h"
#include "stream.h"

#include <cstring>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

namespace neuron {

namespace {

constexpr size_t kStateSize = 2 * sizeof(uint64_t); // seed and offset, as in torch.cuda

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(int device)
      : c10::GeneratorImpl(
            {kDevice, static_cast<c10::DeviceIndex>(device)},
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(
        state.numel() == kStateSize, "RNG state is wrong size: ", state.numel(), " bytes, not ",
        kStateSize);
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, sizeof seed_);
    std::memcpy(&offset_, bytes + sizeof seed_, sizeof offset_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({kStateSize}, at::TensorOptions(at::kByte).device(at::kCPU));
    auto* bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, sizeof seed_);
    std::memcpy(bytes + sizeof seed_, &offset_, sizeof offset_);
    return state.getIntrusivePtr();
  }

  static c10::DeviceType device_type() { return kDevice; }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* made = new DeviceGenerator(device_.index());
    made->seed_ = seed_;
    made->offset_ = offset_;
    return made;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

// A bijection of 64-bit words that leaves no pattern of the seed and offset (splitmix64).
uint64_t mixed(uint64_t word) {
  word += 0x9E3779B97F4A7C15ULL;
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ULL;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBULL;
  return word ^ (word >> 31);
}

} // namespace

at::Generator new_generator(int device) { return at::make_generator<DeviceGenerator>(device); }

const at::Generator& default_generator(int device) {
  constexpr int kMost = 64;
  TORCH_CHECK(device >= 0 && device < kMost, "neuron:", device, " has no generator");
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>;
    for (int i = 0; i < kMost; i++) {
      all->push_back(new_generator(i));
      all->back().seed();
    }
    return all;
  }();
  return (*made)[static_cast<size_t>(device)];
}

at::Generator next_numbers(at::Generator& generator) {
  std::lock_guard lock(generator.mutex());
  auto* drawn = at::check_generator<DeviceGenerator>(generator);
  const uint64_t offset = drawn->get_offset();
  drawn->set_offset(offset + 1);
  return at::detail::createCPUGenerator(mixed(mixed(drawn->current_seed()) ^ offset));
}

namespace {

// An operator that takes no generator, and so would draw from the host's where it runs: made of
// those that take one, as the CPU's kernel is.
std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  const auto flags = input.options().dtype(at::kBool);
  if (input.numel() == 0) return {input, at::empty_like(input, flags)};
  if (train.has_value() && !*train) return {input.clone(), at::ones_like(input, flags)};
  at::Tensor kept = at::empty_like(input, flags).bernoulli_(1 - p);
  return {input.mul(kept).mul_(p == 1 ? 0 : 1 / (1 - p)), kept};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", TORCH_FN(native_dropout));
}

} // namespace

} // namespace neuron
