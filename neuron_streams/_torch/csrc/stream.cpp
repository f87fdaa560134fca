// A stream's lane: the one door through which commands go to the runtime.
//
// A wait is remembered, and goes out with the next command, because an empty command per wait would
// cost more than the wait; whatever looks at the stream first (record, query, synchronize) makes a
// marker of it, so that it counts.
#include "stream.h"

#include <algorithm>

namespace neuron {

namespace {

constexpr size_t kMostWaits = 64; // remembered before they become a command

} // namespace

StreamState::StreamState(PortPtr port_, int device, int64_t priority, int64_t foreign_lane)
    : port(std::move(port_)),
      device(device),
      priority(priority),
      foreign(foreign_lane != 0),
      lane(foreign ? foreign_lane : port->open_lane(device, priority, false)) {}

StreamState::~StreamState() {
  if (!foreign && !forked()) port->close_lane(lane);
}

Ticket StreamState::submit(const CommandPtr& command) {
  check_fork();
  stop_if_ending();
  const bool watched = C10_UNLIKELY(port->watch != nullptr);
  if (watched) watch_submission(*this, command, {}, {});
  std::vector<Ticket> after;
  Ticket ticket;
  while ((ticket = try_submit(command, after)).value == kFull)
    port->wait_for_room(lane); // without the lock: queries of the stream go on
  if (watched) watch_submission(*this, command, ticket, after);
  return ticket;
}

Ticket StreamState::try_submit(const CommandPtr& command, std::vector<Ticket>& after) {
  Held held(lock_);
  after = waits_;
  const size_t waits = after.size();
  // A buffer remembers its last writer only. So a write on another lane follows the one before it:
  // otherwise the buffer would count as complete while the earlier write still changes it.
  for (const auto* used : {&command->reads, &command->mutated})
    for (const BufferPtr& buffer : *used) {
      buffer->named.store(true, std::memory_order_relaxed);
      const Ticket writer = buffer->writer();
      const bool elsewhere = writer.lane != 0 && writer.lane != lane;
      if (elsewhere && port->implicit_waits && !port->done(writer)) after.push_back(writer);
    }
  const Ticket ticket = append(command, after, waits);
  if (ticket.value == kFull) return ticket;
  for (const auto* written : {&command->outputs, &command->mutated})
    for (const BufferPtr& buffer : *written) {
      buffer->named.store(true, std::memory_order_relaxed);
      buffer->set_writer(ticket);
    }
  return ticket;
}

Ticket StreamState::append(
    const CommandPtr& command, const std::vector<Ticket>& after, size_t waits) {
  const int64_t value = port->submit(lane, command, after);
  if (value == kFull) return {lane, kFull};
  last_.store(value, std::memory_order_release);
  if (waits) { // only now: who sees no waits must see the `last_` that they went into
    waits_.erase(waits_.begin(), waits_.begin() + static_cast<ptrdiff_t>(waits));
    waiting_.store(!waits_.empty(), std::memory_order_release);
  }
  return {lane, value};
}

Ticket StreamState::ticket() {
  check_fork();
  if (waiting_.load(std::memory_order_acquire)) {
    Held held(lock_);
    if (!waits_.empty()) {
      static const char* name = intern("wait");
      const std::vector<Ticket> after = waits_;
      return append(c10::make_intrusive<Marker>(false, name), after, after.size());
    }
  }
  if (foreign) return {lane, port->submitted(lane)};
  return {lane, last_.load(std::memory_order_acquire)};
}

void StreamState::wait(Ticket ticket) {
  check_fork();
  if (ticket.lane == lane || port->done(ticket)) return;
  size_t count;
  {
    Held held(lock_);
    if (!waits_.empty() && waits_.back().lane == ticket.lane) {
      waits_.back().value = std::max(waits_.back().value, ticket.value);
    } else {
      waits_.push_back(ticket);
    }
    count = waits_.size();
    waiting_.store(true, std::memory_order_release);
  }
  if (count > kMostWaits) this->ticket();
}

bool StreamState::done() { return port->done(ticket()); }

std::vector<FailurePtr> StreamState::see(Ticket ticket, int64_t since) {
  int64_t before = seen.load();
  while (before < ticket.value && !seen.compare_exchange_weak(before, ticket.value)) {
  }
  return port->failures(ticket, since);
}

std::vector<FailurePtr> StreamState::failures(Ticket ticket) {
  check_fork();
  int64_t since;
  {
    Held held(lock_);
    since = raised_;
    raised_ = std::max(raised_, ticket.value);
  }
  return see(ticket, since);
}

void StreamState::synchronize() {
  const Ticket last = ticket();
  port->wait(last, -1);
  raise_any(failures(last));
}

// -- the streams of a port ----------------------------------------------------------------------

Streams::Streams(Port& port) : port_(port), defaults_(static_cast<size_t>(port.devices)) {}

StreamPtr Streams::add(StreamPtr stream, c10::StreamId id) {
  stream->id = id;
  std::lock_guard lock(mutex_);
  return streams_[id] = std::move(stream);
}

StreamPtr Streams::open(int device, int64_t priority) {
  sweep();
  const PortPtr self = PortPtr::reclaim_copy(&port_);
  auto made = c10::make_intrusive<StreamState>(self, device, priority);
  const c10::StreamId id = made->lane << 1 | 1;
  return add(std::move(made), id);
}

StreamPtr Streams::pooled(int device, int64_t priority) {
  constexpr size_t kPoolSize = 32;
  const int64_t key = int64_t(device) << 8 | -priority;
  {
    std::lock_guard lock(mutex_);
    Pool& pool = pools_[key];
    if (pool.streams.size() == kPoolSize) return pool.streams[pool.next++ % kPoolSize];
  }
  StreamPtr made = open(device, priority);
  made->handles++; // of the pool
  std::lock_guard lock(mutex_);
  pools_[key].streams.push_back(made);
  return made;
}

StreamPtr Streams::default_of(int device) {
  {
    std::lock_guard lock(mutex_);
    if (StreamPtr found = defaults_.at(static_cast<size_t>(device))) return found;
  }
  // Opened without the lock: a runtime in Python may take the GIL for it.
  auto made = c10::make_intrusive<StreamState>(PortPtr::reclaim_copy(&port_), device, 0);
  made->handles++;
  std::lock_guard lock(mutex_);
  StreamPtr& found = defaults_[static_cast<size_t>(device)];
  if (!found) found = std::move(made);
  return found;
}

StreamPtr Streams::find(c10::StreamId id, int device) {
  if (id == 0) return default_of(device);
  std::lock_guard lock(mutex_);
  auto found = streams_.find(id);
  if (found == streams_.end()) found = streams_.find(id | 1); // `id` is a handle
  return found == streams_.end() || found->second->device != device ? StreamPtr() : found->second;
}

StreamPtr Streams::of(c10::StreamId id, int device) {
  TORCH_CHECK(
      device >= 0 && device < port_.devices, "neuron:", device, ": there is no such device; there "
      "are ", port_.devices);
  if (StreamPtr found = find(id, device)) return found;
  // Autograd may name a stream whose last object is gone. All of its work has completed (see
  // `retire`), so that a lane of its own is as good as the old one.
  StreamPtr made =
      add(c10::make_intrusive<StreamState>(PortPtr::reclaim_copy(&port_), device, 0), id);
  retire(made);
  return made;
}

void Streams::retire(const StreamPtr& stream) {
  if (stream->retired.exchange(true)) return;
  std::lock_guard lock(mutex_);
  retired_.push_back(stream);
}

// Lets go of some of the streams that have no object and no work left.
void Streams::sweep() {
  std::vector<StreamPtr> gone, candidates; // destroyed without the lock
  {
    std::lock_guard lock(mutex_);
    const size_t count = std::min<size_t>(retired_.size(), 8);
    candidates.assign(retired_.begin(), retired_.begin() + static_cast<ptrdiff_t>(count));
    retired_.erase(retired_.begin(), retired_.begin() + static_cast<ptrdiff_t>(count));
  }
  for (StreamPtr& stream : candidates) {
    stream->retired = false;
    if (stream->handles > 0) continue; // an object of Python names it again
    const bool alone = stream.use_count() == 2; // here and in `streams_`: no thread, no event
    if (!alone || !stream->done()) {
      retire(stream);
      continue;
    }
    std::lock_guard lock(mutex_);
    streams_.erase(stream->id);
    gone.push_back(std::move(stream));
  }
}

std::vector<StreamPtr> Streams::living(int device) {
  std::lock_guard lock(mutex_);
  std::vector<StreamPtr> found;
  for (const auto& [id, stream] : streams_)
    if (stream->device == device) found.push_back(stream);
  if (const StreamPtr& first = defaults_.at(static_cast<size_t>(device))) found.push_back(first);
  return found;
}

void Streams::clear() {
  std::vector<StreamPtr> defaults, retired;
  std::unordered_map<c10::StreamId, StreamPtr> streams;
  std::unordered_map<int64_t, Pool> pools;
  std::lock_guard lock(mutex_);
  defaults.swap(defaults_);
  defaults_.resize(defaults.size());
  streams.swap(streams_);
  pools.swap(pools_);
  retired.swap(retired_);
}

// -- what a thread has as current ---------------------------------------------------------------

const std::shared_ptr<Here>& here() {
  thread_local std::shared_ptr<Here> mine;
  stop_if_ending();
  PortPtr now = port();
  if (!mine || mine->port != now) {
    note_user();
    mine = std::make_shared<Here>();
    mine->streams.resize(static_cast<size_t>(now->devices));
    mine->port = std::move(now);
  }
  return mine;
}

StreamPtr Here::current(int index) {
  TORCH_CHECK(
      index >= 0 && index < port->devices, "neuron:", index, ": there is no such device; there "
      "are ", port->devices);
  const StreamPtr& set = streams[static_cast<size_t>(index)];
  return set ? set : port->streams->default_of(index);
}

void Here::enter(const void* owner, const StreamPtr& stream) {
  StreamPtr& slot = streams[static_cast<size_t>(stream->device)];
  entered.push_back({owner, device, stream->device, slot});
  slot = stream;
  device = stream->device;
}

// Mostly that is the top of the stack. Generators and tasks may leave in another order: then each
// puts back what it found, as in torch.cuda.
bool Here::leave(const void* owner) {
  auto found = std::find_if(
      entered.rbegin(), entered.rend(), [&](const Entry& e) { return e.owner == owner; });
  if (found == entered.rend()) return false;
  Entry entry = std::move(*found);
  entered.erase(std::next(found).base());
  streams[static_cast<size_t>(entry.index)] = std::move(entry.before);
  device = entry.device;
  return true;
}

c10::DeviceIndex current_device() { return static_cast<c10::DeviceIndex>(here()->device); }

void set_device(int device) {
  const auto& mine = here();
  TORCH_CHECK(
      device >= 0 && device < mine->port->devices, "invalid device ordinal: neuron:", device, "; there are ", mine->port->devices);
  mine->device = device;
}

StreamPtr current_stream(int device) { return here()->current(device); }

void set_stream(const StreamPtr& stream) {
  const auto& mine = here();
  mine->streams[static_cast<size_t>(stream->device)] = stream;
  mine->device = stream->device;
}

StreamPtr state_of(const c10::Stream& stream) {
  TORCH_CHECK_VALUE(
      stream.device_type() == kDevice, "a neuron stream is expected, but got one of ",
      stream.device());
  return port()->streams->of(stream.id(), stream.device_index());
}

// -- events -------------------------------------------------------------------------------------

void EventState::record(const StreamPtr& on, bool timed) {
  c10::intrusive_ptr<Marker> fresh;
  Ticket taken;
  if (timed) {
    static const char* name = intern("event");
    fresh = c10::make_intrusive<Marker>(true, name);
    taken = on->submit(fresh);
  } else {
    taken = on->ticket();
  }
  std::lock_guard lock(mutex);
  stream = on;
  ticket = taken;
  marker = std::move(fresh);
  since = on->seen;
}

bool EventState::done() {
  check_fork();
  std::unique_lock lock(mutex);
  const StreamPtr on = stream;
  const Ticket newest = ticket;
  lock.unlock();
  return !on || on->port->done(newest);
}

void EventState::synchronize() {
  check_fork();
  std::unique_lock lock(mutex);
  const StreamPtr on = stream;
  const Ticket newest = ticket;
  lock.unlock();
  check_fork();
  if (!on) return;
  on->port->wait(newest, -1);
  lock.lock();
  const int64_t before = since;
  since = std::max(since, newest.value);
  lock.unlock();
  raise_any(on->see(newest, before));
}

double elapsed_time(EventState* start, EventState* end) {
  TORCH_CHECK_VALUE(
      start != nullptr && end != nullptr,
      "Both events must be recorded before calculating elapsed time.");
  TORCH_CHECK_VALUE(
      start->marker && end->marker,
      "Both events must be created with argument 'enable_timing=True'.");
  TORCH_CHECK(
      start->done() && end->done(),
      "Both events must be completed before calculating elapsed time.");
  TORCH_CHECK(
      start->stream->device == end->stream->device, "elapsed_time: the events are on neuron:",
      start->stream->device, " and neuron:", end->stream->device, ", whose clocks cannot be "
      "compared; record both on one device");
  return (end->marker->moment - start->marker->moment) * 1e3;
}

// -- waiting ------------------------------------------------------------------------------------

std::atomic<int> sync_debug_mode{0};

void check_sync() {
  const int mode = sync_debug_mode.load(std::memory_order_relaxed);
  TORCH_CHECK(
      mode != 2, "called a synchronizing Neuron operation while set_sync_debug_mode is error; "
      "copy with non_blocking=True and wait for an event instead");
  if (mode == 1) TORCH_WARN("called a synchronizing Neuron operation");
}

std::vector<Ticket> wait_for_device(Port& port, int device) {
  std::vector<Ticket> newest;
  for (const int64_t lane : port.lanes(device)) newest.push_back({lane, port.submitted(lane)});
  for (const Ticket& ticket : newest) port.wait(ticket, -1);
  return newest;
}

void synchronize_device(int device) {
  const PortPtr here = port();
  TORCH_CHECK(
      device >= 0 && device < here->devices, "neuron:", device, ": there is no such device; there "
      "are ", here->devices);
  for (const StreamPtr& stream : here->streams->living(device)) stream->ticket();
  raise_any(here->new_failures(device, wait_for_device(*here, device)));
}

Port::Port(int devices)
    : devices(devices),
      streams(std::make_unique<Streams>(*this)),
      raised_(static_cast<size_t>(devices)) {
  for (int i = 0; i < devices; i++) ledgers.push_back(std::make_unique<Ledger>());
}

Port::~Port() = default;

void Port::close_streams() { streams->clear(); }

std::vector<FailurePtr> Port::new_failures(int device, const std::vector<Ticket>& newest) {
  std::vector<FailurePtr> found;
  std::unordered_map<int64_t, int64_t> before, after;
  {
    std::lock_guard lock(mutex_);
    before = raised_[static_cast<size_t>(device)];
  }
  for (const Ticket& ticket : newest) {
    const auto asked = before.find(ticket.lane);
    for (FailurePtr& failure : failures(ticket, asked == before.end() ? 0 : asked->second))
      found.push_back(std::move(failure));
    after[ticket.lane] = ticket.value;
  }
  for (const StreamPtr& stream : streams->living(device)) {
    const auto asked = after.find(stream->lane);
    if (asked != after.end()) stream->seen = std::max<int64_t>(stream->seen, asked->second);
  }
  std::lock_guard lock(mutex_);
  raised_[static_cast<size_t>(device)] = std::move(after);
  return found;
}

} // namespace neuron
