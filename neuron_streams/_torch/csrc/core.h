// What the files of the extension share: tickets, failures, buffers, commands and ports.
//
//   core.h      tickets, failures, buffers, commands, the port
//   buffer.cpp  device and pinned memory, what it counts, the allocators
//   command.cpp how a command runs, fails, and settles what it was to write
//   native.cpp  the port over the native worker (../../_runtime/worker)
//   foreign.cpp the port over a runtime written in Python
//   stream.h/.cpp   a stream's lane, what a thread has as current, events
//   engine.cpp  autograd's threads
//   exit.cpp    the end of the process, the GIL, waits after the main thread
//   guard.cpp   torch's device guard and hooks over those
//   random.cpp  the device's generator
//   view.h/.cpp windows on buffers, and the operators that only make another window
//   shape.cpp   metadata of results, before they are computed
//   operator.cpp    any operator as a command
//   staging.h/.cpp  tensors of a device whose memory the host does not reach, for the host to work on
//   copy.cpp    copies between the host and devices
//   attention.cpp   which path attention takes
//   recurrent.cpp   recurrent layers, as the CPU makes them
//   autocast.cpp    the cast lists
//   execute.cpp executables
//   collective.h/.cpp  commands in which other processes take part
//   python.cpp  what Python sees of all this
#pragma once

#include <array>
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

typedef struct _object PyObject;

namespace neuron {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// The value-th command of a lane, counted from 1. Lane 0 is no lane.
struct Ticket {
  int64_t lane = 0;
  int64_t value = 0;
};

enum class Kind : int { Marker, Pledge, Sleep, Copy, Execute, Operator, Collective };
enum class Unit : int { Compute, TensorOp, Collectives, Peers };

// The first cause of a command that did not run to its end; shared by all that it poisoned.
struct Failure : c10::intrusive_ptr_target {
  Failure(std::exception_ptr error, Ticket ticket, std::string what)
      : error(std::move(error)), ticket(ticket), what(std::move(what)) {}
  ~Failure() override;

  const std::exception_ptr error;
  const Ticket ticket;
  const std::string what;
  PyObject* exception = nullptr; // `error` as Python raises it, made at the first use (GIL)
  PyObject* traceback = nullptr;
};
using FailurePtr = c10::intrusive_ptr<Failure>;

// A lock for a few words. Nothing is called while it is held.
class Spin {
 public:
  void lock() {
    while (flag_.test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock() { flag_.clear(std::memory_order_release); }

 private:
  std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
};

// One figure over time. Thread-safe; the peak may lag for an instant.
struct Count {
  std::atomic<int64_t> current{0}, peak{0}, allocated{0}, freed{0};
  void add(int64_t amount);
  void remove(int64_t amount);
  std::array<int64_t, 4> values() const { return {current, peak, allocated, freed}; }
};

// What was allocated of one memory, and how much of it there may be.
struct Ledger {
  Count number, bytes;
  std::atomic<int64_t> capacity{INT64_MAX};
  std::atomic<int64_t> retries{0}, refusals{0};
};

// Segments, and bytes, that a caching allocator has of a device, as a Count has them.
struct Reserved {
  std::array<int64_t, 4> number, bytes;
};

struct Port;
using PortPtr = c10::intrusive_ptr<Port>;

// Memory of a device, or pinned memory of the host (device -1). A storage's context is a reference
// to one, each command that names one holds another.
//
// `writer` is the ticket of the last command submitted to write it; `failure` poisons it.
class Buffer : public c10::intrusive_ptr_target {
 public:
  Buffer(PortPtr port, c10::DeviceIndex device, size_t nbytes);
  // Over memory that another library made, and lets go of by its own pointer; not counted.
  Buffer(PortPtr port, c10::DeviceIndex device, size_t nbytes, c10::DataPtr owner);
  ~Buffer() override;

  void* data() const { return data_; }
  bool reachable() const { return data_ != nullptr || nbytes_ == 0; } // by the host, directly
  size_t nbytes() const { return nbytes_; }
  c10::DeviceIndex device() const { return device_; }
  const PortPtr& port() const { return port_; }

  Ticket writer() const;
  void set_writer(Ticket);
  // Whether a command was ever submitted that names it: until then the host may write it.
  std::atomic<bool> named{false};
  // Whether DLPack has made other buffers over this memory, whose writers this one does not know.
  std::atomic<bool> shared{false};

  bool poisoned() const { return poisoned_.load(std::memory_order_acquire); }
  FailurePtr failure() const;
  void set_failure(FailurePtr);

  PyObject* peer = nullptr; // what a runtime written in Python keeps with it

 private:
  PortPtr port_;
  c10::DataPtr owner_;
  void* data_ = nullptr;
  size_t nbytes_;
  c10::DeviceIndex device_;
  mutable Spin lock_;
  Ticket writer_;
  FailurePtr failure_;
  std::atomic<bool> poisoned_{false};
};
using BufferPtr = c10::intrusive_ptr<Buffer>;

// Work of one stream, as plain data: what it reads, what it writes, and how it runs.
//
// `outputs` are fresh buffers; `mutated` are written in place, `overwrites` says whether whole.
// On failure outputs are poisoned; mutated ones too where `poisons_mutated`.
struct Command : c10::intrusive_ptr_target {
  Command(Kind kind, Unit unit, const char* name) : kind(kind), unit(unit), name(name) {}

  // Runs to the end on the calling thread, in inference mode; throws what fails.
  virtual void run() {}

  FailurePtr blame() const; // of the first poisoned buffer that it reads
  void settle(const FailurePtr&); // after it ran (null) or failed; only the first call counts
  // Blames, runs and settles as a ticket; returns why it did not run to its end.
  FailurePtr attempt(Ticket);

  const Kind kind;
  const Unit unit;
  const char* name;
  bool quick = false; // cheaper to run in place than to wake a thread for
  bool overwrites = false;
  bool poisons_mutated = false;
  double* stamp = nullptr; // of a marker: the moment of its completion
  double seconds = 0; // of a sleep
  std::vector<BufferPtr> reads, outputs, mutated;

 private:
  std::atomic<bool> settled_{false};
};
using CommandPtr = c10::intrusive_ptr<Command>;

// A marker with a moment.
struct Marker : Command {
  explicit Marker(bool timed, const char* name = "marker");
  double moment; // seconds on the runtime's clock, NaN while pending
};

// A name that lives as long as the process; the same pointer for the same text.
const char* intern(const std::string& text);

constexpr int64_t kFull = -1; // what Port::submit returns where a device has no room
constexpr int64_t kForgotten = INT64_MAX; // a closed lane has completed whatever it was given

// An asynchronous NEFF runtime, as the extension sees it; see _runtime/port.py for the laws.
struct Port : c10::intrusive_ptr_target {
  explicit Port(int devices);
  ~Port() override;

  virtual int64_t open_lane(int device, int64_t priority, bool host) = 0;
  virtual void close_lane(int64_t lane) = 0;
  virtual int64_t submit(int64_t lane, const CommandPtr&, const std::vector<Ticket>& after) = 0;
  virtual void wait_for_room(int64_t lane) = 0;
  virtual int64_t submitted(int64_t lane) = 0;
  virtual int64_t completed(int64_t lane) = 0;
  virtual void wait(Ticket, double timeout) = 0; // negative: for ever; throws where it ends first
  virtual void drain() = 0; // runs what can run, and waits for it
  virtual std::vector<int64_t> lanes(int device) = 0;
  virtual std::vector<FailurePtr> failures(Ticket, int64_t since) = 0;
  virtual void add_failure(Ticket, FailurePtr) = 0;
  // Memory of a device; null where the host cannot reach it: commands can. `peer` of the buffer may
  // keep what the runtime needs to free it.
  virtual void* allocate(Buffer&, size_t nbytes);
  virtual void release(Buffer&, void* data);
  // What is held for the next allocation counts as reserved; nothing is where this is empty, so that
  // what is reserved is what is allocated.
  virtual std::optional<Reserved> reserved(int device);
  virtual void reset_reserved(int device, bool peak, bool accumulated);
  virtual void empty_cache(); // gives what is held and not in use back
  virtual std::optional<std::pair<int64_t, int64_t>> memory_info(int device); // free, total bytes

  bool done(Ticket ticket) { return completed(ticket.lane) >= ticket.value; }

  // Failures of a device that `synchronize` of it raised, up to a value of each lane.
  std::vector<FailurePtr> new_failures(int device, const std::vector<Ticket>& newest);
  void close_streams(); // they hold the port, and the port them

  const int devices;
  std::vector<std::unique_ptr<Ledger>> ledgers;
  const std::unique_ptr<class Streams> streams;
  bool implicit_waits = true;
  bool reaches_memory = true; // whether the host does, directly: what operators on the CPU need
  bool host_operators = false; // where it does not, they may run on copies
  bool fills_unfinished = false; // outputs hold NaN or -1 until their command has run
  PyObject* watch = nullptr; // called around submissions where these are watched, see python.cpp

 private:
  std::mutex mutex_;
  std::vector<std::unordered_map<int64_t, int64_t>> raised_;
};

// The port of this process, started at first use. Throws in the child of a fork.
PortPtr port();
void set_port(PortPtr);
// The child of a fork has none of the threads, and any lock may be held there by one that it has
// not: whatever takes a lock asks first.
bool forked();
void check_fork(); // throws in such a child

// A device buffer; raises torch.OutOfMemoryError with figures.
BufferPtr allocate(const PortPtr&, c10::DeviceIndex device, size_t nbytes);
c10::Storage storage_of(BufferPtr);
// The buffer of a storage of ours, null for any other; of a tensor, checked to have one.
Buffer* buffer_of(const c10::StorageImpl&);
// The same, of a storage that another library made over memory of the device, as DLPack and pickle
// do. What the device has queued may concern that memory, so it is waited for.
Buffer* adopt(c10::StorageImpl&);
// Waits for all that the lanes of a device have by now; returns the last ticket of each.
std::vector<Ticket> wait_for_device(Port&, int device);
// The pinned memory that an address of the host lies in, or null. The caller keeps it alive.
BufferPtr pinned_at(const void* address);
c10::Allocator* pinned_allocator();
Ledger& pinned_ledger();

// Throws the first of the failures, if any, as Python raises it: with its first traceback and the
// place of submission.
void raise_any(const std::vector<FailurePtr>&);

// Whether the calling thread runs commands; a wait there would be one for itself.
extern thread_local bool on_worker;

// Python threads let go of the GIL while this lives, any other does nothing.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;

 private:
  void* state_ = nullptr;
};
// Holds a mutex. A holder of the GIL lets go of it while it waits for the mutex, so that a thread
// with the mutex may take the GIL.
class Held {
 public:
  explicit Held(std::recursive_mutex&);
  ~Held();
  Held(const Held&) = delete;

 private:
  std::recursive_mutex& mutex_;
};
// Says in the log, once for each name, that an operator runs on the host.
void say_on_host(const char* name);
// Lets go of a reference on a thread that may not take the GIL; Python's main thread does it later.
void forget(PyObject*);
// Notes that the calling thread uses the device.
void note_user();
// Does not return once the process ends, but on the main thread; see exit.cpp.
void stop_if_ending();
bool exit_has_begun();
// Lets Python's signal handlers run, on its main thread, and throws what they raise.
void check_signals();

// Whether the interpreter only waits for threads, or is past that. False on a thread that Python
// does not know.
bool main_thread_has_ended();
// A wait of the calling thread from then on; see _exit.py. `stuck` may outlive it for an instant.
class LastWait {
 public:
  explicit LastWait(std::function<bool()> stuck);
  ~LastWait();
  LastWait(const LastWait&) = delete;
  bool in_vain();

 private:
  PyObject* last_;
};

} // namespace neuron
