// What the process group, a library of its own (../c10d/group.cpp), asks of the extension. The two
// share no symbols: the group is given a table of functions.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <c10/core/Stream.h>

namespace neuron {

// One half of a collective. The first hands it to the transport and occupies a queue of the
// COLLECTIVES unit for that long; the second waits for the other processes, beside all units: were
// it to occupy a queue, three waits would keep back the very commands that their peers wait for.
enum class Half : int { Start, Arrival };

// A stream that lives as long as somebody keeps its owner.
struct OwnStream {
  c10::Stream stream;
  std::shared_ptr<void> owner;
};

struct CollectiveDoor {
  // Identifies the runtime: streams of one mean nothing to another.
  const void* (*runtime)();
  OwnStream (*open)(int device);
  // The host's tensor over the memory of a device tensor, for whoever runs the command.
  at::Tensor (*on_host)(const at::Tensor&);
  // Submits `work` behind what the stream waits for and behind the writers of `reads`. Where it
  // throws, `writes` are poisoned; it does not run where one of `reads` is.
  void (*submit)(
      const c10::Stream&, Half, const char* name, const std::vector<at::Tensor>& reads,
      const std::vector<at::Tensor>& writes, std::function<void()> work);
};

extern const CollectiveDoor collective_door;

} // namespace neuron
