// What Python sees of the extension.
#include "python.h"
#include "copy.h"
#include "execute.h"
#include "foreign.h"
#include "native.h"
#include "operator.h"
#include "random.h"
#include "stream.h"

#include <cmath>
#include <sstream>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace neuron {

namespace py = pybind11;

namespace {

// What the extension calls of Python's: set once, by `bind`. Never freed.
struct Callbacks {
  PyObject *start = nullptr, *ticket = nullptr, *raise_first = nullptr, *say_on_host = nullptr,
           *cancelled = nullptr;
  std::string forked;
};
Callbacks& callbacks() {
  static auto* made = new Callbacks;
  return *made;
}

std::atomic<bool> in_child{false};

// The port of the process. Read by every call, replaced by tests.
struct Current {
  Spin lock;
  PortPtr port;
};
Current& current() {
  static auto* made = new Current;
  return *made;
}

struct Forgotten {
  std::mutex mutex;
  std::vector<PyObject*> objects;
};
Forgotten& forgotten() {
  static auto* made = new Forgotten;
  return *made;
}

// Lets go of what threads without the GIL could not.
void tidy() {
  std::vector<PyObject*> objects;
  {
    std::lock_guard lock(forgotten().mutex);
    objects.swap(forgotten().objects);
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

// A Python exception on its way through C++.
struct Raised {
  std::shared_ptr<PyObject> error;
};

std::exception_ptr raised(py::object error) {
  return std::make_exception_ptr(
      Raised{std::shared_ptr<PyObject>(error.release().ptr(), [](PyObject* o) { forget(o); })});
}

} // namespace

bool python_is_there() { return Py_IsInitialized() && !_Py_IsFinalizing(); }

void forget(PyObject* object) {
  if (object == nullptr || in_child) return;
  std::lock_guard lock(forgotten().mutex);
  forgotten().objects.push_back(object);
}

void check_fork() { TORCH_CHECK(!in_child, callbacks().forked); }

PortPtr port() {
  check_fork();
  Current& now = current();
  {
    std::lock_guard lock(now.lock);
    if (now.port) return now.port;
  }
  {
    py::gil_scoped_acquire gil;
    try {
      py::reinterpret_borrow<py::object>(callbacks().start)();
    } catch (py::error_already_set& error) {
      throw_python(error);
    }
  }
  std::lock_guard lock(now.lock);
  TORCH_CHECK(now.port, "neuron_streams: the runtime of this process has been closed");
  return now.port;
}

void set_port(PortPtr port) {
  Current& now = current();
  std::lock_guard lock(now.lock);
  std::swap(now.port, port);
}

Failure::~Failure() {
  forget(exception);
  forget(traceback);
}

py::object as_python(Ticket ticket) {
  return py::reinterpret_borrow<py::object>(callbacks().ticket)(ticket.lane, ticket.value);
}

void throw_python(py::error_already_set& error) {
  error.restore();
  python_error passed;
  passed.persist();
  throw passed;
}

namespace {

py::object make(PyObject* type, const std::string& words) {
  return py::reinterpret_borrow<py::object>(type)(words);
}

// A class of torch's, borrowed: the module keeps it.
PyObject* torch_type(const char* name) {
  py::object found = py::module_::import("torch");
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '.');) found = found.attr(part.c_str());
  return found.ptr();
}

py::object exception_from(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Raised& raised) {
    return py::reinterpret_borrow<py::object>(raised.error.get());
  } catch (python_error& raised) {
    raised.restore();
    py::error_already_set set;
    return set.value();
  } catch (const Cancelled& e) {
    return make(callbacks().cancelled, e.what());
  } catch (const c10::OutOfMemoryError& e) {
    return make(torch_type("OutOfMemoryError"), e.what_without_backtrace());
  } catch (const c10::IndexError& e) {
    return make(PyExc_IndexError, e.what_without_backtrace());
  } catch (const c10::ValueError& e) {
    return make(PyExc_ValueError, e.what_without_backtrace());
  } catch (const c10::TypeError& e) {
    return make(PyExc_TypeError, e.what_without_backtrace());
  } catch (const c10::NotImplementedError& e) {
    return make(PyExc_NotImplementedError, e.what_without_backtrace());
  } catch (const c10::LinAlgError& e) {
    return make(torch_type("_C._LinAlgError"), e.what_without_backtrace());
  } catch (const c10::Error& e) {
    return make(PyExc_RuntimeError, e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return make(PyExc_MemoryError, "the host has no memory left");
  } catch (const std::exception& e) {
    return make(PyExc_RuntimeError, e.what());
  }
}

} // namespace

py::object exception_of(Failure& failure) {
  if (failure.exception == nullptr) {
    py::object made = exception_from(failure.error);
    py::object traceback =
        py::reinterpret_steal<py::object>(PyException_GetTraceback(made.ptr()));
    failure.traceback = traceback ? traceback.release().ptr() : nullptr;
    failure.exception = made.release().ptr();
  }
  return py::reinterpret_borrow<py::object>(failure.exception);
}

void raise_any(const std::vector<FailurePtr>& failures) {
  if (failures.empty()) return;
  py::gil_scoped_acquire gil;
  tidy();
  try {
    py::reinterpret_borrow<py::object>(callbacks().raise_first)(py::cast(failures));
  } catch (py::error_already_set& error) {
    throw_python(error);
  }
}

void say_on_host(const char* name) {
  if (!python_is_there()) return;
  py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::object>(callbacks().say_on_host)(name);
}

void watch_submission(
    StreamState& stream, const CommandPtr& command, Ticket ticket,
    const std::vector<Ticket>& after) {
  py::gil_scoped_acquire gil;
  try {
    const py::object taken =
        ticket.lane ? as_python(ticket) : py::object(py::none());
    py::reinterpret_borrow<py::object>(stream.port->watch)(
        StreamPtr::reclaim_copy(&stream), command, taken, after);
  } catch (py::error_already_set& error) {
    throw_python(error);
  }
}

std::vector<at::Tensor> run_in_python(PyObject* handle, const std::vector<at::Tensor>& inputs) {
  py::gil_scoped_acquire gil;
  try {
    return py::reinterpret_borrow<py::object>(handle)
        .attr("run")(inputs)
        .cast<std::vector<at::Tensor>>();
  } catch (py::error_already_set& error) {
    py::object value = error.value();
    if (error.trace()) PyException_SetTraceback(value.ptr(), error.trace().ptr());
    std::rethrow_exception(raised(std::move(value)));
  }
}

WithoutGil::WithoutGil() {
  if (PyGILState_Check()) state_ = PyEval_SaveThread();
}
WithoutGil::~WithoutGil() {
  if (state_) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

Held::Held(std::recursive_mutex& mutex) : mutex_(mutex) {
  if (mutex.try_lock()) return;
  WithoutGil free;
  mutex.lock();
}

void check_signals() {
  if (!python_is_there()) return;
  static const unsigned long main = [] {
    py::gil_scoped_acquire gil;
    return py::module_::import("threading").attr("main_thread")().attr("ident")
        .cast<unsigned long>();
  }();
  if (PyThread_get_thread_ident() != main) return;
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  python_error error;
  error.persist();
  throw error;
}

namespace {

// -- the objects of Python ----------------------------------------------------------------------

// What a NeuronStream holds. The stream may be forgotten when the last of these is gone.
struct StreamHandle {
  explicit StreamHandle(StreamPtr stream) : stream(std::move(stream)) { this->stream->handles++; }
  ~StreamHandle() {
    if (--stream->handles == 0 && !in_child) stream->port->streams->retire(stream);
  }
  StreamHandle(const StreamHandle&) = delete;
  const StreamPtr stream;
};

PyObject* wrapper_of(const StreamPtr& stream) { return stream->wrapper; }

py::object stream_object(const StreamPtr& stream) {
  if (PyObject* known = wrapper_of(stream)) return py::reinterpret_borrow<py::object>(known);
  return py::none();
}


void bind_values(py::module_& m) {
  py::class_<Failure, FailurePtr>(m, "Failure")
      .def(py::init([](py::object error, Ticket ticket, std::string what) {
        return c10::make_intrusive<Failure>(raised(std::move(error)), ticket, std::move(what));
      }))
      .def_property_readonly("error", [](Failure& f) { return exception_of(f); })
      .def_property_readonly("ticket", [](const Failure& f) { return as_python(f.ticket); })
      .def_readonly("what", &Failure::what)
      .def_property_readonly("traceback", [](Failure& f) -> py::object {
        exception_of(f);
        if (f.traceback == nullptr) return py::none();
        return py::reinterpret_borrow<py::object>(f.traceback);
      });
  py::class_<Buffer, BufferPtr>(m, "Buffer")
      .def_property_readonly("device", [](const Buffer& b) { return int(b.device()); })
      .def_property_readonly("nbytes", &Buffer::nbytes)
      .def_property_readonly(
          "address", [](const Buffer& b) { return reinterpret_cast<uintptr_t>(b.data()); })
      .def_property_readonly("writer", [](const Buffer& b) -> py::object {
        const Ticket ticket = b.writer();
        return ticket.lane ? as_python(ticket) : py::object(py::none());
      })
      .def_property_readonly("named", [](const Buffer& b) { return b.named.load(); })
      .def_property_readonly("failure", &Buffer::failure);
  py::class_<Window>(m, "View")
      .def(py::init<const at::Tensor&>())
      .def(py::init([](const BufferPtr& buffer, at::ScalarType dtype, std::vector<int64_t> size,
                       std::vector<int64_t> stride, int64_t offset) {
             Window made;
             made.buffer = buffer;
             made.dtype = dtype;
             made.geometry.set_sizes(size);
             made.geometry.set_strides(stride);
             made.offset = offset;
             return made;
           }),
           py::arg("buffer"), py::arg("dtype"), py::arg("size"), py::arg("stride"),
           py::arg("offset") = 0)
      .def_readonly("buffer", &Window::buffer)
      .def_property_readonly("dtype", [](const Window& w) { return w.dtype; })
      .def_property_readonly("size", [](const Window& w) {
        return py::tuple(py::cast(w.geometry.sizes_arrayref().vec()));
      })
      .def_property_readonly("stride", [](const Window& w) {
        return py::tuple(py::cast(w.geometry.strides_arrayref().vec()));
      })
      .def_readonly("offset", &Window::offset)
      .def_property_readonly("nbytes", &Window::nbytes)
      .def_property_readonly("whole", &Window::whole)
      .def("on_host", &Window::on_host, "The host's tensor over the same memory; waits for no one.");
}

Form form_of(const Window& window) {
  return {window.dtype, window.geometry.sizes_arrayref().vec(),
          window.geometry.strides_arrayref().vec(), window.nbytes()};
}

void bind_commands(py::module_& m) {
  py::class_<Command, CommandPtr>(m, "Command")
      .def_property_readonly("kind", [](const Command& c) { return int(c.kind); })
      .def_property_readonly("unit", [](const Command& c) { return int(c.unit); })
      .def_property(
          "name", [](const Command& c) { return c.name; },
          [](Command& c, const std::string& name) { c.name = intern(name); })
      .def_readonly("reads", &Command::reads)
      .def_readonly("outputs", &Command::outputs)
      .def_readonly("mutated", &Command::mutated)
      .def_readonly("quick", &Command::quick)
      .def_readonly("seconds", &Command::seconds)
      .def_property_readonly("timed", [](const Command& c) { return c.stamp != nullptr; })
      .def_property(
          "at",
          [](const Command& c) -> std::optional<double> {
            if (c.stamp == nullptr || std::isnan(*c.stamp)) return {};
            return *c.stamp;
          },
          [](Command& c, double moment) {
            if (c.stamp != nullptr) *c.stamp = moment;
          })
      .def("blame", &Command::blame)
      .def("settle", [](Command& c, const std::optional<FailurePtr>& failure) {
        c.settle(failure.value_or(FailurePtr()));
      })
      .def("attempt", [](Command& c, Ticket ticket) {
        WithoutGil free;
        return c.attempt(ticket);
      });
  py::class_<Marker, Command, c10::intrusive_ptr<Marker>>(m, "Marker")
      .def(py::init([](bool timed, const std::string& name) {
             return c10::make_intrusive<Marker>(timed, intern(name));
           }),
           py::arg("timed") = false, py::arg("name") = "marker");
  m.def(
      "Pledge",
      [](const std::string& name) {
        return c10::make_intrusive<Command>(Kind::Pledge, Unit::Compute, intern(name));
      },
      py::arg("name") = "pledge");
  m.def(
      "Sleep",
      [](double seconds, int unit, const std::string& name) {
        auto made = c10::make_intrusive<Command>(
            Kind::Sleep, static_cast<Unit>(unit), intern(name));
        made->seconds = seconds;
        return made;
      },
      py::arg("seconds"), py::arg("unit") = 0, py::arg("name") = "sleep");
  py::class_<Copy, Command, c10::intrusive_ptr<Copy>>(m, "Copy")
      .def(py::init([](const py::object& source, const py::object& target,
                       const std::string& name) {
             auto end = [](const py::object& x) {
               if (py::isinstance<Window>(x)) return Copy::End{x.cast<Window>(), {}, {}};
               const auto tensor = x.cast<at::Tensor>();
               return is_ours(tensor) ? Copy::End::on_device(tensor) : Copy::End::on_host(tensor);
             };
             return c10::make_intrusive<Copy>(end(source), end(target), intern(name));
           }),
           py::arg("source"), py::arg("target"), py::arg("name") = "copy")
      .def_property_readonly("source", [](const Copy& c) -> py::object {
        return c.source.host.defined() ? py::cast(c.source.host) : py::cast(c.source.window);
      })
      .def_property_readonly("target", [](const Copy& c) -> py::object {
        return c.target.host.defined() ? py::cast(c.target.host) : py::cast(c.target.window);
      });
  py::class_<Loaded, std::shared_ptr<Loaded>>(m, "Loaded")
      .def(py::init([](const std::string& name, const py::list& inputs, const py::list& outputs,
                       std::vector<size_t> mutated, uintptr_t program, py::object handle) {
             auto form = [](const py::handle& item) {
               auto [dtype, size, stride] =
                   item.cast<std::tuple<at::ScalarType, std::vector<int64_t>,
                                        std::vector<int64_t>>>();
               Form made{dtype, size, stride, c10::elementSize(dtype)};
               for (const int64_t extent : size) made.nbytes *= static_cast<size_t>(extent);
               return made;
             };
             auto made = std::make_shared<Loaded>();
             made->name = intern(name);
             for (const auto& item : inputs) made->inputs.push_back(form(item));
             for (const auto& item : outputs) made->outputs.push_back(form(item));
             made->mutated = std::move(mutated);
             made->program = reinterpret_cast<const void*>(program);
             made->handle = handle.release().ptr(); // as long as commands may name it: for ever
             return made;
           }))
      .def(
          "__call__",
          [](const std::shared_ptr<Loaded>& loaded, const std::vector<at::Tensor>& tensors) {
            return execute(loaded, tensors);
          });
  py::class_<Execute, Command, c10::intrusive_ptr<Execute>>(m, "Execute")
      .def(py::init([](py::object handle, const std::vector<Window>& inputs,
                       const std::vector<Window>& outputs, std::vector<size_t> mutated, int unit,
                       const std::string& name) {
             auto loaded = std::make_shared<Loaded>();
             loaded->name = intern(name);
             for (const Window& w : inputs) loaded->inputs.push_back(form_of(w));
             for (const Window& w : outputs) loaded->outputs.push_back(form_of(w));
             loaded->mutated = std::move(mutated);
             loaded->handle = handle.release().ptr();
             auto made = c10::make_intrusive<Execute>(loaded, static_cast<Unit>(unit));
             for (const Window& w : inputs) {
               made->inputs.push_back({w.buffer, size_t(w.offset) * c10::elementSize(w.dtype)});
               made->reads.push_back(w.buffer);
             }
             for (const Window& w : outputs) made->outputs.push_back(w.buffer);
             for (const size_t i : loaded->mutated) made->mutated.push_back(inputs.at(i).buffer);
             return made;
           }),
           py::arg("handle"), py::arg("inputs"), py::arg("outputs"),
           py::arg("mutated") = std::vector<size_t>(), py::arg("unit") = 0,
           py::arg("name") = "execute")
      .def_property_readonly("handle", [](const Execute& e) {
        return py::reinterpret_borrow<py::object>(e.loaded->handle);
      })
      .def_property_readonly("inputs", [](const Execute& e) {
        py::list inputs;
        for (const Execute::Input& input : e.inputs)
          inputs.append(py::make_tuple(input.buffer, input.offset));
        return inputs;
      });
}

void bind_ports(py::module_& m) {
  py::class_<Port, PortPtr>(m, "Port")
      .def("device_count", [](const Port& p) { return p.devices; })
      .def("close_streams", &Port::close_streams)
      .def_readwrite("implicit_waits", &Port::implicit_waits)
      .def_readwrite("fills_unfinished", &Port::fills_unfinished)
      .def("watch", [](Port& p, py::object watch) { p.watch = watch.release().ptr(); })
      .def("allocate", [](const PortPtr& p, int device, size_t nbytes) {
        return allocate(p, static_cast<c10::DeviceIndex>(device), nbytes);
      })
      .def("capacity", [](Port& p, int device) { return p.ledgers.at(device)->capacity.load(); })
      .def("set_capacity", [](Port& p, int device, int64_t nbytes) {
        p.ledgers.at(device)->capacity = nbytes;
      });
  py::class_<ForeignPort, Port, c10::intrusive_ptr<ForeignPort>>(m, "ForeignPort")
      .def(py::init<py::object>());
  py::class_<NativePort, Port, c10::intrusive_ptr<NativePort>>(m, "NativePort")
      .def(py::init<int>())
      .def(
          "open_lane", &NativePort::open_lane, py::arg("device"), py::arg("priority") = 0,
          py::kw_only(), py::arg("host") = false)
      .def("close_lane", &NativePort::close_lane)
      .def(
          "submit",
          [](NativePort& p, int64_t lane, const CommandPtr& command,
             const std::vector<Ticket>& after, bool wait) -> py::object {
            int64_t value;
            while ((value = p.submit(lane, command, after)) == kFull) {
              if (!wait) return py::none();
              p.wait_for_room(lane);
              check_signals();
            }
            return as_python({lane, value});
          },
          py::arg("lane"), py::arg("command"), py::arg("after") = std::vector<Ticket>(),
          py::arg("wait") = true)
      .def("wait_for_room", &NativePort::wait_for_room)
      .def(
          "complete",
          [](NativePort& p, Ticket ticket, py::object error) {
            p.complete(ticket, error.is_none() ? nullptr : raised(std::move(error)));
          },
          py::arg("ticket"), py::arg("error") = py::none())
      .def("submitted", &NativePort::submitted)
      .def("completed", &NativePort::completed)
      .def("completed_at", &NativePort::completed_at)
      .def("lanes", &NativePort::lanes)
      .def(
          "wait",
          [](NativePort& p, Ticket ticket, std::optional<double> timeout) {
            p.wait(ticket, timeout.has_value() ? std::max(*timeout, 0.0) : -1);
          },
          py::arg("ticket"), py::arg("timeout") = py::none())
      .def(
          "failures",
          [](NativePort& p, Ticket ticket, int64_t since) {
            tidy();
            return py::tuple(py::cast(p.failures(ticket, since)));
          },
          py::arg("ticket"), py::arg("since") = 0)
      .def("drain", &NativePort::drain)
      .def(
          "busy_intervals",
          [](NativePort& p) {
            std::vector<std::tuple<int, int, double, double, const char*>> made;
            for (const Interval& i : p.intervals())
              made.emplace_back(i.device, i.unit, i.began, i.ended, i.name);
            return made;
          })
      .def(
          "close",
          [](NativePort& p, std::optional<double> timeout) { p.close(timeout.value_or(-1)); },
          py::arg("timeout") = py::none())
      .def_property_readonly("in_flight", [](const NativePort& p) { return p.in_flight.load(); });
}

py::dict counts(const Ledger& ledger) {
  py::dict made;
  for (auto [name, count] : {std::pair{"number", &ledger.number}, {"bytes", &ledger.bytes}}) {
    py::dict metrics;
    metrics["current"] = count->current.load();
    metrics["peak"] = count->peak.load();
    metrics["allocated"] = count->allocated.load();
    metrics["freed"] = count->freed.load();
    made[name] = metrics;
  }
  made["retries"] = ledger.retries.load();
  made["refusals"] = ledger.refusals.load();
  return made;
}

Ledger& ledger_of(int device) {
  return device < 0 ? pinned_ledger() : *port()->ledgers.at(static_cast<size_t>(device));
}

void bind_streams(py::module_& m) {
  py::class_<Here, std::shared_ptr<Here>>(m, "Here")
      .def("leave", [](Here& here, const py::handle& owner) { return here.leave(owner.ptr()); });
  py::class_<StreamHandle>(m, "StreamState")
      .def_property_readonly("port", [](const StreamHandle& h) { return h.stream->port; })
      .def_property_readonly("device", [](const StreamHandle& h) { return h.stream->device; })
      .def_property_readonly("priority", [](const StreamHandle& h) { return h.stream->priority; })
      .def_property_readonly("lane", [](const StreamHandle& h) { return h.stream->lane; })
      .def_property_readonly("id", [](const StreamHandle& h) { return h.stream->id; })
      .def("own", [](const StreamHandle& h, py::handle wrapper) {
        h.stream->wrapper = wrapper.ptr();
      })
      .def("disown", [](const StreamHandle& h, uintptr_t wrapper) {
        if (reinterpret_cast<uintptr_t>(h.stream->wrapper) == wrapper) h.stream->wrapper = nullptr;
      })
      .def("submit", [](const StreamHandle& h, const CommandPtr& command) {
        return h.stream->submit(command);
      })
      .def("ticket", [](const StreamHandle& h) { return h.stream->ticket(); })
      .def("wait", [](const StreamHandle& h, Ticket ticket) { h.stream->wait(ticket); })
      .def("done", [](const StreamHandle& h) { return h.stream->done(); })
      .def("failures", [](const StreamHandle& h, Ticket ticket) {
        return h.stream->failures(ticket);
      })
      .def("same", [](const StreamHandle& a, const StreamHandle& b) {
        return a.stream == b.stream;
      });
  m.def("open_stream", [](int device, int64_t priority) {
    return std::make_unique<StreamHandle>(port()->streams->open(device, priority));
  });
  m.def("default_stream", [](int device) {
    return std::make_unique<StreamHandle>(port()->streams->default_of(device));
  });
  m.def("find_stream", [](c10::StreamId id, int device) -> std::unique_ptr<StreamHandle> {
    StreamPtr found = port()->streams->find(id, device);
    return found ? std::make_unique<StreamHandle>(std::move(found)) : nullptr;
  });
  m.def("foreign_stream", [](int64_t lane, int device) {
    auto made = c10::make_intrusive<StreamState>(port(), device, 0, lane);
    return std::make_unique<StreamHandle>(port()->streams->add(std::move(made), lane << 1));
  });
  m.def("current_stream", [](int device) {
    const StreamPtr stream = current_stream(device < 0 ? current_device() : device);
    return stream->wrapper ? stream_object(stream)
                           : py::cast(std::make_unique<StreamHandle>(stream));
  });
  m.def("set_stream", [](const StreamHandle& h) { set_stream(h.stream); });
  m.def("enter", [](const py::handle& owner, const StreamHandle& h) {
    const std::shared_ptr<Here>& mine = here();
    mine->enter(owner.ptr(), h.stream);
    return mine;
  });
  m.def("leave", [](const py::handle& owner) { return here()->leave(owner.ptr()); });
  m.def("current_device", [] { return int(current_device()); });
  m.def("set_device", &set_device);
  m.def("synchronize_device", &synchronize_device);
  m.def("ticket_of", [](uintptr_t event) -> py::object {
    if (event == 0) return py::none();
    auto* state = reinterpret_cast<EventState*>(event);
    std::lock_guard lock(state->mutex);
    return as_python(state->ticket);
  });
  m.def("elapsed_time", [](uintptr_t start, uintptr_t end) {
    return elapsed_time(reinterpret_cast<EventState*>(start), reinterpret_cast<EventState*>(end));
  });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("set_sync_debug_mode", [](int mode) { sync_debug_mode = mode; });
  m.def("get_sync_debug_mode", [] { return sync_debug_mode.load(); });
  m.def("check_sync", &check_sync);
}

py::object start_of(const at::Tensor& tensor) {
  const Buffer* buffer = is_ours(tensor) ? buffer_of(*tensor.storage().unsafeGetStorageImpl())
                                         : nullptr;
  if (buffer == nullptr) return py::none();
  return py::cast(BufferPtr::reclaim_copy(const_cast<Buffer*>(buffer)));
}

} // namespace

void register_operators();

} // namespace neuron

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace neuron;
  namespace py = pybind11;
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (python_error& error) {
      error.restore();
    } catch (const TimedOut& error) {
      PyErr_SetString(PyExc_TimeoutError, error.what());
    } catch (const c10::OutOfMemoryError& error) {
      PyErr_SetString(torch_type("OutOfMemoryError"), error.what_without_backtrace());
    } catch (const c10::ValueError& error) {
      PyErr_SetString(PyExc_ValueError, error.what_without_backtrace());
    } catch (const c10::Error& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    }
  });
  bind_values(m);
  bind_commands(m);
  bind_ports(m);
  bind_streams(m);
  m.def("bind", [](py::object start, py::object ticket, py::object raise_first,
                   py::object say, py::object cancelled, std::string forked) {
    auto& hooks = neuron::callbacks();
    hooks.start = start.release().ptr();
    hooks.ticket = ticket.release().ptr();
    hooks.raise_first = raise_first.release().ptr();
    hooks.say_on_host = say.release().ptr();
    hooks.cancelled = cancelled.release().ptr();
    hooks.forked = std::move(forked);
  });
  m.def("set_port", [](const std::optional<PortPtr>& port) {
    neuron::set_port(port.value_or(PortPtr()));
  });
  m.def("after_fork_in_child", [] { in_child = true; });
  m.def("buffer_of", &start_of);
  m.def("counts", [](int device) { return counts(ledger_of(device)); });
  m.def("reset_counts", [](int device, bool peak, bool accumulated) {
    Ledger& ledger = ledger_of(device);
    for (Count* count : {&ledger.number, &ledger.bytes}) {
      if (peak) count->peak = count->current.load();
      if (accumulated) count->allocated = count->freed = 0;
    }
  });
  m.def("host_operators", &host_operators);
  m.def("tidy", [] { tidy(); });
  register_operators();
}
