// Copies as commands. See copy.cpp.
#pragma once

#include "stream.h"
#include "window.h"

namespace neuron {

// The first bytes of a buffer into another.
struct CopyBytes final : Command {
  CopyBytes(BufferPtr source, BufferPtr target, size_t nbytes, const char* name);
  void run() override;
  const size_t nbytes;
};

struct Copy final : Command {
  // A window on a device, or memory of the host, which is kept alive.
  struct End {
    Window window;
    at::Tensor host;
    BufferPtr pinned;

    static End on_host(const at::Tensor&);
    static End on_device(const at::Tensor&);
    at::Tensor tensor() const;
  };

  Copy(End source, End target, const char* name);
  void run() override;

  End source, target;

 private:
  BufferPtr kept;
  bool plain = false;
};

} // namespace neuron
