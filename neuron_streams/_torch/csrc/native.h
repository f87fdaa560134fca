// The port over the native worker. See native.cpp.
#pragma once

#include <deque>
#include <optional>
#include <shared_mutex>
#include <unordered_map>

#include "core.h"
#include "../../_runtime/worker/worker.h"

namespace neuron {

// What Python raises as TimeoutError and as CancelledError.
struct TimedOut : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Cancelled : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Interval {
  int device, unit;
  double began, ended; // seconds on the scale of time.perf_counter()
  const char* name;
};

class NativePort final : public Port {
 public:
  explicit NativePort(int devices);
  ~NativePort() override;

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

  // Completes the pledges of a host lane up to a ticket, or fails them with an error.
  void complete(Ticket, std::exception_ptr error);
  std::vector<Interval> intervals();
  // Seconds at which a timed marker completed, as long as an event keeps it.
  std::optional<double> completed_at(Ticket);
  // Runs what can run until the timeout, cancels the rest and wakes every waiter.
  void close(double timeout);

  std::atomic<int64_t> in_flight{0}; // what still ran when it was closed

 private:
  struct Lane;
  using LanePtr = std::shared_ptr<Lane>;

  LanePtr find(int64_t id);
  void forget_closed();
  void note_timed(int64_t lane, int64_t value, const CommandPtr&);
  void refuse_wait_on_worker() const;
  void wait_alone(const LanePtr&, Ticket);
  [[noreturn]] void throw_closed() const;
  std::string timed_out(Ticket, int64_t completed, double timeout);
  std::string head(int64_t lane);
  void cancel();

  ns_runtime* runtime_;
  std::shared_mutex mutex_;
  std::unordered_map<int64_t, LanePtr> lanes_;
  std::deque<int64_t> closing_;
  bool closed_ = false;
};

} // namespace neuron
