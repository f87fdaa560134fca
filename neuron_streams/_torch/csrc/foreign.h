// The port over a runtime written in Python. See foreign.cpp.
#pragma once

#include "core.h"

namespace neuron {

class ForeignPort final : public Port {
 public:
  explicit ForeignPort(PyObject* runtime);
  ~ForeignPort() override;

  int64_t open_lane(int device, int64_t priority, bool host) override;
  void close_lane(int64_t lane) override;
  int64_t submit(int64_t, const CommandPtr&, const std::vector<Ticket>&) override;
  void wait_for_room(int64_t lane) override;
  int64_t submitted(int64_t lane) override;
  int64_t completed(int64_t lane) override;
  void wait(Ticket, double timeout) override;
  void drain() override;
  std::vector<int64_t> lanes(int device) override;
  std::vector<FailurePtr> failures(Ticket, int64_t since) override;
  void add_failure(Ticket, FailurePtr) override;
  void* allocate(Buffer&, size_t nbytes) override;
  void release(Buffer&, void* data) override;
  std::optional<Reserved> reserved(int device) override;
  void reset_reserved(int device, bool peak, bool accumulated) override;
  void empty_cache() override;
  std::optional<std::pair<int64_t, int64_t>> memory_info(int device) override;

 private:
  const bool has_memory_; // of its own; any other's is memory of the host
  PyObject* runtime_;
};

} // namespace neuron
