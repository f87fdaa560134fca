// How a command runs, fails, and settles the buffers that it was to write.
#include "core.h"

#include <cmath>
#include <unordered_set>

#include <c10/core/InferenceMode.h>

namespace neuron {

thread_local bool on_worker = false;

Marker::Marker(bool timed, const char* name)
    : Command(Kind::Marker, Unit::Compute, name), moment(std::nan("")) {
  if (timed) stamp = &moment;
}

const char* intern(const std::string& text) {
  static auto* mutex = new std::mutex;
  static auto* texts = new std::unordered_set<std::string>;
  std::lock_guard lock(*mutex);
  return texts->insert(text).first->c_str();
}

FailurePtr Command::blame() const {
  for (const BufferPtr& buffer : reads) {
    if (FailurePtr failure = buffer->failure()) return failure;
  }
  return {};
}

void Command::settle(const FailurePtr& failure) {
  if (settled_.exchange(true)) return; // its runtime was closed while it ran
  for (const BufferPtr& buffer : outputs) buffer->set_failure(failure);
  for (const BufferPtr& buffer : mutated) {
    if (!failure && overwrites) buffer->set_failure({});
    if (failure && poisons_mutated && (overwrites || !buffer->poisoned()))
      buffer->set_failure(failure);
  }
}

FailurePtr Command::attempt(Ticket ticket) {
  FailurePtr failure = blame();
  if (!failure) {
    try {
      c10::InferenceMode guard;
      run();
    } catch (...) {
      failure = c10::make_intrusive<Failure>(std::current_exception(), ticket, name);
    }
  }
  settle(failure);
  return failure;
}

} // namespace neuron
