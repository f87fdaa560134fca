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

bool engine_has_started() {
  return bool(torch::autograd::Engine::get_default_engine().*(&Engine::thread_pool_shared_));
}

// Whether the engine counted devices without those of this one: before the extension was loaded, or
// when the runtime did not start. Else it asks the guard when it starts, which starts the runtime.
std::atomic<bool> uncounted{engine_has_started()};

} // namespace

void note_uncounted() { uncounted = true; }

void start_autograd_threads() {
  if (!uncounted.exchange(false) || !engine_has_started()) return;
  torch::autograd::Engine& engine = torch::autograd::Engine::get_default_engine();
  if (!(engine.*(&Engine::device_ready_queues_)).empty()) return;
  WithoutGil free; // each thread takes it once as it starts
  (engine.*(&Engine::start_device_threads))();
}

} // namespace neuron
