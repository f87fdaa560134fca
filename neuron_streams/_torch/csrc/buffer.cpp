// Memory: of devices, and pinned memory of the host. A buffer goes when no storage and no pending
// command names it any more. Nothing is cached here; a runtime with memory of its own may do so.
#include "core.h"
#include "stream.h"

#include <cstring>
#include <map>

#include <pthread.h>
#include <shared_mutex>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

namespace neuron {

void Count::add(int64_t amount) {
  allocated.fetch_add(amount, std::memory_order_relaxed);
  int64_t now = current.fetch_add(amount, std::memory_order_relaxed) + amount;
  int64_t before = peak.load(std::memory_order_relaxed);
  while (before < now && !peak.compare_exchange_weak(before, now, std::memory_order_relaxed)) {
  }
}

void Count::remove(int64_t amount) {
  freed.fetch_add(amount, std::memory_order_relaxed);
  current.fetch_sub(amount, std::memory_order_relaxed);
}

namespace {

// Pinned buffers by address. Leaked: storages may die after static destructors.
struct Pinned {
  std::shared_mutex mutex;
  std::map<const char*, Buffer*> buffers;
  Ledger ledger;
};
Pinned& pinned() {
  // The child of a fork frees pinned memory that its parent made. A shared mutex knows which thread
  // holds it, and that is another one there, so that it is made anew and not unlocked.
  static auto* made = [] {
    pthread_atfork([] { pinned().mutex.lock(); }, [] { pinned().mutex.unlock(); },
                   [] { new (&pinned().mutex) std::shared_mutex; });
    return new Pinned;
  }();
  return *made;
}

Ledger& ledger_of(const Buffer& buffer) {
  return buffer.device() < 0 ? pinned().ledger : *buffer.port()->ledgers[buffer.device()];
}

void release_reference(void* context) {
  c10::raw::intrusive_ptr::decref(static_cast<Buffer*>(context));
}

} // namespace

Ledger& pinned_ledger() { return pinned().ledger; }

Buffer::Buffer(PortPtr port, c10::DeviceIndex device, size_t nbytes)
    : port_(std::move(port)), nbytes_(nbytes), device_(device) {
  data_ = device < 0 ? c10::alloc_cpu(nbytes) : port_->allocate(*this, nbytes);
  Ledger& ledger = ledger_of(*this);
  ledger.number.add(1);
  ledger.bytes.add(static_cast<int64_t>(nbytes));
  if (device < 0) {
    std::unique_lock lock(pinned().mutex);
    pinned().buffers[static_cast<const char*>(data_)] = this;
  } else if (port_->fills_unfinished && data_ != nullptr) {
    std::memset(data_, 0xFF, nbytes);
  }
}

Buffer::Buffer(PortPtr port, c10::DeviceIndex device, size_t nbytes, c10::DataPtr owner)
    : port_(std::move(port)),
      owner_(std::move(owner)),
      data_(owner_.get()),
      nbytes_(nbytes),
      device_(device) {
  named = true; // its owner may have handed it to a command
}

Buffer::~Buffer() {
  if (owner_) return;
  if (device_ < 0) {
    std::unique_lock lock(pinned().mutex);
    pinned().buffers.erase(static_cast<const char*>(data_));
    lock.unlock();
    c10::free_cpu(data_);
  } else {
    port_->release(*this, data_);
  }
  Ledger& ledger = ledger_of(*this);
  ledger.number.remove(1);
  ledger.bytes.remove(static_cast<int64_t>(nbytes_));
}

void* Port::allocate(Buffer&, size_t nbytes) { return nbytes ? c10::alloc_cpu(nbytes) : nullptr; }

void Port::release(Buffer&, void* data) { c10::free_cpu(data); }

std::optional<Reserved> Port::reserved(int) { return {}; }

void Port::reset_reserved(int, bool, bool) {}

void Port::empty_cache() {}

std::optional<std::pair<int64_t, int64_t>> Port::memory_info(int) { return {}; }

Ticket Buffer::writer() const {
  std::lock_guard lock(lock_);
  return writer_;
}

void Buffer::set_writer(Ticket ticket) {
  std::lock_guard lock(lock_);
  writer_ = ticket;
}

FailurePtr Buffer::failure() const {
  if (!poisoned()) return {};
  std::lock_guard lock(lock_);
  return failure_;
}

void Buffer::set_failure(FailurePtr failure) {
  if (!failure && !poisoned()) return;
  {
    std::lock_guard lock(lock_);
    std::swap(failure_, failure);
    poisoned_.store(bool(failure_), std::memory_order_release);
  } // the failure before is let go of without the lock
}

BufferPtr allocate(const PortPtr& port, c10::DeviceIndex device, size_t nbytes) {
  TORCH_CHECK(
      device >= 0 && device < port->devices, "neuron:", int(device), ": there is no such device; ",
      "there are ", port->devices);
  Ledger& ledger = *port->ledgers[device];
  const auto wanted = static_cast<int64_t>(nbytes);
  auto fits = [&] { return wanted <= ledger.capacity.load() - ledger.bytes.current.load(); };
  if (C10_UNLIKELY(!fits())) {
    ledger.retries++;
    port->drain(); // commands that complete free what only they still name
  }
  if (C10_UNLIKELY(!fits())) {
    ledger.refusals++;
    auto mib = [](int64_t bytes) { return c10::str(double(bytes >> 10) / 1024., " MiB"); };
    const int64_t capacity = ledger.capacity, used = ledger.bytes.current;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "neuron out of memory. Tried to allocate ", mib(wanted),
        ". NeuronCore ", int(device), " has a total capacity of ", mib(capacity), " of which ",
        mib(std::max<int64_t>(capacity - used, 0)), " is free. ", mib(used), " in ",
        ledger.number.current.load(), " buffers is allocated by tensors and pending commands.");
  }
  try {
    return c10::make_intrusive<Buffer>(port, device, nbytes);
  } catch (...) { // the runtime has no more
    ledger.refusals++;
    throw;
  }
}

Buffer* buffer_of(const c10::StorageImpl& storage) {
  const c10::DataPtr& pointer = storage.data_ptr();
  if (pointer.get_deleter() != release_reference) return nullptr;
  return static_cast<Buffer*>(pointer.get_context());
}

namespace {

c10::DataPtr data_ptr_of(BufferPtr buffer) {
  const c10::Device device = buffer->device() < 0 ? c10::Device(c10::kCPU)
                                                  : c10::Device(kDevice, buffer->device());
  void* data = buffer->data();
  return {data, buffer.release(), release_reference, device};
}

using Metrics = c10::CachingDeviceAllocator::StatArray;

Metrics metrics(const std::array<int64_t, 4>& values) {
  Metrics all{};
  all[0].current = values[0];
  all[0].peak = values[1];
  all[0].allocated = values[2];
  all[0].freed = values[3];
  return all;
}

Metrics metrics(const Count& count) { return metrics(count.values()); }

void reset(Ledger& ledger, bool peak) {
  for (Count* count : {&ledger.number, &ledger.bytes}) {
    if (peak) count->peak = count->current.load();
    else count->allocated = count->freed = 0;
  }
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const PortPtr here = port();
    return data_ptr_of(neuron::allocate(here, current_device(), nbytes));
  }
  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { port()->empty_cache(); }
  void recordStream(const c10::DataPtr&, c10::Stream stream) override { state_of(stream); }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const PortPtr here = port();
    const Ledger& ledger = *here->ledgers.at(device);
    const std::optional<Reserved> reserved = here->reserved(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocation = stats.active = metrics(ledger.number);
    stats.segment = reserved ? metrics(reserved->number) : stats.allocation;
    stats.allocated_bytes = metrics(ledger.bytes);
    stats.reserved_bytes = reserved ? metrics(reserved->bytes) : stats.allocated_bytes;
    stats.active_bytes = stats.requested_bytes = stats.allocated_bytes;
    stats.num_alloc_retries = ledger.retries;
    stats.num_ooms = ledger.refusals;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    reset(*port()->ledgers.at(device), false);
    port()->reset_reserved(device, false, true);
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    reset(*port()->ledgers.at(device), true);
    port()->reset_reserved(device, true, false);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const PortPtr here = port();
    const Ledger& ledger = *here->ledgers.at(device);
    if (auto found = here->memory_info(device)) return {found->first, found->second};
    const int64_t total = ledger.capacity;
    return {std::max<int64_t>(total - ledger.bytes.current, 0), total};
  }
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    return data_ptr_of(c10::make_intrusive<Buffer>(PortPtr(), -1, std::max<size_t>(nbytes, 1)));
  }
  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }
  // Pending commands keep what they name, and nothing is cached.
  bool record_event(void* address, void*, c10::Stream) override { return bool(pinned_at(address)); }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    const Ledger& ledger = pinned().ledger;
    at::HostStats stats;
    stats.active_requests = stats.allocations = metrics(ledger.number)[0];
    stats.active_bytes = stats.allocated_bytes = metrics(ledger.bytes)[0];
    stats.num_host_alloc = stats.allocations.allocated;
    stats.num_host_free = stats.allocations.freed;
    return stats;
  }
  void reset_accumulated_stats() override { reset(pinned().ledger, false); }
  void reset_peak_stats() override { reset(pinned().ledger, true); }
};

auto* device_memory = new DeviceMemory;
[[maybe_unused]] const bool registered = (c10::SetAllocator(kDevice, device_memory), true);

auto* pinned_memory = new PinnedMemory;
[[maybe_unused]] const bool pins = (at::setHostAllocator(kDevice, pinned_memory), true);

} // namespace

c10::Storage storage_of(BufferPtr buffer) {
  const size_t nbytes = buffer->nbytes();
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, data_ptr_of(std::move(buffer)), device_memory,
      /*resizable=*/true);
}

Buffer* adopt(c10::StorageImpl& storage) {
  static auto* mutex = new std::recursive_mutex;
  const c10::DeviceIndex device = storage.device().index();
  const PortPtr now = port();
  check_sync();
  wait_for_device(*now, device);
  const Held lock(*mutex); // of two threads, one adopts
  if (Buffer* found = buffer_of(storage)) return found;
  const c10::DataPtr& pointer = storage.data_ptr();
  c10::DataPtr none(pointer.get(), pointer.device());
  auto made = c10::make_intrusive<Buffer>(
      now, device, storage.nbytes(), storage.set_data_ptr(std::move(none)));
  made->shared = true;
  storage.set_data_ptr_noswap(data_ptr_of(made));
  return made.get();
}

BufferPtr pinned_at(const void* address) {
  Pinned& all = pinned();
  std::shared_lock lock(all.mutex);
  auto after = all.buffers.upper_bound(static_cast<const char*>(address));
  if (after == all.buffers.begin()) return {};
  Buffer* found = std::prev(after)->second;
  const auto* begin = static_cast<const char*>(found->data());
  if (static_cast<const char*>(address) >= begin + found->nbytes()) return {};
  return BufferPtr::reclaim_copy(found); // alive, as long as the caller's tensor is
}

c10::Allocator* pinned_allocator() { return pinned_memory; }

} // namespace neuron
