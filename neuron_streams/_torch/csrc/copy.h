// Copies as commands. See copy.cpp.
#pragma once

#include "stream.h"
#include "window.h"

namespace neuron {

struct Copy final : Command {
  // A window on a device, or memory of the host, which is kept alive.
  struct End {
    Window window;
    at::Tensor host;
    BufferPtr pinned;

    static End on_host(const at::Tensor&);
    static End on_device(const at::Tensor&);
    static End bytes_of(BufferPtr, size_t nbytes); // the first of a buffer
    at::Tensor tensor() const;
  };

  Copy(End source, End target, const char* name);
  void run() override;

  End source, target;

 private:
  BufferPtr kept;
  bool plain = false;
};

// A tensor with memory of its own and the same contents, by a copy and no operator.
at::Tensor cloned(const at::Tensor&, std::optional<c10::MemoryFormat>);

// Waits for a command, and throws what made it fail.
void finish(const StreamPtr&, Ticket);

} // namespace neuron
