// The port over the native worker: lanes and threads in C, see ../../_runtime/worker/worker.h.
#include "native.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace neuron {

namespace {

constexpr int64_t kSlice = 50'000'000; // nanoseconds: how long a wait holds off Ctrl-C

} // namespace

struct NativePort::Lane {
  int64_t counters[2] = {0, 0}; // completed, submitted: written by the worker
  int device = 0;
  bool host = false, closing = false;
  std::mutex mutex;
  std::vector<std::pair<int64_t, FailurePtr>> failures;
  std::vector<std::pair<int64_t, c10::weak_intrusive_ptr<Command>>> timed;

  int64_t completed() const { return __atomic_load_n(&counters[0], __ATOMIC_ACQUIRE); }
  int64_t submitted() const { return __atomic_load_n(&counters[1], __ATOMIC_ACQUIRE); }
};

namespace {

// A command with the port that keeps its failures.
struct Errand {
  NativePort* port;
  CommandPtr command;
};

void run_call(void* pointer, int64_t lane, int64_t value) {
  auto* call = static_cast<Errand*>(pointer);
  if (FailurePtr failure = call->command->attempt({lane, value}))
    call->port->add_failure({lane, value}, std::move(failure));
}

void drop_call(void* pointer) { delete static_cast<Errand*>(pointer); }

void enter_thread() { on_worker = true; }

int code(Kind kind) {
  switch (kind) {
    case Kind::Marker: return NS_MARKER;
    case Kind::Pledge: return NS_PLEDGE;
    case Kind::Sleep: return NS_SLEEP;
    default: return NS_CALL;
  }
}

} // namespace

NativePort::NativePort(int devices) : Port(devices) {
  const ns_calls calls = {run_call, drop_call, enter_thread};
  runtime_ = ns_new(devices, &calls);
}

// Only what was closed and has no thread left is freed; the rest lives as long as the process.
NativePort::~NativePort() {
  if (closed_ && in_flight == 0) ns_free(runtime_);
}

NativePort::LanePtr NativePort::find(int64_t id) {
  check_fork();
  std::shared_lock lock(mutex_);
  auto found = lanes_.find(id);
  return found == lanes_.end() ? nullptr : found->second;
}

int64_t NativePort::open_lane(int device, int64_t priority, bool host) {
  check_fork();
  forget_closed();
  TORCH_CHECK(
      device >= 0 && device < devices, "open_lane: there is no device ", device, "; there are ",
      devices);
  auto lane = std::make_shared<Lane>();
  lane->device = device;
  lane->host = host;
  const int64_t id = ns_open_lane(runtime_, device, priority, host, lane->counters);
  if (id == NS_CLOSED) throw_closed();
  std::unique_lock lock(mutex_);
  lanes_[id] = std::move(lane);
  return id;
}

void NativePort::throw_closed() const {
  stop_if_ending();
  TORCH_CHECK(
      false, "the emulated runtime of neuron_streams is closed, so it takes no more commands; "
      "streams of a closed runtime cannot be used again");
}

void NativePort::close_lane(int64_t id) {
  if (forked()) return;
  if (LanePtr lane = find(id)) {
    lane->closing = true;
    ns_close_lane(runtime_, id);
    std::unique_lock lock(mutex_);
    closing_.push_back(id);
  }
}

// Some of the closed lanes that have completed everything, and whose failures were asked for.
void NativePort::forget_closed() {
  std::unique_lock lock(mutex_);
  for (size_t tries = std::min<size_t>(closing_.size(), 8); tries > 0; tries--) {
    const int64_t id = closing_.front();
    closing_.pop_front();
    auto found = lanes_.find(id);
    if (found == lanes_.end()) continue;
    Lane& lane = *found->second;
    std::unique_lock failures(lane.mutex);
    const bool done = lane.completed() >= lane.submitted() && lane.failures.empty();
    failures.unlock();
    if (done) lanes_.erase(found);
    else closing_.push_back(id);
  }
}

int64_t NativePort::submit(
    int64_t id, const CommandPtr& command, const std::vector<Ticket>& after) {
  static_assert(sizeof(Ticket) == sizeof(ns_ticket));
  ns_command plain = {};
  plain.kind = code(command->kind);
  plain.unit = static_cast<int>(command->unit);
  plain.quick = command->quick;
  plain.name = command->name;
  plain.stamp = command->stamp;
  plain.nanoseconds = static_cast<int64_t>(command->seconds * 1e9);
  const bool kept = plain.kind == NS_CALL || plain.stamp != nullptr;
  auto call = kept ? std::make_unique<Errand>(Errand{this, command}) : nullptr;
  plain.call = call.get();
  const auto* tickets = reinterpret_cast<const ns_ticket*>(after.data());
  check_fork();
  const int64_t value =
      ns_submit(runtime_, id, &plain, tickets, static_cast<int64_t>(after.size()));
  if (value > 0) {
    call.release(); // the worker drops it, and may have done so
    if (command->stamp != nullptr) note_timed(id, value, command);
    return value;
  }
  if (value == NS_CLOSED) throw_closed();
  TORCH_CHECK(
      value != NS_NO_THREAD, "can't start new thread: neuron:", find(id)->device, " has none yet, and "
      "the system gives it none (RLIMIT_NPROC, pids.max of the cgroup, or memory); end some threads "
      "or raise the limit, then submit again");
  TORCH_CHECK(value == NS_FULL, "submit: there is no lane ", id);
  return kFull;
}

void NativePort::note_timed(int64_t id, int64_t value, const CommandPtr& command) {
  LanePtr lane = find(id);
  if (!lane) return;
  std::lock_guard lock(lane->mutex);
  auto& timed = lane->timed;
  if (timed.size() >= 64 && (timed.size() & (timed.size() - 1)) == 0) // now and then
    timed.erase(
        std::remove_if(timed.begin(), timed.end(), [](auto& item) { return item.second.expired(); }),
        timed.end());
  timed.emplace_back(value, c10::weak_intrusive_ptr<Command>(command));
}

std::optional<double> NativePort::completed_at(Ticket ticket) {
  LanePtr lane = find(ticket.lane);
  if (!lane) return {};
  std::lock_guard lock(lane->mutex);
  for (auto& [value, weak] : lane->timed) {
    if (value != ticket.value) continue;
    const CommandPtr marker = weak.lock();
    if (marker && !std::isnan(*marker->stamp)) return *marker->stamp;
  }
  return {};
}

void NativePort::wait_for_room(int64_t id) {
  check_fork();
  refuse_wait_on_worker();
  {
    WithoutGil free;
    ns_wait_for_room(runtime_, id, kSlice);
  }
  check_signals();
}

void NativePort::complete(Ticket ticket, std::exception_ptr error) {
  LanePtr lane = find(ticket.lane);
  if (!lane || lane->completed() >= ticket.value) return;
  TORCH_CHECK_VALUE(
      lane->host, "complete: lane ", ticket.lane, " belongs to the device, so only the device can "
      "complete its commands; open a lane with host=True for pledges");
  if (error) {
    const int64_t last = std::min(ticket.value, lane->submitted());
    for (int64_t value = lane->completed() + 1; value <= last; value++) {
      const Ticket broken = {ticket.lane, value};
      add_failure(broken, c10::make_intrusive<Failure>(error, broken, "pledge"));
    }
  }
  ns_complete(runtime_, ticket.lane, ticket.value);
}

int64_t NativePort::submitted(int64_t id) {
  LanePtr lane = find(id);
  return lane ? lane->submitted() : 0;
}

int64_t NativePort::completed(int64_t id) {
  LanePtr lane = find(id);
  return lane ? lane->completed() : kForgotten;
}

void NativePort::refuse_wait_on_worker() const {
  TORCH_CHECK(
      !on_worker, "wait: this destructor was run in the middle of the device's own work, which "
      "could not go on while it waits; synchronize before the object is dropped");
}

void NativePort::wait(Ticket ticket, double timeout) {
  using Clock = std::chrono::steady_clock;
  LanePtr lane = find(ticket.lane);
  if (!lane || lane->completed() >= ticket.value) return;
  const auto begin = Clock::now();
  while (lane->completed() < ticket.value) {
    refuse_wait_on_worker();
    check_fork();
    int64_t slice = kSlice;
    if (timeout >= 0) {
      const std::chrono::duration<double> passed = Clock::now() - begin;
      const double left = timeout - passed.count();
      if (left <= 0) throw TimedOut(timed_out(ticket, lane->completed(), timeout));
      slice = std::min<int64_t>(slice, static_cast<int64_t>(left * 1e9) + 1);
    }
    bool done;
    {
      WithoutGil free;
      done = ns_wait(runtime_, ticket.lane, ticket.value, slice);
    }
    stop_if_ending();
    check_signals();
    if (!done && timeout < 0 && main_thread_has_ended()) wait_alone(lane, ticket);
  }
}

// Goes on with a wait that the main thread of Python has not outlived, unless neither the device nor
// another thread can end it: nothing may hold the interpreter for ever.
void NativePort::wait_alone(const LanePtr& lane, Ticket ticket) {
  LastWait last([self = c10::intrusive_ptr<NativePort>::reclaim_copy(this), lane, ticket] {
    return lane->completed() < ticket.value && ns_drain(self->runtime_, 0);
  });
  while (lane->completed() < ticket.value) {
    TORCH_CHECK(
        !last.in_vain(), "wait: lane ", ticket.lane, " has completed ", lane->completed(), " of the ",
        ticket.value, " commands waited for; the next is ", head(ticket.lane), ". The main thread has "
        "ended, nothing runs on the devices, and no thread is left that could change that; the wait "
        "is given up so that the process can end");
    {
      WithoutGil free;
      ns_wait(runtime_, ticket.lane, ticket.value, kSlice);
    }
    check_signals();
  }
}

std::string NativePort::timed_out(Ticket ticket, int64_t completed, double timeout) {
  return c10::str(
      "wait: after ", timeout, " s lane ", ticket.lane, " has completed ", completed, " of the ",
      ticket.value, " commands waited for; the next is ", head(ticket.lane));
}

std::string NativePort::head(int64_t lane) {
  ns_command command;
  ns_ticket ticket, awaited;
  if (!ns_head(runtime_, lane, &command, &ticket, &awaited)) return "none: it is done";
  const std::string where =
      c10::str("'", command.name, "' (command ", ticket.value, " of lane ", lane);
  if (command.kind == NS_PLEDGE) return where + ", which the host has not completed)";
  if (awaited.lane == 0) return where + ", ready or running)";
  return c10::str(
      where, ", which waits for command ", awaited.value, " of lane ", awaited.lane, ")");
}

void NativePort::drain() {
  check_fork();
  WithoutGil free;
  while (!ns_drain(runtime_, kSlice)) check_signals();
}

std::vector<int64_t> NativePort::lanes(int device) {
  check_fork();
  std::shared_lock lock(mutex_);
  std::vector<int64_t> found;
  for (const auto& [id, lane] : lanes_)
    if (lane->device == device && !lane->host) found.push_back(id);
  return found;
}

void NativePort::add_failure(Ticket ticket, FailurePtr failure) {
  if (LanePtr lane = find(ticket.lane)) {
    std::lock_guard lock(lane->mutex);
    lane->failures.emplace_back(ticket.value, std::move(failure));
  }
}

std::vector<FailurePtr> NativePort::failures(Ticket ticket, int64_t since) {
  LanePtr lane = find(ticket.lane);
  std::vector<FailurePtr> found;
  if (!lane) return found;
  {
    std::lock_guard lock(lane->mutex);
    for (const auto& [value, failure] : lane->failures) {
      const bool known = std::any_of(
          found.begin(), found.end(), [&, f = failure](const FailurePtr& x) { return x == f; });
      if (since < value && value <= ticket.value && !known) found.push_back(failure);
    }
  }
  if (lane->closing && ticket.value >= lane->submitted() &&
      lane->completed() == lane->submitted()) {
    std::unique_lock lock(mutex_);
    lanes_.erase(ticket.lane);
  }
  return found;
}

std::vector<Interval> NativePort::intervals() {
  check_fork();
  std::vector<ns_interval> found(NS_INTERVALS);
  found.resize(static_cast<size_t>(ns_intervals(runtime_, found.data())));
  std::vector<Interval> made;
  made.reserve(found.size());
  for (const ns_interval& i : found)
    made.push_back({int(i.device), int(i.unit), i.began, i.ended, i.name});
  return made;
}

void NativePort::close(double timeout) {
  using Clock = std::chrono::steady_clock;
  if (forked()) return;
  {
    std::unique_lock lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  WithoutGil free;
  const auto begin = Clock::now();
  for (bool done = false; !done;) {
    const std::chrono::duration<double> passed = Clock::now() - begin;
    const double left = timeout < 0 ? 1 : timeout - passed.count();
    if (left <= 0) break;
    done = ns_drain(runtime_, std::min<int64_t>(kSlice, static_cast<int64_t>(left * 1e9)));
  }
  cancel();
  ns_stop(runtime_);
  in_flight = ns_join(runtime_, 2 * kSlice);
}

// What did not run fails, so that its readers learn why it never will.
void NativePort::cancel() {
  struct Pending {
    ns_command command;
    Ticket ticket;
    bool running;
    CommandPtr kept;
  };
  std::vector<Pending> pending;
  ns_cancel(
      runtime_,
      [](void* context, const ns_command* command, ns_ticket ticket, bool running) {
        const auto* call = static_cast<const Errand*>(command->call);
        static_cast<std::vector<Pending>*>(context)->push_back(
            {*command, {ticket.lane, ticket.value}, running, call ? call->command : CommandPtr()});
      },
      &pending);
  for (const Pending& p : pending) {
    const std::string words = c10::str(
        "'", p.command.name, "' (command ", p.ticket.value, " of lane ", p.ticket.lane, ") ",
        p.running ? "was still running" : "had not started", " when the runtime was closed");
    auto failure = c10::make_intrusive<Failure>(
        std::make_exception_ptr(Cancelled(words)), p.ticket, p.command.name);
    if (p.kept) p.kept->settle(failure);
    add_failure(p.ticket, std::move(failure));
  }
}

} // namespace neuron
