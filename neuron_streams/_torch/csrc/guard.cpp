// What torch asks of a device: its guard (devices, streams, events) and its hooks (availability,
// generators, pinned memory). None of it runs Python, but for a runtime written in Python.
#include "random.h"
#include "stream.h"
#include "window.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace neuron {

namespace {

c10::Device device_of(int index) { return {kDevice, static_cast<c10::DeviceIndex>(index)}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = current_device();
    if (device.index() != before) set_device(device.index());
    return device_of(before);
  }
  c10::Device getDevice() const override { return device_of(current_device()); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) neuron::set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    try {
      setDevice(device);
    } catch (...) { // a destructor at the end of the process, or in the child of a fork
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    try {
      return static_cast<c10::DeviceIndex>(port()->devices);
    } catch (...) {
      note_uncounted();
      return 0;
    }
  }

  // A backward asks here first. Autograd's threads sleep once the process ends, and would be waited
  // for in vain.
  c10::Stream getStream(c10::Device device) const override {
    stop_if_ending();
    TORCH_CHECK(!exit_has_begun(), "the process ends: the runtime of neuron_streams is closed");
    return current_stream(index_of(device))->as_torch();
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return port()->streams->default_of(index_of(device))->as_torch();
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return pooled(device, high ? kGreatestPriority : kLeastPriority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return pooled(device, priority);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const StreamPtr state = state_of(stream);
    const auto& mine = here();
    const c10::Stream before = mine->current(state->device)->as_torch();
    mine->streams[static_cast<size_t>(state->device)] = state;
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id() & ~c10::StreamId(1));
  }
  bool queryStream(const c10::Stream& stream) const override { return state_of(stream)->done(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    check_sync();
    state_of(stream)->synchronize();
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    synchronize_device(index);
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex index,
      const c10::EventFlag flag) const override {
    TORCH_CHECK(
        index == -1 || index == stream.device_index(), "Event device ", int(index),
        " does not match recording stream's device ", int(stream.device_index()), ".");
    const StreamPtr state = state_of(stream);
    if (*event == nullptr) *event = new EventState;
    static_cast<EventState*>(*event)->record(state, flag == c10::EventFlag::BACKEND_DEFAULT);
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* state = static_cast<EventState*>(event);
    std::unique_lock lock(state->mutex);
    const Ticket ticket = state->ticket;
    lock.unlock();
    state_of(stream)->wait(ticket);
  }
  bool queryEvent(void* event) const override { return static_cast<EventState*>(event)->done(); }
  void synchronizeEvent(void* event) const override {
    static_cast<EventState*>(event)->synchronize();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return elapsed_time(static_cast<EventState*>(start), static_cast<EventState*>(end));
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream& stream) const override {
    state_of(stream); // pending commands keep what they name: nothing to note but a bad stream
  }

 private:
  static int index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
  static c10::Stream pooled(c10::Device device, int priority) {
    const int clamped = std::min<int>(std::max<int>(priority, kGreatestPriority), kLeastPriority);
    return port()->streams->pooled(index_of(device), clamped)->as_torch();
  }
};

[[maybe_unused]] const c10::impl::DeviceGuardImplRegistrar guard(kDevice, new Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return !exit_has_begun(); }
  void init() const override { port(); }

  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(port()->devices);
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { neuron::set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = current_device();
    neuron::set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? -1 : exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }

  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return bool(pinned_at(data)); }
  at::Device getDeviceFromPtr(void*) const override { return device_of(current_device()); }

  // Memory of the new size. What is queued keeps the old one, so the copy is queued behind it.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), nbytes);
  }
};

[[maybe_unused]] const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

} // namespace

} // namespace neuron
