// A stream's lane, what a thread has as current, and events. See stream.cpp.
#pragma once

#include <unordered_map>

#include <c10/core/Stream.h>

#include "core.h"

namespace neuron {

class StreamState;
using StreamPtr = c10::intrusive_ptr<StreamState>;

// A lane, the waits that its next command takes along, and which failures were raised.
class StreamState : public c10::intrusive_ptr_target {
 public:
  // A lane of its own, unless another library opened one.
  StreamState(PortPtr, int device, int64_t priority, int64_t foreign_lane = 0);
  ~StreamState() override;

  // Submits a command behind all that the stream waits for; the door to the runtime.
  Ticket submit(const CommandPtr&);
  // The ticket of the last command; waits that are only remembered become a command first.
  Ticket ticket();
  // Orders what is submitted from now on behind a ticket.
  void wait(Ticket);
  bool done();
  void synchronize(); // waits, and raises what failed since the last time
  // The failures of commands behind `since` and up to a completed ticket.
  std::vector<FailurePtr> see(Ticket, int64_t since);
  // Those that the stream was not asked for before.
  std::vector<FailurePtr> failures(Ticket);

  c10::Stream as_torch() const {
    const c10::Device on(kDevice, static_cast<c10::DeviceIndex>(device));
    return c10::Stream(c10::Stream::UNSAFE, on, id);
  }

  const PortPtr port;
  const int device;
  const int64_t priority;
  const bool foreign;
  int64_t lane;
  c10::StreamId id = 0;
  std::atomic<int64_t> seen{0}; // failures up to this value were raised, by whichever call
  std::atomic<int> handles{0}; // objects of Python over it
  std::atomic<bool> retired{false}; // waits to be let go of
  PyObject* wrapper = nullptr; // the newest of them, borrowed (GIL)

 private:
  // Value kFull where the device has no room. `after` takes what the command waits for.
  Ticket try_submit(const CommandPtr&, std::vector<Ticket>& after);
  Ticket append(const CommandPtr&, const std::vector<Ticket>& after, size_t waits);

  std::recursive_mutex lock_; // a destructor inside a submission may submit
  std::vector<Ticket> waits_;
  std::atomic<int64_t> last_{0};
  std::atomic<bool> waiting_{false}; // whether there are remembered waits
  int64_t raised_ = 0;
};

// The streams of one port: default ones, those of torch.Stream, and all that are alive.
class Streams {
 public:
  explicit Streams(Port& port);
  StreamPtr add(StreamPtr, c10::StreamId); // gives it its id
  StreamPtr open(int device, int64_t priority); // a new one
  StreamPtr pooled(int device, int64_t priority); // one of 32, in turn, as torch.cuda hands out
  StreamPtr default_of(int device);
  StreamPtr find(c10::StreamId, int device); // null if there is none
  // The stream of an id that was given out; its lane may have been closed and is opened again.
  StreamPtr of(c10::StreamId, int device);
  void retire(const StreamPtr&); // no object of Python is left
  std::vector<StreamPtr> living(int device);
  void clear();

 private:
  struct Pool {
    std::vector<StreamPtr> streams;
    size_t next = 0;
  };
  void sweep();

  Port& port_;
  std::mutex mutex_;
  std::vector<StreamPtr> defaults_;
  std::unordered_map<c10::StreamId, StreamPtr> streams_;
  std::unordered_map<int64_t, Pool> pools_; // by device and priority
  std::vector<StreamPtr> retired_;
};

// What belongs to one thread, or of another one where a context of it is left elsewhere.
struct Here {
  struct Entry {
    const void* owner;
    int device, index;
    StreamPtr before;
  };
  PortPtr port;
  int device = 0;
  std::vector<StreamPtr> streams; // by device; null is the default stream
  std::vector<Entry> entered;

  StreamPtr current(int index);
  void enter(const void* owner, const StreamPtr&);
  bool leave(const void* owner); // false if it was not entered here
};
const std::shared_ptr<Here>& here(); // of the calling thread, for the port of the process

inline constexpr c10::DeviceIndex kLeastPriority = 0, kGreatestPriority = -3;

c10::DeviceIndex current_device();
void set_device(int device);
StreamPtr current_stream(int device);
void set_stream(const StreamPtr&); // and its device
StreamPtr state_of(const c10::Stream&);

// What a c10::Event has: one frozen ticket, and the moment where it is timed.
struct EventState {
  std::mutex mutex;
  StreamPtr stream;
  Ticket ticket;
  c10::intrusive_ptr<Marker> marker;
  int64_t since = 0; // failures up to this value are not this event's to raise

  void record(const StreamPtr&, bool timed);
  bool done();
  void synchronize();
};

// Milliseconds between two records; throws in the order and words of torch.cuda.
double elapsed_time(EventState* start, EventState* end);

// Warns or raises before a wait for a stream that does not say so in its name, see
// set_sync_debug_mode.
extern std::atomic<int> sync_debug_mode;
void check_sync();

void synchronize_device(int device);

// Gives autograd threads for the devices where it has counted none.
void start_autograd_threads();
void note_uncounted(); // autograd asked for the number of devices, and got none

// Calls what watches submissions, before (without a ticket) and after.
void watch_submission(StreamState&, const CommandPtr&, Ticket, const std::vector<Ticket>& after);

} // namespace neuron
