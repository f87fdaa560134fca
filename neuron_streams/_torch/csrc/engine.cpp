// Autograd's threads. Torch counts the devices at the first backward of a process, which may come
// before the first use of this one.
#include "stream.h"

#include <torch/csrc/autograd/engine.h>

namespace neuron {

namespace {

struct Engine : torch::autograd::Engine { // opens what is protected
  using torch::autograd::Engine::device_ready_queues_;
  using torch::autograd::Engine::start_device_threads;
  using torch::autograd::Engine::thread_pool_shared_;
};

} // namespace

void start_autograd_threads() {
  torch::autograd::Engine& engine = torch::autograd::Engine::get_default_engine();
  const bool started = bool(engine.*(&Engine::thread_pool_shared_));
  if (!started || !(engine.*(&Engine::device_ready_queues_)).empty()) return;
  WithoutGil free; // each thread takes it once as it starts
  (engine.*(&Engine::start_device_threads))();
}

} // namespace neuron
