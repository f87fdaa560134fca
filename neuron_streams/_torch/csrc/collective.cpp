// Commands in which other processes take part. See collective.h.
#include "collective.h"

#include "stream.h"
#include "window.h"

namespace neuron {

namespace {

struct Collective final : Command {
  Collective(Half half, const char* name, std::function<void()> work)
      : Command(
            Kind::Collective, half == Half::Start ? Unit::Collectives : Unit::Peers, name),
        work(std::move(work)) {
    poisons_mutated = true;
  }

  void run() override {
    const auto once = std::exchange(work, {}); // what it holds is let go of with the command done
    once();
  }

  std::function<void()> work;
};

struct Door { // a scope for the names
  static const void* runtime() { return port().get(); }

  static OwnStream open(int device) {
    const StreamPtr made = port()->streams->open(device, kLeastPriority);
    made->handles++;
    return {made->as_torch(), std::shared_ptr<void>(made.get(), [made](void*) { close(made); })};
  }

  static void close(const StreamPtr& stream) noexcept {
    try {
      check_fork();
      if (--stream->handles == 0) stream->port->streams->retire(stream);
    } catch (...) { // the child of a fork has no stream to close
    }
  }

  static at::Tensor on_host(const at::Tensor& tensor) {
    TORCH_CHECK(is_ours(tensor), "a neuron tensor is expected, but got one of ", tensor.device());
    return Window(tensor).on_host();
  }

  static void submit(
      const c10::Stream& stream, Half half, const char* name, const std::vector<at::Tensor>& reads,
      const std::vector<at::Tensor>& writes, std::function<void()> work) {
    auto command = c10::make_intrusive<Collective>(half, intern(name), std::move(work));
    for (const at::Tensor& tensor : reads) command->reads.push_back(Window(tensor).buffer);
    command->overwrites = true;
    for (const at::Tensor& tensor : writes) {
      Window window(tensor);
      command->overwrites = command->overwrites && window.whole();
      command->mutated.push_back(std::move(window.buffer));
    }
    state_of(stream)->submit(command);
  }
};

} // namespace

const CollectiveDoor collective_door = {
    &Door::runtime, &Door::open, &Door::on_host, &Door::submit};

} // namespace neuron
