// The port over a runtime written in Python. Each call takes the GIL.
#include "foreign.h"
#include "python.h"

namespace neuron {

using bind::From;
using bind::Ref;
using bind::WithGil;

ForeignPort::ForeignPort(PyObject* runtime)
    : Port(From<int>::load(bind::call_method(runtime, "device_count").get())),
      has_memory_(PyObject_HasAttrString(runtime, "allocate")),
      runtime_(Py_NewRef(runtime)) {
  if (has_memory_)
    reaches_memory = From<bool>::load(Ref(PyObject_GetAttrString(runtime, "reaches_memory")).get());
}

ForeignPort::~ForeignPort() { forget(runtime_); }

int64_t ForeignPort::open_lane(int device, int64_t priority, bool host) {
  WithGil gil;
  const Ref keywords(Py_BuildValue("{s:O}", "host", host ? Py_True : Py_False));
  const Ref arguments(bind::tuple(device, priority));
  const Ref function(PyObject_GetAttrString(runtime_, "open_lane"));
  return From<int64_t>::load(
      bind::call_with(function.get(), arguments, keywords.get()).get());
}

void ForeignPort::close_lane(int64_t lane) {
  if (!python_is_there()) return;
  WithGil gil;
  bind::call_method(runtime_, "close_lane", lane);
}

int64_t ForeignPort::submit(
    int64_t lane, const CommandPtr& command, const std::vector<Ticket>& after) {
  WithGil gil;
  const Ref found = bind::call_method(runtime_, "submit", lane, command, after, false);
  return found.get() == Py_None ? kFull : From<Ticket>::load(found.get()).value;
}

void ForeignPort::wait_for_room(int64_t lane) {
  WithGil gil;
  bind::call_method(runtime_, "wait_for_room", lane);
}

int64_t ForeignPort::submitted(int64_t lane) {
  WithGil gil;
  return From<int64_t>::load(bind::call_method(runtime_, "submitted", lane).get());
}

int64_t ForeignPort::completed(int64_t lane) {
  WithGil gil;
  return From<int64_t>::load(bind::call_method(runtime_, "completed", lane).get());
}

void ForeignPort::wait(Ticket ticket, double timeout) {
  WithGil gil;
  if (timeout < 0) bind::call_method(runtime_, "wait", ticket);
  else bind::call_method(runtime_, "wait", ticket, timeout);
}

void ForeignPort::drain() {
  WithGil gil;
  bind::call_method(runtime_, "drain");
}

std::vector<int64_t> ForeignPort::lanes(int device) {
  WithGil gil;
  return From<std::vector<int64_t>>::load(bind::call_method(runtime_, "lanes", device).get());
}

std::vector<FailurePtr> ForeignPort::failures(Ticket ticket, int64_t since) {
  WithGil gil;
  return From<std::vector<FailurePtr>>::load(
      bind::call_method(runtime_, "failures", ticket, since).get());
}

void ForeignPort::add_failure(Ticket, FailurePtr) {} // the runtime notes those that it finishes

// What the runtime gives is kept as the buffer's peer, and given back by being let go of. Its
// `address` is where the host reaches that memory, 0 where it cannot.
void* ForeignPort::allocate(Buffer& buffer, size_t nbytes) {
  if (!has_memory_) return Port::allocate(buffer, nbytes);
  WithGil gil;
  Ref peer = bind::call_method(runtime_, "allocate", int(buffer.device()), nbytes);
  const Ref address(PyObject_GetAttrString(peer.get(), "address"));
  void* data = PyLong_AsVoidPtr(address.get());
  buffer.peer = peer.release();
  return data;
}

void ForeignPort::release(Buffer& buffer, void* data) {
  if (has_memory_) forget(buffer.peer);
  else Port::release(buffer, data);
}

std::optional<Reserved> ForeignPort::reserved(int device) {
  if (!has_memory_) return {};
  WithGil gil;
  const auto values =
      From<std::vector<int64_t>>::load(bind::call_method(runtime_, "reserved", device).get());
  Reserved found;
  std::copy_n(values.begin(), 4, found.number.begin());
  std::copy_n(values.begin() + 4, 4, found.bytes.begin());
  return found;
}

void ForeignPort::reset_reserved(int device, bool peak, bool accumulated) {
  if (!has_memory_) return;
  WithGil gil;
  bind::call_method(runtime_, "reset_reserved", device, peak, accumulated);
}

void ForeignPort::empty_cache() {
  if (!has_memory_) return;
  WithGil gil;
  bind::call_method(runtime_, "empty_cache");
}

std::optional<std::pair<int64_t, int64_t>> ForeignPort::memory_info(int device) {
  if (!has_memory_) return {};
  WithGil gil;
  const auto values =
      From<std::vector<int64_t>>::load(bind::call_method(runtime_, "memory_info", device).get());
  return std::pair(values.at(0), values.at(1));
}

} // namespace neuron
