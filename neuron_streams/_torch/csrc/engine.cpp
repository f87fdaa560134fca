// Autograd's threads. Torch counts the devices at the first backward of a process, which may come
// before the extension is there. Any later one counts ours, and starts the runtime where none has
// been: inside of that there is nothing to start, or each device would have two threads.
#include "stream.h"

#include <torch/csrc/autograd/engine.h>

namespace neuron {

namespace {

struct Engine : torch::autograd::Engine { // opens what is protected
  using torch::autograd::Engine::device_ready_queues_;
  using torch::autograd::Engine::start_device_threads;
  using torch::autograd::Engine::thread_pool_shared_;
};

std::atomic<bool> counted_without_us{false};

} // namespace

void look_at_autograd() {
  torch::autograd::Engine& engine = torch::autograd::Engine::get_default_engine();
  counted_without_us = bool(engine.*(&Engine::thread_pool_shared_)) &&
      (engine.*(&Engine::device_ready_queues_)).empty();
}

void start_autograd_threads() {
  if (!counted_without_us.exchange(false)) return;
  torch::autograd::Engine& engine = torch::autograd::Engine::get_default_engine();
  WithoutGil free; // each thread takes it once as it starts
  (engine.*(&Engine::start_device_threads))();
}

} // namespace neuron
