// The port over a runtime written in Python. Each call takes the GIL.
#include "foreign.h"
#include "python.h"

namespace neuron {

namespace py = pybind11;

ForeignPort::ForeignPort(py::object runtime)
    : Port(runtime.attr("device_count")().cast<int>()), runtime_(runtime.release().ptr()) {}

ForeignPort::~ForeignPort() { forget(runtime_); }

py::object ForeignPort::method(const char* name) const {
  return py::reinterpret_borrow<py::object>(runtime_).attr(name);
}

// Torch passes its own python_error on through any frame, and pybind11's not.
template <class F>
auto with_gil(const F& f) {
  py::gil_scoped_acquire gil;
  try {
    return f();
  } catch (py::error_already_set& error) {
    throw_python(error);
  }
}

int64_t ForeignPort::open_lane(int device, int64_t priority, bool host) {
  return with_gil([&] {
    return method("open_lane")(device, priority, py::arg("host") = host).cast<int64_t>();
  });
}

void ForeignPort::close_lane(int64_t lane) {
  if (!python_is_there()) return;
  with_gil([&] { method("close_lane")(lane); });
}

int64_t ForeignPort::submit(
    int64_t lane, const CommandPtr& command, const std::vector<Ticket>& after) {
  return with_gil([&] {
    py::list tickets;
    for (const Ticket& ticket : after) tickets.append(as_python(ticket));
    const py::object found = method("submit")(lane, py::cast(command), tickets, false);
    return found.is_none() ? kFull : found.cast<Ticket>().value;
  });
}

void ForeignPort::wait_for_room(int64_t lane) {
  with_gil([&] { method("wait_for_room")(lane); });
}

int64_t ForeignPort::submitted(int64_t lane) {
  return with_gil([&] { return method("submitted")(lane).cast<int64_t>(); });
}

int64_t ForeignPort::completed(int64_t lane) {
  return with_gil([&] { return method("completed")(lane).cast<int64_t>(); });
}

void ForeignPort::wait(Ticket ticket, double timeout) {
  with_gil([&] {
    const py::object limit = timeout < 0 ? py::object(py::none()) : py::float_(timeout);
    method("wait")(as_python(ticket), limit);
  });
}

void ForeignPort::drain() {
  with_gil([&] { method("drain")(); });
}

std::vector<int64_t> ForeignPort::lanes(int device) {
  return with_gil([&] { return method("lanes")(device).cast<std::vector<int64_t>>(); });
}

std::vector<FailurePtr> ForeignPort::failures(Ticket ticket, int64_t since) {
  return with_gil([&] {
    return method("failures")(as_python(ticket), since).cast<std::vector<FailurePtr>>();
  });
}

void ForeignPort::add_failure(Ticket, FailurePtr) {} // the runtime notes those that it finishes

} // namespace neuron
