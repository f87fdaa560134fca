// What Python sees of the extension.
#include "python.h"
#include "collective.h"
#include "copy.h"
#include "execute.h"
#include "foreign.h"
#include "native.h"
#include "random.h"
#include "stream.h"

#include <cmath>
#include <sstream>

#include <ATen/core/CachingHostAllocator.h>

namespace neuron {

using namespace bind;

void register_operators();
std::vector<std::pair<std::string, int64_t>> host_operators();

namespace {

// What the extension calls of Python's: set once, by `bind`. Never freed.
struct Callbacks {
  PyObject *start = nullptr, *ticket = nullptr, *raise_first = nullptr, *say_on_host = nullptr,
           *cancelled = nullptr, *exit = nullptr;
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

std::exception_ptr raised(PyObject* error) {
  return std::make_exception_ptr(
      Raised{std::shared_ptr<PyObject>(Py_NewRef(error), [](PyObject* o) { forget(o); })});
}

} // namespace

bool python_is_there() { return Py_IsInitialized() && !_Py_IsFinalizing(); }

void forget(PyObject* object) {
  if (object == nullptr || in_child) return;
  std::unique_lock lock(forgotten().mutex);
  const bool first = forgotten().objects.empty();
  forgotten().objects.push_back(object);
  lock.unlock();
  if (!first || !python_is_there()) return;
  auto later = [](void*) {
    tidy();
    return 0;
  };
  Py_AddPendingCall(later, nullptr);
}

bool forked() { return in_child; }

void check_fork() { TORCH_CHECK(!in_child, callbacks().forked); }

PortPtr port() {
  check_fork();
  Current& now = current();
  {
    std::lock_guard lock(now.lock);
    if (now.port) return now.port;
  }
  {
    WithGil gil;
    call(callbacks().start);
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

// -- failures -----------------------------------------------------------------------------------

Failure::~Failure() {
  forget(exception);
  forget(traceback);
}

namespace {

Ref torch_type(const char* name) {
  Ref found(PyImport_ImportModule("torch"));
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '.');)
    found = Ref(PyObject_GetAttrString(found.get(), part.c_str()));
  return found;
}

// The exception, and in torch's way the class, that stands for what is thrown.
Ref exception_from(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Raised& raised) {
    return Ref::borrow(raised.error.get());
  } catch (const Cancelled& e) {
    return call(callbacks().cancelled, e.what());
  } catch (const TimedOut& e) {
    return call(PyExc_TimeoutError, e.what());
  } catch (const c10::OutOfMemoryError& e) {
    return call(torch_type("OutOfMemoryError").get(), e.what_without_backtrace());
  } catch (const c10::IndexError& e) {
    return call(PyExc_IndexError, e.what_without_backtrace());
  } catch (const c10::ValueError& e) {
    return call(PyExc_ValueError, e.what_without_backtrace());
  } catch (const c10::TypeError& e) {
    return call(PyExc_TypeError, e.what_without_backtrace());
  } catch (const c10::NotImplementedError& e) {
    return call(PyExc_NotImplementedError, e.what_without_backtrace());
  } catch (const c10::LinAlgError& e) {
    return call(torch_type("_C._LinAlgError").get(), e.what_without_backtrace());
  } catch (const c10::Error& e) {
    return call(PyExc_RuntimeError, e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return call(PyExc_MemoryError, "the host has no memory left");
  } catch (const std::exception& e) {
    return call(PyExc_RuntimeError, e.what());
  }
}

// The exception that Python has set, with its traceback.
Ref taken_error() {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return Ref(value);
}

} // namespace

void bind::set_error() noexcept {
  try {
    throw;
  } catch (python_error& error) {
    error.restore();
  } catch (...) {
    try {
      const Ref made = exception_from(std::current_exception());
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.get())), made.get());
    } catch (python_error& error) {
      error.restore();
    }
  }
}

PyObject* bind::to_python(Ticket ticket) {
  return call(callbacks().ticket, ticket.lane, ticket.value).release();
}

PyObject* exception_of(Failure& failure) {
  if (failure.exception == nullptr) {
    Ref made;
    try {
      made = exception_from(failure.error);
    } catch (python_error& error) {
      error.restore();
      made = taken_error();
    }
    failure.traceback = PyException_GetTraceback(made.get());
    failure.exception = made.release();
  }
  return failure.exception;
}

void raise_any(const std::vector<FailurePtr>& failures) {
  if (failures.empty()) return;
  WithGil gil;
  tidy();
  call(callbacks().raise_first, failures);
}

void say_on_host(const char* name) {
  if (!python_is_there()) return;
  WithGil gil;
  call(callbacks().say_on_host, name);
}

std::vector<at::Tensor> run_in_python(
    PyObject* handle, const std::vector<at::Tensor>& inputs, const at::Generator& numbers) {
  WithGil gil;
  try {
    const Ref made = numbers.defined()
        ? call_method(handle, "run", inputs, THPGenerator_Wrap(numbers))
        : call_method(handle, "run", inputs);
    return From<std::vector<at::Tensor>>::load(made.get());
  } catch (python_error& error) {
    error.restore();
    std::rethrow_exception(raised(taken_error().get()));
  }
}

Ref bind::call_with(PyObject* function, const Ref& arguments, PyObject* keywords) {
  return Ref(without_unwinding(
      [&] { return PyObject_Call(function, arguments.get(), keywords); }));
}

namespace {

unsigned long main_thread = 0;

} // namespace

void check_signals() {
  if (!python_is_there() || PyThread_get_thread_ident() != main_thread) return;
  WithGil gil;
  if (PyErr_CheckSignals() != 0) Ref::throw_set();
}

PyObject* exit_module() { return callbacks().exit; }

// -- the objects of Python ----------------------------------------------------------------------

namespace {

// What a NeuronStream holds. The stream may be forgotten when the last of these is gone.
class StreamHandle {
 public:
  explicit StreamHandle(StreamPtr stream) : stream_(std::move(stream)) { stream_->handles++; }
  StreamHandle(StreamHandle&& other) noexcept : stream_(std::move(other.stream_)) {}
  ~StreamHandle() {
    if (stream_ && --stream_->handles == 0 && !in_child) stream_->port->streams->retire(stream_);
  }
  const StreamPtr& operator*() const { return stream_; }
  StreamState* operator->() const { return stream_.get(); }

 private:
  StreamPtr stream_;
};

PyObject* handle(StreamPtr stream) { return wrap(StreamHandle(std::move(stream))); }

PyObject* noted_ticket(Ticket ticket) {
  return ticket.lane ? to_python(ticket) : Py_NewRef(Py_None);
}

PyObject* numbers(c10::IntArrayRef values) {
  const Ref list(to_python(values.vec()));
  return PyList_AsTuple(list.get());
}

PyObject* dtype_object(at::ScalarType dtype) {
  return torch_type(std::string(c10::getDtypeNames(dtype).first).c_str()).release();
}

void add_values(PyObject* m) {
  add_type<std::function<bool()>>(
      m, "Question",
      {method<[](std::function<bool()>& question) {
        WithoutGil free;
        return question();
      }>("ask")},
      {});
  add_type<FailurePtr>(
      m, "FailureType", {},
      {property<[](FailurePtr& f) { return Py_NewRef(exception_of(*f)); }>("error"),
       property<[](FailurePtr& f) { return f->ticket; }>("ticket"),
       property<[](FailurePtr& f) { return f->what; }>("what"),
       property<[](FailurePtr& f) {
         exception_of(*f);
         return Py_NewRef(f->traceback ? f->traceback : Py_None);
       }>("traceback")});
  add_type<BufferPtr>(
      m, "Buffer", {},
      {property<[](BufferPtr& b) { return int(b->device()); }>("device"),
       property<[](BufferPtr& b) { return b->nbytes(); }>("nbytes"),
       property<[](BufferPtr& b) { return PyLong_FromVoidPtr(b->data()); }>("address"),
       property<[](BufferPtr& b) { return Py_NewRef(b->peer ? b->peer : Py_None); }>("peer"),
       property<[](BufferPtr& b) { return noted_ticket(b->writer()); }>("writer"),
       property<[](BufferPtr& b) { return b->named.load(); }>("named"),
       property<[](BufferPtr& b) { return b->failure(); }>("failure")});
  add_type<Window>(
      m, "ViewType",
      {method<[](Window& w) { return w.on_host(); }>("on_host")},
      {property<[](Window& w) { return w.buffer; }>("buffer"),
       property<[](Window& w) { return dtype_object(w.dtype); }>("dtype"),
       property<[](Window& w) { return numbers(w.geometry.sizes_arrayref()); }>("size"),
       property<[](Window& w) { return numbers(w.geometry.strides_arrayref()); }>("stride"),
       property<[](Window& w) { return w.offset; }>("offset"),
       property<[](Window& w) { return w.nbytes(); }>("nbytes"),
       property<[](Window& w) { return w.whole(); }>("whole"),
       property<[](Window& w) { return w.conj || w.neg; }>("lazy")});
}

// A view of a device tensor, or of a buffer: dtype, size, stride, offset in elements.
Window view(
    PyObject* of, std::optional<at::ScalarType> dtype, std::optional<std::vector<int64_t>> size,
    std::optional<std::vector<int64_t>> stride, std::optional<int64_t> offset) {
  if (!dtype.has_value()) return Window(From<at::Tensor>::load(of));
  Window made;
  made.buffer = From<BufferPtr>::load(of);
  made.dtype = *dtype;
  made.geometry.set_sizes(size.value());
  made.geometry.set_strides(stride.value());
  made.offset = offset.value_or(0);
  return made;
}

Form form_of(const Window& window) {
  return {
      window.dtype, window.geometry.sizes_arrayref().vec(), window.geometry.strides_arrayref().vec(),
      window.nbytes()};
}

std::vector<Form> forms_of(PyObject* list) {
  std::vector<Form> made;
  for (PyObject* item : From<std::vector<PyObject*>>::load(list)) {
    Form form;
    form.dtype = From<at::ScalarType>::load(PyTuple_GET_ITEM(item, 0));
    form.size = From<std::vector<int64_t>>::load(PyTuple_GET_ITEM(item, 1));
    form.stride = From<std::vector<int64_t>>::load(PyTuple_GET_ITEM(item, 2));
    form.nbytes = c10::elementSize(form.dtype);
    for (const int64_t extent : form.size) form.nbytes *= static_cast<size_t>(extent);
    made.push_back(std::move(form));
  }
  return made;
}

using LoadedPtr = std::shared_ptr<const Loaded>;

LoadedPtr load(
    const std::string& name, PyObject* inputs, PyObject* outputs, std::vector<size_t> mutated,
    uintptr_t program, PyObject* handle, std::optional<bool> draws) {
  auto made = std::make_shared<Loaded>();
  made->draws = draws.value_or(false);
  made->name = intern(name);
  made->inputs = forms_of(inputs);
  made->outputs = forms_of(outputs);
  made->mutated = std::move(mutated);
  made->program = reinterpret_cast<const void*>(program);
  made->handle = Py_NewRef(handle);
  return made;
}

CommandPtr execute_command(
    PyObject* handle, const std::vector<Window>& inputs, const std::vector<Window>& outputs,
    std::optional<std::vector<size_t>> mutated, std::optional<int> unit,
    std::optional<std::string> name) {
  auto loaded = std::make_shared<Loaded>();
  loaded->name = intern(name.value_or("execute"));
  for (const Window& w : inputs) loaded->inputs.push_back(form_of(w));
  for (const Window& w : outputs) loaded->outputs.push_back(form_of(w));
  loaded->mutated = mutated.value_or(std::vector<size_t>());
  loaded->handle = Py_NewRef(handle);
  auto made = c10::make_intrusive<Execute>(loaded, static_cast<Unit>(unit.value_or(0)));
  for (const Window& w : inputs) {
    made->inputs.push_back({w.buffer, size_t(w.offset) * c10::elementSize(w.dtype)});
    made->reads.push_back(w.buffer);
  }
  for (const Window& w : outputs) made->outputs.push_back(w.buffer);
  for (const size_t i : loaded->mutated) made->mutated.push_back(inputs.at(i).buffer);
  return made;
}

Copy::End end_of(PyObject* object) {
  if (PyObject_TypeCheck(object, type_of<Window>)) return {From<Window>::load(object), {}, {}};
  const at::Tensor tensor = From<at::Tensor>::load(object);
  return is_ours(tensor) ? Copy::End::on_device(tensor) : Copy::End::on_host(tensor);
}

PyObject* end_object(const Copy::End& end) {
  return end.host.defined() ? to_python(end.host) : wrap(Window(end.window));
}

// The attribute of one kind of command.
template <class T>
T& as(const CommandPtr& command, const char* attribute) {
  auto* found = dynamic_cast<T*>(command.get());
  if (found != nullptr) return *found;
  PyErr_Format(PyExc_AttributeError, "%s has no %s", command->name, attribute);
  Ref::throw_set();
}

std::optional<double> moment_of(CommandPtr& c) {
  if (c->stamp == nullptr || std::isnan(*c->stamp)) return {};
  return *c->stamp;
}

PyObject* inputs_of(CommandPtr& c) {
  Ref list(PyList_New(0));
  for (const Execute::Input& input : as<Execute>(c, "inputs").inputs)
    PyList_Append(list.get(), Ref(tuple(input.buffer, input.offset)).get());
  return list.release();
}

void add_commands(PyObject* m) {
  add_type<CommandPtr>(
      m, "Command",
      {method<[](CommandPtr& c) { return c->blame(); }>("blame"),
       method<[](CommandPtr& c, std::optional<FailurePtr> failure) {
         c->settle(failure.value_or(FailurePtr()));
       }>("settle"),
       method<[](CommandPtr& c, Ticket ticket) {
         WithoutGil free;
         return c->attempt(ticket);
       }>("attempt")},
      {property<[](CommandPtr& c) { return int(c->kind); }>("kind"),
       property<[](CommandPtr& c) { return int(c->unit); }>("unit"),
       property<
           [](CommandPtr& c) { return c->name; },
           [](CommandPtr& c, std::string name) { c->name = intern(name); }>("name"),
       property<[](CommandPtr& c) { return c->reads; }>("reads"),
       property<[](CommandPtr& c) { return c->outputs; }>("outputs"),
       property<[](CommandPtr& c) { return c->mutated; }>("mutated"),
       property<[](CommandPtr& c) { return c->quick; }>("quick"),
       property<[](CommandPtr& c) { return c->seconds; }>("seconds"),
       property<[](CommandPtr& c) { return c->stamp != nullptr; }>("timed"),
       property<
           moment_of,
           [](CommandPtr& c, double moment) {
             if (c->stamp != nullptr) *c->stamp = moment;
           }>("at"),
       property<[](CommandPtr& c) { return end_object(as<Copy>(c, "source").source); }>("source"),
       property<[](CommandPtr& c) { return end_object(as<Copy>(c, "target").target); }>("target"),
       property<[](CommandPtr& c) {
         return Py_NewRef(as<Execute>(c, "handle").loaded->handle);
       }>("handle"),
       property<inputs_of>("inputs")});
  add_type<LoadedPtr>(
      m, "LoadedType",
      {method<[](LoadedPtr& loaded, const std::vector<at::Tensor>& tensors) {
        return execute(loaded, tensors);
      }>("call")},
      {});
}

// -- ports --------------------------------------------------------------------------------------

NativePort& native(PortPtr& port) {
  auto* found = dynamic_cast<NativePort*>(port.get());
  TORCH_CHECK_TYPE(found != nullptr, "this is the port of a runtime written in Python");
  return *found;
}

PyObject* submit(
    PortPtr& port, int64_t lane, CommandPtr& command, std::optional<std::vector<Ticket>> after,
    std::optional<bool> wait) {
  int64_t value;
  const std::vector<Ticket> tickets = after.value_or(std::vector<Ticket>());
  while ((value = port->submit(lane, command, tickets)) == kFull) {
    if (!wait.value_or(true)) return Py_NewRef(Py_None);
    port->wait_for_room(lane);
  }
  return to_python(Ticket{lane, value});
}

PyObject* intervals(PortPtr& port) {
  Ref list(PyList_New(0));
  for (const Interval& i : native(port).intervals())
    PyList_Append(list.get(), Ref(tuple(i.device, i.unit, i.began, i.ended, i.name)).get());
  return list.release();
}

PyObject* failures(PortPtr& port, Ticket ticket, std::optional<int64_t> since) {
  tidy();
  const Ref list(to_python(port->failures(ticket, since.value_or(0))));
  return PyList_AsTuple(list.get());
}

void add_ports(PyObject* m) {
  add_type<PortPtr>(
      m, "Port",
      {method<[](PortPtr& p) { return p->devices; }>("device_count"),
       method<[](PortPtr& p) { p->close_streams(); }>("close_streams"),
       method<[](PortPtr& p, PyObject* watch) { p->watch = Py_NewRef(watch); }>("watch"),
       method<[](PortPtr& p, int device, size_t nbytes) {
         return allocate(p, static_cast<c10::DeviceIndex>(device), nbytes);
       }>("allocate"),
       method<[](PortPtr& p, int device) { return p->ledgers.at(device)->capacity.load(); }>(
           "capacity"),
       method<[](PortPtr& p, int device, int64_t nbytes) {
         p->ledgers.at(device)->capacity = nbytes;
       }>("set_capacity"),
       method<
           [](PortPtr& p, int device, std::optional<int64_t> priority, std::optional<bool> host) {
             return p->open_lane(device, priority.value_or(0), host.value_or(false));
           },
           true, Names("device priority host")>("open_lane"),
       method<[](PortPtr& p, int64_t lane) { p->close_lane(lane); }>("close_lane"),
       method<submit, true, Names("lane command after wait")>("submit"),
       method<[](PortPtr& p, int64_t lane) { p->wait_for_room(lane); }>("wait_for_room"),
       method<
           [](PortPtr& p, Ticket ticket, std::optional<PyObject*> error) {
             native(p).complete(ticket, error.has_value() ? raised(*error) : nullptr);
           },
           true, Names("ticket error")>("complete"),
       method<[](PortPtr& p, int64_t lane) { return p->submitted(lane); }>("submitted"),
       method<[](PortPtr& p, int64_t lane) { return p->completed(lane); }>("completed"),
       method<[](PortPtr& p, Ticket ticket) { return native(p).completed_at(ticket); }>(
           "completed_at"),
       method<[](PortPtr& p, int device) { return p->lanes(device); }>("lanes"),
       method<
           [](PortPtr& p, Ticket ticket, std::optional<double> timeout) {
             p->wait(ticket, timeout.has_value() ? std::max(*timeout, 0.0) : -1);
           },
           true, Names("ticket timeout")>("wait"),
       method<failures, true, Names("ticket since")>("failures"),
       method<[](PortPtr& p) { p->drain(); }>("drain"),
       method<intervals>("busy_intervals"),
       method<
           [](PortPtr& p, std::optional<double> timeout) { native(p).close(timeout.value_or(-1)); },
           true, Names("timeout")>("close")},
      {property<
           [](PortPtr& p) { return p->implicit_waits; },
           [](PortPtr& p, bool on) { p->implicit_waits = on; }>("implicit_waits"),
       property<
           [](PortPtr& p) { return p->fills_unfinished; },
           [](PortPtr& p, bool on) { p->fills_unfinished = on; }>("fills_unfinished"),
       property<
           [](PortPtr& p) { return p->host_operators; },
           [](PortPtr& p, bool on) { p->host_operators = on; }>("host_operators"),
       property<[](PortPtr& p) { return native(p).in_flight.load(); }>("in_flight")});
}

Ledger& ledger_of(int device) {
  return device < 0 ? pinned_ledger() : *port()->ledgers.at(static_cast<size_t>(device));
}

PyObject* metrics_of(const std::array<int64_t, 4>& c) {
  return Py_BuildValue(
      "{s:L,s:L,s:L,s:L}", "current", (long long)c[0], "peak", (long long)c[1], "allocated",
      (long long)c[2], "freed", (long long)c[3]);
}

PyObject* counts(int device) {
  const Ledger& ledger = ledger_of(device);
  Reserved reserved{ledger.number.values(), ledger.bytes.values()};
  if (device >= 0)
    if (const auto found = port()->reserved(device)) reserved = *found;
  return Py_BuildValue(
      "{s:N,s:N,s:N,s:N,s:L,s:L}", "number", metrics_of(ledger.number.values()), "bytes",
      metrics_of(ledger.bytes.values()), "segments", metrics_of(reserved.number), "reserved",
      metrics_of(reserved.bytes), "retries", (long long)ledger.retries, "refusals",
      (long long)ledger.refusals);
}

PyObject* memory_info(int device) {
  auto* memory = static_cast<c10::DeviceAllocator*>(c10::GetAllocator(kDevice));
  const auto [free, total] = memory->getMemoryInfo(static_cast<c10::DeviceIndex>(device));
  return Py_BuildValue("LL", (long long)free, (long long)total);
}

void reset_counts(int device, bool peak, bool accumulated) {
  if (device < 0) {
    at::HostAllocator* memory = at::getHostAllocator(kDevice);
    if (peak) memory->reset_peak_stats();
    if (accumulated) memory->reset_accumulated_stats();
    return;
  }
  const auto index = static_cast<c10::DeviceIndex>(device);
  auto* memory = static_cast<c10::DeviceAllocator*>(c10::GetAllocator(kDevice));
  if (peak) memory->resetPeakStats(index);
  if (accumulated) memory->resetAccumulatedStats(index);
}

// -- streams ------------------------------------------------------------------------------------

using HerePtr = std::shared_ptr<Here>;

PyObject* current_stream_object(int device) {
  const StreamPtr stream = current_stream(device < 0 ? current_device() : device);
  return stream->wrapper ? Py_NewRef(stream->wrapper) : handle(stream);
}

PyObject* find_stream(c10::StreamId id, int device) {
  StreamPtr found = port()->streams->find(id, device);
  return found ? handle(std::move(found)) : Py_NewRef(Py_None);
}

PyObject* foreign_stream(int64_t lane, int device) {
  auto made = c10::make_intrusive<StreamState>(port(), device, 0, lane);
  return handle(port()->streams->add(std::move(made), lane << 1));
}

PyObject* ticket_of(uintptr_t event) {
  if (event == 0) return Py_NewRef(Py_None);
  auto* state = reinterpret_cast<EventState*>(event);
  std::lock_guard lock(state->mutex);
  return to_python(state->ticket);
}

void add_streams(PyObject* m) {
  add_type<HerePtr>(
      m, "Here",
      {method<[](HerePtr& here, PyObject* owner) { return here->leave(owner); }>("leave")}, {});
  add_type<StreamHandle>(
      m, "StreamState",
      {method<[](StreamHandle& h, PyObject* wrapper) { h->wrapper = wrapper; }>("own"),
       method<[](StreamHandle& h, uintptr_t wrapper) {
         if (reinterpret_cast<uintptr_t>(h->wrapper) == wrapper) h->wrapper = nullptr;
       }>("disown"),
       method<[](StreamHandle& h, CommandPtr& command) { return h->submit(command); }>("submit"),
       method<[](StreamHandle& h) { return h->ticket(); }>("ticket"),
       method<[](StreamHandle& h, Ticket ticket) { h->wait(ticket); }>("wait"),
       method<[](StreamHandle& h) { return h->done(); }>("done"),
       method<[](StreamHandle& h, Ticket ticket) { return h->failures(ticket); }>("failures"),
       method<[](StreamHandle& a, StreamHandle& b) { return *a == *b; }>("same")},
      {property<[](StreamHandle& h) { return h->port; }>("port"),
       property<[](StreamHandle& h) { return h->device; }>("device"),
       property<[](StreamHandle& h) { return h->priority; }>("priority"),
       property<[](StreamHandle& h) { return h->lane; }>("lane"),
       property<[](StreamHandle& h) { return h->id; }>("id")});
}

PyObject* buffer_object(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return Py_NewRef(Py_None);
  Buffer* found = buffer_of(*tensor.storage().unsafeGetStorageImpl());
  return to_python(found ? BufferPtr::reclaim_copy(found) : BufferPtr());
}

void set_callbacks(
    PyObject* start, PyObject* ticket, PyObject* raise_first, PyObject* say_on_host,
    PyObject* cancelled, PyObject* exit, std::string forked) {
  Callbacks& all = callbacks();
  all.start = Py_NewRef(start);
  all.ticket = Py_NewRef(ticket);
  all.raise_first = Py_NewRef(raise_first);
  all.say_on_host = Py_NewRef(say_on_host);
  all.cancelled = Py_NewRef(cancelled);
  all.exit = Py_NewRef(exit);
  all.forked = std::move(forked);
  const Ref threading(PyImport_ImportModule("threading"));
  const Ref main = call_method(threading.get(), "main_thread");
  const Ref ident(PyObject_GetAttrString(main.get(), "ident"));
  main_thread = PyLong_AsUnsignedLong(ident.get());
}

CommandPtr simple(Kind kind, double seconds, int unit, const std::string& name) {
  auto made = c10::make_intrusive<Command>(kind, static_cast<Unit>(unit), intern(name));
  made->seconds = seconds;
  return made;
}

PyMethodDef functions[] = {
    function<set_callbacks>("bind"),
    function<[](std::optional<PortPtr> port) { set_port(port.value_or(PortPtr())); }>("set_port"),
    function<[] { in_child = true; }>("after_fork_in_child"),
    function<begin_exit>("begin_exit"),
    function<leave_at_once>("leave_at_once"),
    function<tidy>("tidy"),
    function<start_autograd_threads>("start_autograd_threads"),
    function<[](PyObject* error, Ticket ticket, std::string what) {
      return c10::make_intrusive<Failure>(raised(error), ticket, std::move(what));
    }>("Failure"),
    function<
        [](std::optional<bool> timed, std::optional<std::string> name) -> CommandPtr {
          return c10::make_intrusive<Marker>(
              timed.value_or(false), intern(name.value_or("marker")));
        },
        Names("timed name")>("Marker"),
    function<[](std::optional<std::string> name) {
      return simple(Kind::Pledge, 0, 0, name.value_or("pledge"));
    }, Names("name")>("Pledge"),
    function<[](double seconds, std::optional<int> unit, std::optional<std::string> name) {
      return simple(Kind::Sleep, seconds, unit.value_or(0), name.value_or("sleep"));
    }, Names("seconds unit name")>("Sleep"),
    function<
        [](PyObject* source, PyObject* target, std::optional<std::string> name) -> CommandPtr {
          return c10::make_intrusive<Copy>(
              end_of(source), end_of(target), intern(name.value_or("copy")));
        },
        Names("source target name")>("Copy"),
    function<
        execute_command, Names("handle inputs outputs mutated unit name")>(
        "Execute"),
    function<
        [](PyObject* of, std::optional<at::ScalarType> dtype,
            std::optional<std::vector<int64_t>> size, std::optional<std::vector<int64_t>> stride,
            std::optional<int64_t> offset) {
          return wrap(view(of, dtype, std::move(size), std::move(stride), offset));
        },
        Names("of dtype size stride offset")>("View"),
    function<load>("Loaded"),
    function<[](int devices) -> PortPtr { return c10::make_intrusive<NativePort>(devices); }>(
        "NativePort"),
    function<[](PyObject* runtime) -> PortPtr {
      return c10::make_intrusive<ForeignPort>(runtime);
    }>("ForeignPort"),
    function<[](int device, int64_t priority) {
      return handle(port()->streams->open(device, priority));
    }>("open_stream"),
    function<[](int device) { return handle(port()->streams->default_of(device)); }>(
        "default_stream"),
    function<find_stream>("find_stream"),
    function<foreign_stream>("foreign_stream"),
    function<current_stream_object>("current_stream"),
    function<[](StreamHandle& h) { set_stream(*h); }>("set_stream"),
    function<[](PyObject* owner, StreamHandle& h) {
      const HerePtr& mine = here();
      mine->enter(owner, *h);
      return mine;
    }>("enter"),
    function<[](PyObject* owner) { return here()->leave(owner); }>("leave"),
    function<[] { return int(current_device()); }>("current_device"),
    function<set_device>("set_device"),
    function<synchronize_device>("synchronize_device"),
    function<ticket_of>("ticket_of"),
    function<[](uintptr_t start, uintptr_t end) {
      return elapsed_time(
          reinterpret_cast<EventState*>(start), reinterpret_cast<EventState*>(end));
    }>("elapsed_time"),
    function<[](int device) { return THPGenerator_Wrap(default_generator(device)); }>(
        "default_generator"),
    function<[](int mode) { sync_debug_mode = mode; }>("set_sync_debug_mode"),
    function<[] { return sync_debug_mode.load(); }>("get_sync_debug_mode"),
    function<check_sync>("check_sync"),
    function<buffer_object>("buffer_of"),
    function<[](const at::Tensor& tensor) { Window(tensor).buffer->shared = true; }>("note_shared"),
    function<counts>("counts"),
    function<reset_counts>("reset_counts"),
    function<memory_info>("memory_info"),
    function<[] { port()->empty_cache(); }>("empty_cache"),
    function<[] {
      Ref list(PyList_New(0));
      for (const auto& [name, count] : host_operators())
        PyList_Append(list.get(), Ref(tuple(name, count)).get());
      return list.release();
    }>("host_operators"),
    function<[] { return PyLong_FromVoidPtr(const_cast<CollectiveDoor*>(&collective_door)); }>(
        "collective_door"),
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_neuron", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

} // namespace

void watch_submission(
    StreamState& stream, const CommandPtr& command, Ticket ticket,
    const std::vector<Ticket>& after) {
  WithGil gil;
  const Ref state(handle(StreamPtr::reclaim_copy(&stream)));
  const Ref taken(noted_ticket(ticket));
  call(stream.port->watch, Py_NewRef(state.get()), command, Py_NewRef(taken.get()), after);
}

} // namespace neuron

extern "C" NS_EXPORT PyObject* PyInit__neuron() {
  using namespace neuron;
  try {
    bind::Ref module(PyModule_Create(&definition));
    add_values(module.get());
    add_commands(module.get());
    add_ports(module.get());
    add_streams(module.get());
    register_operators();
    return module.release();
  } catch (...) {
    bind::set_error();
    return nullptr;
  }
}
